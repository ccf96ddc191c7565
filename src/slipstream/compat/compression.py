"""Compression of single modules and tensors by DeepSpeed's names: `deepspeed.compression.helper` and `.basic_layer`,
`deepspeed.runtime.quantize`. The config's blocks (docs/COMPRESSION.md) do the same for a whole model.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from slipstream.compat.sequence import exchange_of
from slipstream.compat.utils import logger
from slipstream.compression import LinearLayer_Compress, init_compression
from slipstream.compression.compress import BLOCK, HEAD, SPARSE, TECHNIQUES, WEIGHT, own_clock, read_block
from slipstream.compression.layers import Compressed, can_compress, compress
from slipstream.compression.quantize import quantized
from slipstream.config.compression import CompressionTraining
from slipstream.parallel.exchange import Exchange, enter, gather_from, leave, scatter_to

# -- deepspeed.compression.helper --


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute at a path such as "encoder.layer.0"."""
    return operator.attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute at a path."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def is_module_compressible(module: nn.Module, mpu: Any = None) -> bool:
    return can_compress(module) or _sliced_kind(module, mpu) is not None


def module_replacement(
    model: nn.Module, module_name: str, compression_technique: Mapping[str, Mapping[str, Any]] | None = None, mpu: Any = None
) -> None:
    """Make a module a compressed one, which keeps its parameters, and switch techniques on in it.

    compression_technique: {technique: the values of its shared_parameters and of a group's params, in one}. mpu: whose
    ColumnParallelLinear and RowParallelLinear are compressed, too. Raises ValueError for another module, or values out of range.
    """
    module = recursive_getattr(model, module_name)
    sliced = _sliced_kind(module, mpu)
    if sliced is not None:
        recursive_setattr(model, module_name, sliced.of(mpu, module))
        module = recursive_getattr(model, module_name)
        module.set_up(own_clock(model))
    if not can_compress(module):
        raise ValueError(
            f"{module_name} is a {type(module).__name__}, and only Linear, Conv1D, Conv2d, Embedding and BatchNorm2d compress"
        )
    compress(module, own_clock(model))
    enabled = {name: values for name, values in (compression_technique or {}).items() if values["enabled"]}
    if enabled:
        init_compression(model, {BLOCK: {name: _block(name, values, module_name) for name, values in enabled.items()}})


def _block(technique: str, values: Mapping[str, Any], module_name: str) -> dict[str, Any]:
    """A technique's block of the config, for one module."""
    if technique not in TECHNIQUES:
        raise ValueError(f"{technique!r} is no technique of {BLOCK}: {', '.join(TECHNIQUES)}")
    part = type(getattr(CompressionTraining(), technique))
    group = get_args(part.model_fields["different_groups"].annotation)[1]
    params = {*type(group().params).model_fields} & {*values}
    shared = {name: value for name, value in values.items() if name not in params}
    if isinstance(shared.get("fp16_mixed_quantize"), bool):
        ratio = {"quantize_change_ratio": shared.pop("quantize_change_ratio")} if "quantize_change_ratio" in shared else {}
        shared["fp16_mixed_quantize"] = {"enabled": shared["fp16_mixed_quantize"], **ratio}
    own = {"params": {name: values[name] for name in params}, "modules": [f"^{re.escape(module_name)}$"]}
    return {"shared_parameters": shared, "different_groups": {module_name: own}}


def fix_compression(
    model: nn.Module,
    module_name: str,
    compression_technique: Mapping[str, Mapping[str, Any]],
    mask: Tensor | None = None,
    dim_reduction: bool = False,
) -> Tensor | None:
    """Make the result of the first technique that is enabled the module's own parameters. Returns what it keeps, bool, if related
    modules are to lose the rest.

    dim_reduction: the module loses rows, heads or channels in place of setting them to zero. mask: of another module, whose
    counterparts this one loses: inputs for rows and channels, outputs for heads.
    """
    layer = recursive_getattr(model, module_name)
    for technique, values in compression_technique.items():
        if not values.get("enabled") and mask is None:
            continue
        if mask is not None:
            keep = layer.keep_outputs if technique == HEAD or isinstance(layer, nn.BatchNorm2d) else layer.keep_inputs
            keep(_widened(mask, layer.weight.shape[0]) if technique == HEAD else mask.view(-1))
            return mask if technique == HEAD else None
        found: Tensor | None = layer.fix(TECHNIQUES[technique])
        if found is None or technique in (WEIGHT, SPARSE):
            return None
        if dim_reduction and technique == HEAD:
            layer.keep_inputs(_widened(found, layer.weight.shape[1]))
        elif dim_reduction:
            layer.keep_outputs(found)
        return found
    return None


