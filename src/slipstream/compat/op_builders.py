"""`deepspeed.ops.op_builder`: DeepSpeed's builders of C++ code, by name. Nothing is compiled when one is asked.

A builder that `is_compatible()` loads functions of DeepSpeed's names and arguments, over Slipstream's kernels or torch; the others
say what to use in their place. `torch.optim` does not see what is stepped here: these are functions of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from slipstream.ops import optim


class OpBuilder:
    """`NAME` is the op's name in `deepspeed.ops.__compatible_ops__`."""

    NAME: ClassVar[str] = ""
    remedy: ClassVar[str] = "it names no op"
    functions: ClassVar[Callable[[], dict[str, Any]] | None] = None

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether `load` gives something. `verbose` says why not, to stderr."""
        compatible = type(self).functions is not None
        if verbose and not compatible:
            sys.stderr.write(f"{type(self).__name__}: {self.remedy}\n")
        return compatible

    def load(self, verbose: bool = False) -> Any:
        """The op's functions, as attributes. Raises ImportError where Slipstream has none of them."""
        functions = type(self).functions
        if functions is None:
            raise ImportError(f"{type(self).__name__}.load(): Slipstream has no {self.name!r} op; {self.remedy}")
        return SimpleNamespace(**functions())

    jit_load = load


def _adam() -> dict[str, Any]:
    """Steps of Adam, in place, for optimizers that `create_adam` has made known by a number."""
    decoupled: dict[int, bool] = {}

    def create_adam(
        optimizer_id: int,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        should_log: bool = False,
    ) -> int:
        decoupled[optimizer_id] = adamw_mode
        return 0

    def adam_update(
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        params: Tensor,
        grads: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
    ) -> int:
        _step_adam(
            (grads, params, exp_avg, exp_avg_sq),
            lr,
            beta1,
            beta2,
            eps,
            step,
            decoupled[optimizer_id],
            bias_correction,
            weight_decay,
        )
        return 0

    def destroy_adam(optimizer_id: int) -> int:
        decoupled.pop(optimizer_id, None)
        return 0

    return {"create_adam": create_adam, "adam_update": adam_update, "destroy_adam": destroy_adam}


