"""Linear layers for inference in any module, whose products the native engine's kernels compute (ops/products.py).

A layer's weight is a `PackedMatrix`: on a CPU with native kernels in their panels, elsewhere row-major. A state_dict holds it
row-major, so it fits every device and machine. Tied layers share one `PackedMatrix`.
"""

from __future__ import annotations

import fnmatch
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from slipstream.ops import build, products
from slipstream.ops.matrices import (
    PANEL,
    TYPES,
    Int4,
    Int8,
    Matrix,
    MatrixRecord,
    Table,
    dequantize,
    fill,
    record_of,
    rows_of,
    tables_of,
    to_int4,
    to_int8,
)
from slipstream.ops.pages import Pool
from slipstream.parallel.tensor import Sliced
from slipstream.zero import access, transforms
from slipstream.zero.hooks import eager

logger = logging.getLogger(__name__)

KINDS = ("int8", "int4", "bf16")
BLOCKS = (32, 64, 128)  # of int4
_PLAIN = {"transformers.pytorch_utils": "Conv1D", "transformers.models.falcon.modeling_falcon": "FalconLinear"}
_PARTS = {"data": "codes", "scale": "scale", "low": "low"}  # field of a `MatrixRecord` -> buffer
_POOLED_NBYTES = 64 << 20  # bytes of floats in a module, above which its panels share huge pages


class PackedMatrix(nn.Module):
    """A weight [out_features, in_features]."""

    codes: Tensor
    _tables: dict[str, Table]  # buffer -> panels; the buffer's own rows are then on meta
    _record: MatrixRecord | None

    def __init__(self, matrix: Matrix, pool: Pool | None = None) -> None:
        super().__init__()
        self.form = type(matrix) if isinstance(matrix, Int8 | Int4) else None
        for name in _PARTS.values():
            self.register_buffer(name, None)
        self._put(matrix, pool)

    @property
    def bits(self) -> int:
        return {Int8: 8, Int4: 4, None: 16}[self.form]

    @property
    def is_native(self) -> bool:
        """Whether the native kernels compute on this device."""
        return self.codes.is_cpu and build.load().kernels is not None

    @property
    def matrix(self) -> Matrix:
        """The weight, row-major; a copy if it is in panels."""
        parts = self._rows().values()
        return next(iter(parts)) if self.form is None else self.form(*parts)

    @eager
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [rows, in_features] -> [rows, out_features], in fp32 by the native kernels, else in x's dtype. `bias`: fp32, padded."""
        if cast(Any, torch.jit).is_tracing() or transforms.is_active() or isinstance(x, FakeTensor):
            raise ValueError(
                "torch.jit.trace, torch.export and torch.func see torch's operations only, and a packed layer computes in native "
                "code: trace the model before slipstream.quantize, or call the quantized one itself (or under torch.compile)"
            )
        if is_traceable_wrapper_subclass(cast(Any, x)):
            raise ValueError(f"the input is a {type(x).__name__}, which only torch's operations read: give a plain tensor")
        if self._record is None or self._record.data != self.codes.data_ptr():
            if self.is_native != bool(self._tables):
                self._put(self.matrix)  # it came from another device, or from a file of another machine
            self._record = self._described()
        if self.form is Int4 and (more := self._record.num_features - x.shape[1]):
            x = nn.functional.pad(x, (0, more))
        if self._tables:
            return products.linear(x.float(), self._record, bias)
        return products.linear_by_rows(x, self.matrix, None if bias is None else bias[: self._record.num_columns])

    def _put(self, matrix: Matrix, pool: Pool | None = None) -> None:
        """Set the value, given row-major, in the layout of the device's kernels."""
        parts = [matrix.detach()] if isinstance(matrix, Tensor) else matrix
        for name, part in zip(_PARTS.values(), parts, strict=False):  # int4's scales are fp16 values
            setattr(self, name, (part.half() if part.is_floating_point() and self.form is Int4 else part).contiguous())
        self._tables, self._record = {}, None
        if self.is_native:
            for field, table in tables_of(self.matrix).items():
                nbytes, name = table.num_panels(1) * table.panel_nbytes, _PARTS[field]
                panels = torch.empty(nbytes, dtype=torch.uint8) if pool is None else pool.empty(nbytes)
                fill(panels.data_ptr(), table)
                setattr(self, name, panels)
                self._tables[name] = table._replace(rows=table.rows.to("meta"))

    def _rows(self) -> dict[str, Tensor]:
        """The matrix's parts, row-major: buffer -> tensor."""
        tables = self._tables
        return {name: rows_of(part, tables[name]) if tables else part for name, part in self.named_buffers()}

    def _described(self) -> MatrixRecord:
        parts = [table.rows for table in self._tables.values()] or list(self.buffers())
        record = record_of(parts[0] if self.form is None else self.form(*parts))
        for field, name in _PARTS.items():
            part = getattr(self, name)
            setattr(record, field, None if part is None else part.data_ptr())
        return record

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: part for name, part in self._rows().items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *lists: list[str]) -> None:
        missing, unexpected, errors = lists
        saved = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        rows = self._rows()
        missing += [prefix + name for name in rows if name not in saved]
        unexpected += [prefix + name for name in saved if name not in rows and strict]
        for name in [name for name in rows if name in saved]:
            wanted, given = (f"{part.dtype} {list(part.shape)}" for part in (rows[name], saved[name]))
            if wanted != given:
                errors.append(
                    f"{prefix}{name} is {given}, and here {wanted}: quantize to the dtype and block that it was saved with"
                )
        if not errors and rows.keys() <= saved.keys():
            parts = [saved[name].to(self.codes.device, copy=True) for name in rows]
            self._put(parts[0] if self.form is None else self.form(*parts))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_record": None}  # it holds addresses of this process