def _widened(heads: Tensor, count: int) -> Tensor:
    return heads.reshape(-1).repeat_interleave(count // heads.numel())


# -- deepspeed.compression.basic_layer: Megatron's layers, of which each rank has a part --


class _Parallel(LinearLayer_Compress):
    """A compressed linear layer of which each rank of an mpu's model-parallel group has a part."""

    defaults: ClassVar[Mapping[str, bool]]  # options, beside `bias`
    cut: ClassVar[int]  # what is cut: 0 the inputs, 1 the outputs

    def __init__(self, mpu: Any, input_size: int, output_size: int, bias: bool = True, *given: bool, **options: bool) -> None:
        named = dict(zip(self.defaults, given, strict=False))
        if len(given) > len(self.defaults) or named.keys() & options.keys():
            raise TypeError(f"{type(self).__name__} takes {', '.join(self.defaults)}, each once; given {given} and {options}")
        options |= named
        if unknown := options.keys() - self.defaults.keys():
            raise TypeError(f"{type(self).__name__} has no option {min(unknown)!r}; it has {', '.join(self.defaults)}")
        sizes, ranks = [input_size, output_size], mpu.get_model_parallel_world_size()
        if sizes[self.cut] % ranks:
            raise ValueError(f"{type(self).__name__}: {ranks} model-parallel ranks do not divide {sizes[self.cut]} features")
        sizes[self.cut] //= ranks
        super().__init__(*sizes, bias=bias)
        self.mpu, self.input_size, self.output_size = mpu, input_size, output_size
        self.options = {**self.defaults, **options}
        vars(self).update(self.options)  # as Megatron's layers have them

    @classmethod
    def of(cls, mpu: Any, module: Any) -> _Parallel:
        """A compressed layer of an mpu's own layer, with its parameters."""
        bias = getattr(module, "bias", None)
        options = {name: getattr(module, name) for name in cls.defaults}
        with torch.device("meta"):
            made = cls(mpu, module.input_size, module.output_size, bias is not None, **options)
        made.weight = module.weight
        made.register_parameter("bias", bias)
        return made

    @functools.cached_property
    def _exchange(self) -> Exchange:
        return exchange_of(self.mpu.get_model_parallel_group(), self.weight.device)

    def _product(self, x: Tensor, with_bias: bool) -> tuple[Tensor, Tensor | None]:
        """The product with the compressed weight, and the bias that it has not added."""
        if self.activation_bits and self.is_on("activation"):
            x = self.compressed_input(x)
        used = self.compressed()
        bias = used.get("bias")
        return nn.functional.linear(x, used["weight"], bias if with_bias else None), None if with_bias else bias


class ColumnParallelLinear_Compress(_Parallel):
    """Megatron's ColumnParallelLinear: a rank has a part of the outputs. Returns (output, bias), bias None if it has been added."""

    defaults: ClassVar[Mapping[str, bool]] = {"gather_output": True, "skip_bias_add": False}
    cut = 1

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        options, exchange = self.options, self._exchange
        y, bias = self._product(enter(input_, exchange), not options["skip_bias_add"])
        return gather_from(y, exchange, y.dim() - 1) if options["gather_output"] else y, bias


class RowParallelLinear_Compress(_Parallel):
    """Megatron's RowParallelLinear: a rank has a part of the inputs. Returns (output, bias), bias None if it has been added."""

    defaults: ClassVar[Mapping[str, bool]] = {"input_is_parallel": False, "skip_bias_add": False}
    cut = 0

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        options, exchange = self.options, self._exchange
        own = input_ if options["input_is_parallel"] else scatter_to(input_, exchange, input_.dim() - 1)
        y, bias = self._product(own, False)
        y = leave(y, exchange)
        return (y, bias) if options["skip_bias_add"] or bias is None else (y + bias, None)


def _sliced_kind(module: nn.Module, mpu: Any) -> type[_Parallel] | None:
    if isinstance(module, Compressed):
        return None
    kinds: Iterable[type[_Parallel]] = (ColumnParallelLinear_Compress, RowParallelLinear_Compress)
    theirs = ((kind, getattr(mpu, kind.__name__.removesuffix("_Compress"), None)) for kind in kinds)
    return next((kind for kind, own in theirs if own is not None and isinstance(module, own)), None)


# -- deepspeed.runtime.quantize --


@dataclass(eq=False)
class Quantizer:
    """MoQ's steps over parameters of a script's own, which have `start_bits`, `target_bits` and `q_period` as attributes.

    Each `quantize` is a step: a parameter whose period has passed loses a bit, its period doubles, and its values are rounded in
    place. q_type: "symmetric" (or 0) or "asymmetric"; q_rounding: "nearest" (or 0) or "stochastic". q_mixed_fp16: after a change,
    the exact values fade out by `q_change_ratio` a step. use_quantizer_kernel: the formulas are the same, of 3 bits and more.
    """

    q_groups: int = 1
    q_mixed_fp16: bool = False
    q_change_ratio: float = 0.01
    q_type: str | int = 0
    q_rounding: str | int = 0
    q_verbose: bool = False
    q_eigenvalue: bool = False
    use_quantizer_kernel: bool = False
    layer_num: int = 0

    def __post_init__(self) -> None:
        self.qsteps, self.quantize_real_ratio = 0, 1.0
        self._seen: list[Any] = []

    def any_precision_switch(self) -> bool:
        """Whether a parameter loses a bit in the next step; True before the first one."""
        ahead = self.qsteps + 1
        return not self._seen or any(p.start_bits != p.target_bits and ahead >= p.q_period for p in self._seen)

    def step(self) -> None:
        self.qsteps += 1

    def update_fp16_ratio(self) -> None:
        if self.q_mixed_fp16:
            self.quantize_real_ratio = max(0.0, self.quantize_real_ratio - self.q_change_ratio)

    @torch.no_grad()
    def quantize(
        self,
        parameter_group: Sequence[Sequence[Any]],
        overflow: bool,
        eigenvalue_enabled: bool,
        block_eigenvalue: Mapping[int, tuple[float, int]] | None = None,
    ) -> None:
        """A step over groups of parameters; those of one dimension or without `start_bits` stay. A step that overflowed does not
        count, unless eigenvalues are measured. block_eigenvalue: what `Eigenvalue.compute_eigenvalue` returns."""
        if overflow and not eigenvalue_enabled:
            return
        self.step()
        self.update_fp16_ratio()
        self._seen = [p for group in parameter_group for p in group if p.dim() > 1 and getattr(p, "start_bits", None)]
        for p in self._seen:
            eigenvalue, layer = (block_eigenvalue or {}).get(id(p), (0.0, 0))
            p.data.copy_(self.compute_quantization(p, layer, 1 + math.floor(4 * eigenvalue)))

    def compute_quantization(self, input: Any, index: int = 0, factor: int = 1) -> Tensor:
        """The parameter's rounded values in this step; counts its schedule. Raises ValueError for bits below the target's."""
        if input.start_bits != input.target_bits and self.qsteps >= input.q_period:
            self.quantize_real_ratio = 1.0
            input.q_period *= 2 * factor
            input.start_bits -= 1
            if self.q_verbose:
                state = (input.start_bits, self.qsteps, input.q_period, index)
                logger.info("quantization: %d bits at step %d, period %d, layer %d", *state)
        least = 3 if self.use_quantizer_kernel else 1
        if input.start_bits < max(input.target_bits, least):
            raise ValueError(f"start_bits ({input.start_bits}) is below target_bits ({input.target_bits}), or the least, {least}")
        exact = input.detach()
        value = self.quantize_highbit(exact, input.start_bits)
        share = self.quantize_real_ratio if self.q_mixed_fp16 else 0.0
        return share * exact + (1 - share) * value if share else value

    def quantize_highbit(self, inputs: Tensor, num_bits: int) -> Tensor:
        """Values rounded to so many bits. Raises ValueError for asymmetric or stochastic rounding to 1 or 2."""
        symmetric, nearest = self.q_type in (0, "symmetric"), self.q_rounding in (0, "nearest", "nearest_neighbor")
        if num_bits <= 2 and not (symmetric and nearest):
            raise ValueError(f"{num_bits} bits are symmetric and rounded to the nearest only: q_type {self.q_type!r} is not")
        return quantized(inputs, num_bits, self.q_groups, "symmetric" if symmetric else "asymmetric", not nearest)

    def quantize_tenary(self, inputs: Tensor) -> Tensor:
        return quantized(inputs, 2, self.q_groups)

    def quantize_binary(self, inputs: Tensor) -> Tensor:
        return quantized(inputs, 1, self.q_groups)


def quantize_training(blocks: Mapping[str, Any]) -> tuple[Any, ...]:
    """DeepSpeed's nine values of weight quantization: quantize_weight_in_forward, enabled, quantize_groups, fp16_mixed_quantize,
    quantize_change_ratio, quantization_type, rounding, quantize_verbose, quantizer_kernel."""
    shared = read_block(blocks).weight_quantization.shared_parameters
    first = (shared.quantize_weight_in_forward, shared.enabled, shared.quantize_groups)
    mixed = (shared.fp16_mixed_quantize.enabled, shared.fp16_mixed_quantize.quantize_change_ratio)
    return (*first, *mixed, shared.quantization_type, shared.rounding, shared.quantize_verbose, shared.quantizer_kernel)
