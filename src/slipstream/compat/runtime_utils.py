"""`deepspeed.runtime.utils`: partitions, gradient norms, overflow checks and other helpers that scripts import.

With `mpu`, norms are reduced over its model-parallel group. Gradients that an engine shards are not in `param.grad`; use
`engine.get_global_grad_norm()` for their norm.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.compat.accelerator import get_accelerator
from slipstream.parallel.layers import partition_uniform
from slipstream.zero.trees import tensors_in

noop_context = nullcontext


def noop_decorator(function: Any) -> Any:
    return function


class DummyOptim:
    """An object with param_groups."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """'base(1, x=2)' for call_to_str("base", 1, x=2)."""
    return f"{base}({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


def get_only_unique_item(items: Iterable[Any]) -> Any:
    unique = set(items)
    if len(unique) != 1:
        raise RuntimeError(f"expected there to be only one unique element in {items}")
    return unique.pop()


def ensure_directory_exists(filename: str) -> None:
    """Create the directory of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


# -- partitions --


class PartitionedTensor:
    """One range of a flat tensor on each rank of a group. `full()` and the constructor's group are collective."""

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Any = None) -> None:
        self.group = group
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.shape), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        start, stop = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[start:stop].clone()

    @classmethod
    def from_meta(cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None) -> PartitionedTensor:
        """Restore from the same rank's `to_meta()` and `data()`."""
        dims, *values = meta.tolist()
        made = cls(torch.empty(0), group)
        made.orig_size, (parts, rank), made.partition = values[:dims], values[dims : dims + 2], values[dims + 2 :]
        if (parts, rank) != (made.num_parts, made.rank):
            raise ValueError(f"from_meta: part {rank} of {parts} was passed to rank {made.rank} of a group of {made.num_parts}")
        made.local_data = local_part.detach()
        made.orig_device = torch.device(device) if device is not None else local_part.device
        return made

    def to_meta(self) -> Tensor:
        """[dimensions, *shape, parts, rank, *bounds], int64."""
        values = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(values, dtype=torch.int64, device=self.orig_device)

    def data(self) -> Tensor:
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.size()

    def full_size(self) -> list[int]:
        return self.orig_size

    def full(self, device: Any = None) -> Tensor:
        """All-gather the full tensor in its original shape. Collective."""
        longest = max(stop - start for start, stop in itertools.pairwise(self.partition))
        padded = self.local_data.new_zeros(longest)
        padded[: len(self.local_data)] = self.local_data
        parts = [torch.empty_like(padded) for _ in range(self.num_parts)]
        dist.all_gather(parts, padded, group=self.group)
        lengths = (stop - start for start, stop in itertools.pairwise(self.partition))
        flat = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        return flat.view(self.orig_size).to(self.orig_device if device is None else device)


# -- overflow --


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Return a boolean scalar on the tensor's device."""
    return (x._values() if x.is_sparse else x).isfinite().all().logical_not()


def is_invalid_grad_norm(norm: Any) -> bool:
    """Whether a norm, or any of a tensor of norms, is not finite or negative (-1 may stand for not finite)."""
    norms = torch.as_tensor(norm, dtype=torch.float64)
    return bool((~norms.isfinite() | (norms < 0)).any())


class CheckOverflow:
    """Check whether gradients are not finite on any rank that has a part of the model.

    param_groups         lists of parameters
    mpu                  also check its model-parallel group
    zero_reduce_scatter  check all ranks; the default if `deepspeed` is an engine without enable_backward_allreduce
    """

    def __init__(self, param_groups: Any = None, mpu: Any = None, zero_reduce_scatter: bool = False, deepspeed: Any = None) -> None:
        self.mpu = mpu
        self.everywhere = zero_reduce_scatter or (mpu is None and not getattr(deepspeed, "enable_backward_allreduce", True))
        self.params = [param for group in param_groups for param in group] if param_groups else None

    def check_using_norm(self, norm_group: Iterable[Any], reduce_overflow: bool = True) -> bool:
        overflow = any(is_invalid_grad_norm(norm) for norm in norm_group)
        return self._on_any_rank(overflow, self.mpu is None and reduce_overflow)

    def check(self, param_groups: Any = None) -> bool:
        params = self.params if param_groups is None else [param for group in param_groups for param in group]
        if params is None:
            raise AssertionError("CheckOverflow.check(): give param_groups here or to the constructor")
        return self.has_overflow(params)

    def has_overflow_serial(self, params: Iterable[nn.Parameter]) -> bool:
        return any(bool(has_inf_or_nan(param.grad)) for param in params if param.grad is not None)

    def has_overflow(self, params: Iterable[nn.Parameter], has_moe_params: bool | None = None) -> bool:
        return self._on_any_rank(self.has_overflow_serial(params), self.everywhere)

    def _on_any_rank(self, overflow: bool, everywhere: bool) -> bool:
        flag = torch.tensor(float(overflow), device=get_accelerator().current_device())
        if dist.is_initialized() and (everywhere or self.mpu is not None):
            group = None if everywhere else self.mpu.get_model_parallel_group()
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag)