class PackedLinear(nn.Module):
    """`nn.Linear` for inference, with a `PackedMatrix`. Results have the input's dtype, or autocast's; sums are fp32."""

    _bias: Tensor | None

    def __init__(self, matrix: PackedMatrix, shape: Sequence[int], bias: Tensor | None, dtype: torch.dtype) -> None:
        """`shape`: of the weight, [out_features, in_features]; int4 may have more inputs (padding). `dtype`: of `weight`."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.matrix, self.dtype = matrix, dtype
        padded = None if bias is None else nn.functional.pad(bias.detach().float(), (0, -len(bias) % (2 * PANEL)))
        self.register_buffer("_bias", padded, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{self} computes no gradients: call the model under torch.no_grad(). To train adapters on quantized weights, use "
                f"slipstream.quantize(model, bits=4), without a dtype"
            )
        if x.shape[-1] != self.in_features:
            raise ValueError(f"the input of {self} has the shape {list(x.shape)}; its last dimension must be {self.in_features}")
        kind, device = x.device.type, self.matrix.codes.device
        if x.device != device:
            raise ValueError(f"the input of {self} is on {x.device}, and its weight on {device}: move one of them")
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        y = self.matrix.multiply(x.reshape(-1, self.in_features), self._bias)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if y.dtype is dtype else y.to(dtype)

    @property
    def bias(self) -> Tensor | None:
        return None if self._bias is None else self._bias[: self.out_features]

    @property
    def weight(self) -> Tensor:
        """A tensor for code that reads the weight's dtype, or multiplies by it: each operation on it dequantizes it."""
        return _LazyWeight(self)

    def dequantized(self) -> Tensor:
        """The weight [out_features, in_features] in `dtype`."""
        return dequantize(self.matrix.matrix)[:, : self.in_features].to(self.dtype)

    def extra_repr(self) -> str:
        kernels = "native" if self.matrix.is_native else "torch"
        has_bias = self._bias is not None
        return f"{self.in_features}, {self.out_features}, bias={has_bias}, bits={self.matrix.bits}, kernels={kernels}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        """Move the layer. A cast changes the dtype of `weight`, but no codes or scales."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        super()._apply(lambda part: fn(part.view(torch.uint8)).view(part.dtype), recurse)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *lists: list[str]) -> None:
        missing, _, errors = lists
        if prefix + "weight" in state_dict:
            errors.append(f"{prefix}weight is not quantized: load it before slipstream.quantize")
        given = state_dict.get(prefix + "bias")
        if self.bias is not None and given is None:
            missing.append(prefix + "bias")
        elif self.bias is not None and given.shape == self.bias.shape:
            self.bias.copy_(given)
        elif given is not None:
            errors.append(f"{prefix}bias has the shape {list(given.shape)} and does not fit {self}")


