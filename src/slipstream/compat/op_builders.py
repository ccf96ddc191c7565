"""`deepspeed.ops.op_builder`: DeepSpeed's op builders. They compile nothing.

A compatible builder loads functions with DeepSpeed's names and arguments, backed by Slipstream's kernels or torch; the others raise
ImportError with an alternative. The functions work on tensors and keep no `torch.optim` state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from slipstream.compat import aio
from slipstream.ops import optim


class OpBuilder:
    """`NAME` is the op's name in `deepspeed.ops.__compatible_ops__`."""

    NAME: ClassVar[str] = ""
    reason: ClassVar[str] = "it names no op"
    functions: ClassVar[Callable[[], dict[str, Any]] | None] = None

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether `load` succeeds. With `verbose`, writes the reason to stderr if not."""
        compatible = type(self).functions is not None
        if verbose and not compatible:
            sys.stderr.write(f"{type(self).__name__}: {self.reason}\n")
        return compatible

    def load(self, verbose: bool = False) -> Any:
        """Return an object whose attributes are the op's functions. Raises ImportError if Slipstream does not have the op."""
        functions = type(self).functions
        if functions is None:
            raise ImportError(f"{type(self).__name__}.load(): Slipstream has no {self.name!r} op; {self.reason}")
        return SimpleNamespace(__name__=self.name, **functions())

    jit_load = load


def _step(kernel: Callable[..., None], tensors: Sequence[Tensor], **hyperparameters: Any) -> None:
    """One step of a kernel of `slipstream.ops.optim`, in place. tensors: gradient, parameter, states."""
    grad, param, *states = (tensor.view(-1) for tensor in tensors)
    kernel(param, grad, *states, None, scale=1.0, **hyperparameters)


def _fused(kernel: Callable[..., None], arguments: str) -> Callable[..., None]:
    """A step over lists of tensors, one list per kind (gradients first), with DeepSpeed's order of hyperparameters."""

    def apply(chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *values: Any) -> None:
        if not int(noop_flag.sum()):
            for tensors in zip(*tensor_lists, strict=True):
                _step(kernel, tensors, **dict(zip(arguments.split(), values, strict=True)))

    return apply


def _updates(
    name: str, kernel: Callable[..., None], arguments: str, kept: Callable[[Sequence[Any]], dict[str, Any]] = lambda values: {}
) -> Callable[[], dict[str, Any]]:
    """In-place steps of numbered optimizers: create_NAME, NAME_update, destroy_NAME. `kept` selects hyperparameters from the values
    that `create` gets; each update passes the others."""

    def functions() -> dict[str, Any]:
        created: dict[int, dict[str, Any]] = {}

        def create(optimizer_id: int, *values: Any) -> int:
            created[optimizer_id] = kept(values)
            return 0

        def update(optimizer_id: int, step: int, *values: Any) -> int:
            names = arguments.split()
            param, grad, *states = values[len(names) :]
            hyperparameters = dict(zip(names, values, strict=False)) | created.get(optimizer_id, kept(()))
            _step(kernel, (grad, param, *states), step=max(1, step), **hyperparameters)
            return 0

        def destroy(optimizer_id: int) -> int:
            created.pop(optimizer_id, None)
            return 0

        return {f"create_{name}": create, f"{name}_update": update, f"destroy_{name}": destroy}

    return functions


def _lion(*tensors: Any, step: int, **hyperparameters: Any) -> None:
    optim.lion(*tensors, **hyperparameters)


def _decoupled(values: Sequence[Any]) -> dict[str, Any]:
    """values: lr, beta1, beta2, eps, weight_decay; adamw_mode (default True); should_log."""
    return {"decoupled": len(values) < 6 or bool(values[5])}


_ADAM_ORDER = "lr beta1 beta2 eps step decoupled bias_correction weight_decay"
_LION_ORDER = "lr beta1 beta2 step weight_decay"
_TRANSFORMER = "torch's scaled_dot_product_attention and torch.compile take its place"
_SERVING = "slipstream.init_inference and `slipstream serve` serve models"
_LATER = "the feature is not built yet"
_OPS: Mapping[str, tuple[str, Callable[[], dict[str, Any]] | str]] = {
    "CPUAdamBuilder": ("cpu_adam", _updates("adam", optim.adamw, "lr beta1 beta2 eps weight_decay bias_correction", _decoupled)),
    "CPUAdagradBuilder": ("cpu_adagrad", _updates("adagrad", partial(optim.adagrad, lr_decay=0.0), "lr eps weight_decay")),
    "CPULionBuilder": ("cpu_lion", _updates("lion", _lion, "lr beta1 beta2 weight_decay")),
    "FusedAdamBuilder": ("fused_adam", lambda: {"multi_tensor_adam": _fused(optim.adamw, _ADAM_ORDER)}),
    "FusedLionBuilder": ("fused_lion", lambda: {"multi_tensor_lion": _fused(_lion, _LION_ORDER)}),
    "UtilsBuilder": ("utils", lambda: {"flatten": _flatten_dense_tensors, "unflatten": _unflatten_dense_tensors}),
    "FusedLambBuilder": ("fused_lamb", "deepspeed.ops.lamb.FusedLamb makes Slipstream's LAMB"),
    "AsyncIOBuilder": ("async_io", lambda: {name: getattr(aio, name) for name in ("aio_handle", "aio_read", "aio_write")}),
    "GDSBuilder": ("gds", "AsyncIOBuilder().load().aio_handle() moves tensors of a GPU through host memory"),
    "PinMemoryBuilder": ("pin_memory", lambda: {"pin_handle": aio.pin_handle}),
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


def _class_of(builder: str, name: str, served: Callable[[], dict[str, Any]] | str) -> type[OpBuilder]:
    fields = {"reason": served} if isinstance(served, str) else {"functions": staticmethod(served)}
    return type(builder, (OpBuilder,), {"NAME": name, "__module__": "deepspeed.ops.op_builder", **fields})


BUILDERS: Mapping[str, type[OpBuilder]] = {builder: _class_of(builder, *op) for builder, op in _OPS.items()}
ALL_OPS: Mapping[str, OpBuilder] = {builder.NAME: builder() for builder in BUILDERS.values()}
CUDAOpBuilder = OpBuilder


def __getattr__(name: str) -> Any:
    if name == "__compatible_ops__":
        return {op: builder.is_compatible() for op, builder in ALL_OPS.items()}
    if name in BUILDERS:
        return BUILDERS[name]
    raise AttributeError(f"DeepSpeed 0.19.8 has no builder {name!r}; it has {', '.join(sorted(BUILDERS))}")
