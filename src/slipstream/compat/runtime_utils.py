"""`deepspeed.runtime.utils`: norms and other helpers that scripts import.

With `mpu`, norms are reduced over its model-parallel group. Gradients that an engine shards are not in `param.grad`; use
`engine.get_global_grad_norm()` for their norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.compat.accelerator import get_accelerator
from slipstream.zero.trees import tensors_in

noop_context = nullcontext


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """'base(1, x=2)' for call_to_str("base", 1, x=2)."""
    return f"{base}({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Return a boolean scalar on the tensor's device."""
    return (x._values() if x.is_sparse else x).isfinite().all().logical_not()


def is_invalid_grad_norm(norm: Any) -> bool:
    """Whether a norm, or any of a tensor of norms, is not finite or negative (-1 may stand for not finite)."""
    norms = torch.as_tensor(norm, dtype=torch.float64)
    return bool((~norms.isfinite() | (norms < 0)).any())


def is_model_parallel_parameter(p: Any) -> bool:
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def _tensors(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _norm(tensors: Iterable[Tensor], norm_type: float, mpu: Any = None) -> Tensor:
    """Return the fp32 norm of all tensors, reduced over the model-parallel group of `mpu`. A rank may pass no tensors."""
    norms = [tensor.detach().float().norm(norm_type) for tensor in tensors]
    device = norms[0].device if norms else torch.device(get_accelerator().current_device())
    stacked, largest = torch.stack(norms) if norms else torch.zeros(1, device=device), math.isinf(norm_type)
    total = stacked.max() if largest else stacked.pow(norm_type).sum()
    if mpu is not None:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(total, op=op, group=mpu.get_model_parallel_group())
    return total if largest else total.pow(1.0 / norm_type)


def _once(params: Iterable[Any], mpu: Any) -> list[Any]:
    """Return the parameters that this rank counts: only the first model-parallel rank counts replicated ones."""
    first = mpu is None or mpu.get_model_parallel_rank() == 0
    return [param for param in params if first or is_model_parallel_parameter(param)]


def get_global_norm(norm_list: Iterable[Any]) -> float:
    """Combine the norms of parts into one; infinity if any is negative or not finite."""
    norms = [float(norm) for norm in norm_list]
    return math.inf if any(map(is_invalid_grad_norm, norms)) else math.sqrt(sum(norm * norm for norm in norms))


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> Tensor:
    """Return the fp32 norm of all tensors; -1 if it is not finite."""
    total = _norm(input_tensors, float(norm_type), mpu)
    mask_nan_or_inf_with_val_inplace(total)
    return total


def mask_nan_or_inf_with_val_inplace(input: Tensor, device: Any = None, val: float = -1.0) -> None:
    input.masked_fill_(~input.isfinite(), val)


def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor], max_norm: float = 1.0, global_norm: Any = None, mpu: Any = None, eps: float = 1e-6
) -> Any:
    """Scale the tensors in place to a norm of at most `max_norm`. Returns the norm before scaling."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    factor = max_norm / (norm + eps)
    if factor < 1:
        for tensor in input_tensors:
            tensor.detach().mul_(factor)
    return norm


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Scale the gradients in place to a norm of at most `max_norm`. Returns the prior norm, averaged over all ranks."""
    params = [param for param in _tensors(parameters) if param.grad is not None]
    counted = _once(params, mpu) if not math.isinf(norm_type) else params
    total = _norm([param.grad for param in counted], float(norm_type), mpu)
    if dist.is_initialized():
        total = total / dist.get_world_size()
        dist.all_reduce(total)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of the parameters; -1 if it is not finite."""
    return float(get_global_norm_of_tensors(_once(_tensors(parameters), mpu), norm_type, mpu))


def get_tensor_bytes(item: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(item))


def maybe_loss_for_backward(value: Any) -> bool:
    """Whether `value` is a one-element tensor with a graph."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None


def get_ma_status() -> int:
    """Return the allocated bytes of the device on rank 0; 0 on other ranks."""
    return 0 if dist.is_initialized() and dist.get_rank() else get_accelerator().memory_allocated()


def empty_cache() -> None:
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()