class _LazyWeight(Tensor):
    """A layer's weight for code that reads it as a tensor."""

    layer: PackedLinear

    @staticmethod
    def __new__(cls, layer: PackedLinear) -> _LazyWeight:
        shape, device = (layer.out_features, layer.in_features), layer.matrix.codes.device
        weight: _LazyWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=layer.dtype, device=device)
        weight.layer = layer
        return weight

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map(_floats, args), **tree_map(_floats, kwargs or {}))


def _floats(value: Any) -> Any:
    return value.layer.dequantized() if isinstance(value, _LazyWeight) else value


# -- in place of a module's own --------------------------------------------------------------------------------------------


def kind_of(dtype: torch.dtype | str, block: int | None) -> str:
    """The entry of `KINDS` for a dtype. Raises ValueError for others, and for a block size that int4 does not have."""
    kind = {torch.int8: "int8", torch.bfloat16: "bf16", "bfloat16": "bf16"}.get(dtype, dtype)
    if kind not in KINDS:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(KINDS)}")
    if block is not None and (kind != "int4" or block not in BLOCKS):
        raise ValueError(f"block is {block}, with dtype {kind}; it is for int4, one of {', '.join(map(str, BLOCKS))}")
    return str(kind)


@torch.no_grad()
def pack(model: nn.Module, kind: str, *, block: int = 32, include: Sequence[str] = ("*",), skip: Sequence[str] = ()) -> nn.Module:
    """`slipstream.quantize` with a dtype."""
    chosen = _chosen(model, include, skip)
    nbytes, count, packed_nbytes = sum(layers[0].weight.nbytes for layers, _ in chosen), len(chosen), 0
    pool = Pool() if nbytes >= _POOLED_NBYTES else None
    head = getattr(model, "get_output_embeddings", lambda: None)()  # of transformers
    while chosen:  # a layer's floats are freed before the next one is packed
        layers, places = chosen.pop()
        weight = layers[0].weight.detach()
        weight = (weight if isinstance(layers[0], nn.Linear) else weight.T).contiguous()
        matrix = PackedMatrix(matrix_of(weight, "int8" if kind == "int4" and head in layers else kind, block), pool)
        packed_nbytes += sum(part.nbytes for part in matrix.buffers())
        for layer, names in zip(layers, places, strict=True):
            packed = PackedLinear(matrix, weight.shape, None if _is_cut(layer) else layer.bias, weight.dtype)
            packed.train(layer.training)
            if _is_cut(layer):  # its own forward joins the ranks' shares and adds the bias
                layer.weight, layer.packed = None, packed
                vars(layer)["product"] = partial(_product, packed)
                continue
            for name in names:
                if layer is model:
                    model = packed
                else:
                    model.set_submodule(name, packed)
        layers.clear()
    logger.info("quantize: %d matrices to %s, %.1f MB to %.1f MB", count, kind, nbytes / 1e6, packed_nbytes / 1e6)
    return model.requires_grad_(False)


def _is_cut(layer: nn.Module) -> bool:
    return isinstance(layer, Sliced) and layer.slices is not None


def _product(packed: PackedLinear, x: Tensor, bias: Tensor | None) -> Tensor:
    return packed(x) if bias is None else packed(x) + bias


def matrix_of(weight: Tensor, kind: str, block: int) -> Matrix:
    """`weight` [out, in] in one of `KINDS`. For int4, inputs are padded to whole blocks."""
    if kind == "bf16":
        return weight.to(torch.bfloat16)
    if kind == "int8":
        return to_int8(weight)
    return to_int4(nn.functional.pad(weight, (0, -weight.shape[1] % block)), block)