def _step_adam(
    tensors: Sequence[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: bool,
    bias_correction: bool,
    weight_decay: float,
) -> None:
    grad, param, exp_avg, exp_avg_sq = (tensor.view(-1) for tensor in tensors)
    optim.adamw(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        None,
        scale=1.0,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        decoupled=bool(decoupled),
        bias_correction=bool(bias_correction),
    )


def _step_lion(tensors: Sequence[Tensor], lr: float, beta1: float, beta2: float, step: int, weight_decay: float) -> None:
    grad, param, exp_avg = (tensor.view(-1) for tensor in tensors)
    optim.lion(param, grad, exp_avg, None, scale=1.0, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)


def _each(step: Callable[..., None]) -> Callable[..., None]:
    """A step over lists: one of each kind of tensor (gradients first), as DeepSpeed's fused kernels take them."""

    def apply(chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *arguments: Any) -> None:
        if not int(noop_flag.sum()):
            for tensors in zip(*tensor_lists, strict=True):
                step(tensors, *arguments)

    return apply


def _lion() -> dict[str, Any]:
    def lion_update(
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        params: Tensor,
        grads: Tensor,
        exp_avg: Tensor,
    ) -> int:
        _step_lion((grads, params, exp_avg), lr, beta1, beta2, step, weight_decay)
        return 0

    return {"create_lion": _known, "lion_update": lion_update, "destroy_lion": _known}


def _adagrad() -> dict[str, Any]:
    def adagrad_update(
        optimizer_id: int, step: int, lr: float, eps: float, weight_decay: float, params: Tensor, grads: Tensor, exp_avg_sq: Tensor
    ) -> int:
        param, grad, squares = (tensor.view(-1) for tensor in (params, grads, exp_avg_sq))
        optim.adagrad(
            param, grad, squares, None, scale=1.0, lr=lr, lr_decay=0.0, eps=eps, weight_decay=weight_decay, step=max(1, step)
        )
        return 0

    return {"create_adagrad": _known, "adagrad_update": adagrad_update, "destroy_adagrad": _known}


def _known(optimizer_id: int, *hyperparameters: Any) -> int:
    """Each update brings its hyperparameters, so nothing is kept of them."""
    return 0


_TRANSFORMER = "torch's scaled_dot_product_attention and torch.compile take its place"
_SERVING = "slipstream.init_inference and `slipstream serve` serve models"
_LATER = "the feature is not built yet"
_OPS: Mapping[str, tuple[str, Callable[[], dict[str, Any]] | str]] = {
    "CPUAdamBuilder": ("cpu_adam", _adam),
    "CPUAdagradBuilder": ("cpu_adagrad", _adagrad),
    "CPULionBuilder": ("cpu_lion", _lion),
    "FusedAdamBuilder": ("fused_adam", lambda: {"multi_tensor_adam": _each(_step_adam)}),
    "FusedLionBuilder": ("fused_lion", lambda: {"multi_tensor_lion": _each(_step_lion)}),
    "UtilsBuilder": ("utils", lambda: {"flatten": _flatten_dense_tensors, "unflatten": _unflatten_dense_tensors}),
    "FusedLambBuilder": ("fused_lamb", "deepspeed.ops.lamb.FusedLamb makes Slipstream's LAMB"),
    "AsyncIOBuilder": ("async_io", "offload_optimizer and offload_param use the disk"),
    "GDSBuilder": ("gds", "offload_optimizer and offload_param use the disk through pinned memory"),
    "PinMemoryBuilder": ("pin_memory", "torch.Tensor.pin_memory() pins"),
    "CCLCommBuilder": ("deepspeed_ccl_comm", "torch.distributed with gloo communicates"),
    "ShareMemCommBuilder": ("deepspeed_shm_comm", 'the engine of deepspeed.initialize uses shared memory by itself ("transport")'),
    "DeepCompileBuilder": ("dc", "engine.compile() is torch.compile"),
    "EvoformerAttnBuilder": ("evoformer_attn", _TRANSFORMER),
    "FPQuantizerBuilder": ("fp_quantizer", _LATER),
    "QuantizerBuilder": ("quantizer", _LATER),
    "RandomLTDBuilder": ("random_ltd", _LATER),
    "SparseAttnBuilder": ("sparse_attn", "FlexAttention of torch takes block masks"),
    "SpatialInferenceBuilder": ("spatial_inference", _TRANSFORMER),
    "TransformerBuilder": ("transformer", _TRANSFORMER),
    "StochasticTransformerBuilder": ("stochastic_transformer", _TRANSFORMER),
    "InferenceBuilder": ("transformer_inference", _SERVING),
    "InferenceCoreBuilder": ("inference_core_ops", _SERVING),
    "InferenceCutlassBuilder": ("cutlass_ops", _SERVING),
    "RaggedOpsBuilder": ("ragged_device_ops", _SERVING),
    "RaggedUtilsBuilder": ("ragged_ops", _SERVING),
    "NotImplementedBuilder": ("deepspeed_not_implemented", "it stands for the ops that a device does not have"),
}


def _made(builder: str, name: str, served: Callable[[], dict[str, Any]] | str) -> type[OpBuilder]:
    fields = {"remedy": served} if isinstance(served, str) else {"functions": staticmethod(served)}
    return type(builder, (OpBuilder,), {"NAME": name, "__module__": "deepspeed.ops.op_builder", **fields})


BUILDERS: Mapping[str, type[OpBuilder]] = {builder: _made(builder, *op) for builder, op in _OPS.items()}
ALL_OPS: Mapping[str, OpBuilder] = {builder.NAME: builder() for builder in BUILDERS.values()}
CUDAOpBuilder = OpBuilder


def __getattr__(name: str) -> Any:
    if name == "__compatible_ops__":
        return {op: builder.is_compatible() for op, builder in ALL_OPS.items()}
    if name in BUILDERS:
        return BUILDERS[name]
    raise AttributeError(f"DeepSpeed 0.19.8 has no builder {name!r}; it has {', '.join(sorted(BUILDERS))}")