# -- norms --


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


def _finite_or(value: float, total: Tensor) -> float:
    return float(total) if bool(total.isfinite()) else value


def get_global_norm(norm_list: Iterable[Any]) -> float:
    """Combine the norms of parts into one; infinity if any is negative or not finite."""
    norms = [float(norm) for norm in norm_list]
    return math.inf if any(map(is_invalid_grad_norm, norms)) else math.sqrt(sum(norm * norm for norm in norms))


def combine_grad_norm_groups(norm_groups: Iterable[Any], norm_type: float = 2) -> Tensor:
    """Like `get_global_norm`, for any norm type. Returns a tensor."""
    stacked = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norm_groups])
    return torch.full_like(stacked[0], math.inf) if is_invalid_grad_norm(stacked) else torch.linalg.vector_norm(stacked, norm_type)


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
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for param in params:
        param.grad.detach().mul_(factor)
    return total


def get_flattened_grad_norm(parameters: Any, norm_type: float = 2, mpu: Any = None, grad_norm_mask: Any = None) -> float:
    """Return the norm of the gradients; -1 if not finite. grad_norm_mask: per parameter, (n, 2) ranges to exclude."""
    params = [param for param in _tensors(parameters) if param.grad is not None]
    grads = [param.grad.detach() for param in params]
    for i, ranges in enumerate(grad_norm_mask or []):
        grads[i] = grads[i].clone()
        for start, stop in torch.as_tensor(ranges).tolist():
            grads[i][start:stop] = 0
    return _finite_or(-1.0, _norm(grads, float(norm_type), mpu))


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of the parameters; -1 if it is not finite."""
    return _finite_or(-1.0, _norm(_once(_tensors(parameters), mpu), float(norm_type), mpu))


def get_grad_zeros(parameters: Any, mpu: Any = None) -> float:
    """Count the zero elements of the gradients."""
    grads = [param.grad for param in _once(_tensors(parameters), mpu) if param.grad is not None]
    zeros = torch.tensor(float(sum(grad.numel() - int(torch.count_nonzero(grad)) for grad in grads)))
    if mpu is not None:
        zeros = zeros.to(get_accelerator().current_device())
        dist.all_reduce(zeros, group=mpu.get_model_parallel_group())
    return float(zeros)


# -- trees, lists and files --


def get_tensor_bytes(item: Any) -> int:
    """Return the bytes of all tensors in a tree."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(item))


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Whether two lists or two dicts are equal, with tensors compared by value."""
    if type(inputs1) is not type(inputs2) or not isinstance(inputs1, (list, dict)) or len(inputs1) != len(inputs2):
        return False
    if isinstance(inputs1, dict):
        return inputs1.keys() == inputs2.keys() and all(_equal(value, inputs2[key]) for key, value in inputs1.items())
    return all(map(_equal, inputs1, inputs2))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    return bool(one == other)


def align_dense_tensors(tensor_list: list[Tensor], alignment: int) -> list[Tensor]:
    """Append a tensor of zeros if the number of elements is not a multiple of `alignment`."""
    missing = -sum(tensor.numel() for tensor in tensor_list) % alignment
    return [*tensor_list, tensor_list[0].new_zeros(missing)] if missing else tensor_list


def filter_empty_parameters(params: Any) -> Any:
    """Remove parameters without elements, and groups that become empty, from a list of parameters or groups."""
    if not isinstance(params, (list, tuple)) or not params:
        return params
    if not isinstance(params[0], dict):
        return [param for param in params if param.numel()]
    groups = [{**group, "params": [param for param in group["params"] if param.numel()]} for group in params]
    return [group for group in groups if group["params"]]


def is_optimized_parameter(param: Any) -> bool:
    return bool(param.requires_grad and getattr(param, "ds_numel", param.numel()) > 0)


def get_inactive_params(param_list: Iterable[Any]) -> list[Any]:
    """Return the parameters that are currently sharded."""
    return [param for param in param_list if getattr(getattr(param, "ds_status", None), "name", "") == "NOT_AVAILABLE"]


def maybe_loss_for_backward(value: Any) -> bool:
    """Whether `value` is a one-element tensor with a graph."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None


def get_checkpoint_folder_size(save_dir: str, tag: str, local_rank: int | None = None) -> int:
    """Return the bytes of a checkpoint's files; rank 0 gets the sum over ranks with local_rank 0. Collective."""
    files = (path for path in Path(save_dir, tag).rglob("*") if path.is_file()) if local_rank == 0 else ()
    size = torch.tensor(sum(os.path.getsize(path) for path in files), device=get_accelerator().current_device())
    if dist.is_initialized():
        dist.reduce(size, dst=0)
    return int(size)


def get_ma_status() -> int:
    """Return the allocated bytes of the device on rank 0; 0 on other ranks."""
    return 0 if dist.is_initialized() and dist.get_rank() else get_accelerator().memory_allocated()


def empty_cache() -> None:
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()