def named_layers(model: nn.Module, kind: Any, include: Sequence[str], skip: Sequence[str]) -> dict[Any, list[str]]:
    """The modules of `kind` that the patterns match, with their names, several for a shared module; without modules marked to stay
    exact (`moe.layer.keep_exact`). Raises ValueError for a pattern that matches none, and for a lazy parameter."""
    if lazy := [name for name, param in model.named_parameters() if is_lazy(param)]:
        raise ValueError(f"parameter {lazy[0]!r} is lazy, and has no shape before the first forward: run one, then quantize")
    names: dict[Any, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kind) and not getattr(module, "stays_exact", False):
            names.setdefault(module, []).append(name)
    for option, patterns in (("include", include), ("skip", skip)):
        unused = [one for one in patterns if one != "*" and not any(fnmatch.filter(of_layer, one) for of_layer in names.values())]
        if unused:
            first = ", ".join(name for name, *_ in list(names.values())[:8]) or "none"
            raise ValueError(f"{option}={unused} matches the name of no nn.Linear of {type(model).__name__}; its first are {first}")

    def matches(of_layer: Sequence[str], patterns: Sequence[str]) -> bool:
        return any(fnmatch.filter(of_layer, pattern) for pattern in patterns)

    return {layer: of_layer for layer, of_layer in names.items() if matches(of_layer, include) and not matches(of_layer, skip)}


def _chosen(model: nn.Module, include: Sequence[str], skip: Sequence[str]) -> list[tuple[list[Any], list[list[str]]]]:
    """Layers to replace, grouped by shared weight, and the names of each. Logs which linear layers stay, and why."""
    if units := access.units_of(model.parameters()):
        raise ValueError(
            f"parameter {next(iter(units)).names[0]!r} belongs to an engine, which trains it, and these layers are for inference: "
            f"quantize after engine.destroy(), or a model opened from what engine.save_pretrained() writes"
        )
    plain = [nn.Linear, *(getattr(sys.modules[name], each) for name, each in _PLAIN.items() if name in sys.modules)]
    groups: dict[int, tuple[list[Any], list[list[str]]]] = {}
    for layer, names in named_layers(model, tuple(plain), include, skip).items():
        if reason := _why_not(layer, names[0], plain):
            logger.warning("quantize: %s stays as it is: %s", names[0], reason)
            continue
        layers, places = groups.setdefault(id(layer.weight), ([], []))
        layers.append(layer)
        places.append(names)
    if not groups:
        raise ValueError(
            f"no linear layer of {type(model).__name__} is left to quantize: include={list(include)}, skip={list(skip)}"
        )
    return list(groups.values())


def _why_not(layer: Any, name: str, plain: Sequence[type[nn.Module]]) -> str | None:
    """Why a linear layer cannot be replaced. `plain`: the classes whose forward is just the product. Raises ValueError for weights
    without usable values."""
    own: Any = type(layer).__bases__[1] if _is_cut(layer) else type(layer)
    in_attention = isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)  # attention reads its weight
    if in_attention or own.forward not in [each.forward for each in plain]:
        return f"a {type(layer).__name__} computes its product in its own way"
    if layer._forward_pre_hooks or layer._forward_hooks:
        return "it has hooks"
    if layer.weight.dtype not in TYPES or not layer.weight.numel():
        return f"its weight is {layer.weight.dtype} {list(layer.weight.shape)}"
    if is_traceable_wrapper_subclass(layer.weight):
        return f"its weight is a {type(layer.weight).__name__}, which only torch's operations read"
    if layer.weight.is_meta:
        raise ValueError(f"layer {name!r} is on the meta device, without values: load the model, then quantize it")
    if not bool(layer.weight.isfinite().all()):
        raise ValueError(
            f"layer {name!r} has non-finite weights; leave it out with skip={[name]} (slipstream.quantize), or open an engine in "
            f'the dtype of the files (dtype "auto")'
        )
    return None
