"""Weights quantized by other tools, in safetensors: GPTQ, AWQ, compressed-tensors and fp8.

`restored` maps a file's names to the model's: the parts of a matrix (`q_proj.qweight`, `.qzeros`, `.scales`) form `q_proj.weight`.
Two kinds are kept exactly: 4-bit codes as `Int4`, w = q * scale + low with low = -zero * scale, and int8 codes as `Int8`. Other
matrices become tensors: fp8 after multiplication with its scales, and codes with an order of groups (`g_idx`, act-order) that
`Int4` cannot express.

Layout: a *word* is an int32 of 8 codes, the first in the lowest 4 bits, so its 4 bytes are those of `Int4`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.ops.matrices import Int4, Int8, Matrix, dequantize, unpack

__all__ = ["Restored", "restored"]

_METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # for each of 8 neighboring columns: its code's place in a word
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Parts of a matrix or of activations, besides the part that identifies a method.
_PARTS = (
    *("qzeros", "scales", "g_idx", "bits", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale"),
)


class Restored(NamedTuple):
    readers: Mapping[str, Callable[[], Matrix]]  # by the model's names
    kind: str  # for the description; "" if all matrices are kept unchanged


class _Codes(NamedTuple):
    packed: Tensor  # as `Int4.q`
    scale: Tensor  # [out, groups]
    zero: Tensor  # [out, groups], whole numbers
    group_of: Tensor | None  # [in]; None: groups are consecutive, of a size in the file's configuration


def restored(state: Mapping[str, Tensor], quantization: Mapping[str, Any], *, keep: bool, dtype: torch.dtype) -> Restored:
    """Readers of the model's weights. `state`: the file's tensors, each read at access. `keep`: keep 4-bit and int8 matrices where
    that is exact; all others become tensors of `dtype`.

    Raises ValueError for an unsupported method or layout."""
    _check(quantization)
    by_method: dict[str, Callable[[Mapping[str, Tensor], str], _Codes]] = {
        "gptq": partial(_gptq, less=quantization.get("checkpoint_format") != "gptq_v2"),
        "awq": _awq,
    }
    read = by_method.get(quantization["quant_method"], _compressed)
    readers: dict[str, Callable[[], Matrix]] = {}
    turned = fp8 = False
    for name in state:
        module, _, part = name.rpartition(".")
        if part in ("qweight", "weight_packed"):
            order = next((state[key] for key in (f"{module}.g_idx", f"{module}.weight_g_idx") if key in state), None)
            turned |= order is not None and not _in_order(order)
            readers[f"{module}.weight"] = partial(_matrix, read, state, module, _group_sizes(quantization), keep, dtype)
        elif part == "weight" and any(f"{module}.{scale}" in state for scale in ("weight_scale", "weight_scale_inv")):
            fp8 = fp8 or state[name].dtype in _FP8
            readers[name] = partial(_scaled, state, module, _block(quantization), keep, dtype)
        elif part not in _PARTS:
            readers[name] = partial(state.__getitem__, name)
    kinds = ["fp8 weights multiplied by their scales"] * fp8 + ["groups out of order (act-order), dequantized"] * turned
    return Restored(readers, ", ".join(kinds))


def _check(quantization: Mapping[str, Any]) -> None:
    method = quantization.get("quant_method")
    groups = [dict(group.get("weights") or {}) for group in (quantization.get("config_groups") or {}).values()]
    by_method: dict[str, list[tuple[str, Any, tuple[Any, ...]]]] = {
        "gptq": [
            ("bits", quantization.get("bits"), (4,)),
            ("checkpoint_format", quantization.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2")),
            ("is_marlin_format", quantization.get("is_marlin_format"), (None, False)),
        ],
        "awq": [
            ("bits", quantization.get("bits", quantization.get("w_bit")), (4,)),
            ("version", str(quantization.get("version", "gemm")).lower(), ("gemm",)),
        ],
        "compressed-tensors": [
            *(("num_bits", (group.get("type"), group.get("num_bits")), (("int", 4), ("int", 8), ("float", 8))) for group in groups),
            ("format", quantization.get("format"), ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")),
            ("sparsity_config", (quantization.get("sparsity_config") or {}).get("format", "dense"), ("dense",)),
            ("transform_config", quantization.get("transform_config") or None, (None,)),
        ],
        "fp8": [],
    }
    for name, value, read in by_method.get(str(method), [("quant_method", method, _METHODS)]):
        if value not in read:
            values = ", ".join(map(str, read))
            raise ValueError(f"weights quantized by {method}, with {name} {value!r:.100}, are not read; read is {values}")


def _in_order(group_of: Tensor) -> bool:
    """Whether groups are consecutive and of equal size."""
    if group_of.dim() != 1 or not len(group_of):
        return False
    size = int((group_of == group_of[0]).sum())
    return len(group_of) % size == 0 and bool(group_of.equal(torch.arange(len(group_of), dtype=group_of.dtype) // size))


def _bytes(words: Tensor) -> Tensor:
    """int32 [..., words] -> uint8 [..., words * 4]. Raises ValueError for another dtype."""
    if words.dtype != torch.int32:
        raise ValueError(f"codes of quantized weights are {words.dtype} in the file; read are words of int32")
    return words.contiguous().view(torch.uint8)


def _nibbles(words: Tensor) -> Tensor:
    """int32 [..., words] -> uint8 [..., words * 8]."""
    return unpack(_bytes(words).flatten(0, -2)).view(*words.shape[:-1], -1)


def _zeros(words: Tensor | None, scale: Tensor) -> Tensor:
    """[groups, out / 8] -> [out, groups]. None: codes are symmetric."""
    return torch.full_like(scale, 8.0) if words is None else _nibbles(words).T.float()


def _group_sizes(quantization: Mapping[str, Any]) -> list[int]:
    """Consecutive features per scale, from the configuration; below 1: whole rows. Only compressed-tensors has several."""
    weights = [group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values()]
    sizes = [-1 if one.get("strategy") in ("channel", "tensor") else one.get("group_size") for one in weights]
    sizes += [quantization.get("group_size"), quantization.get("q_group_size")]
    return [size for size in sizes if isinstance(size, int)]


def _in_sequence(features: int, groups: int, sizes: list[int]) -> Tensor | None:
    """The group of each feature; the last group may be smaller. None: no size, or more than one, gives that number of groups."""
    found = {size if size > 0 else features for size in sizes} or {features // max(groups, 1)}
    found = {size for size in found if size and -(-features // size) == groups}
    return torch.arange(features) // found.pop() if len(found) == 1 else None


def _gptq(state: Mapping[str, Tensor], module: str, less: bool) -> _Codes:
    """qweight [in / 8, out], words along in; qzeros [groups, out / 8], zeros less `less` (1 in the first format)."""
    words, scale = state[f"{module}.qweight"], state[f"{module}.scales"].float().T
    packed = _bytes(words).view(*words.shape, 4).transpose(0, 1).reshape(words.shape[1], -1)
    zero = _zeros(state[f"{module}.qzeros"], scale) + less
    return _Codes(packed, scale, zero, state.get(f"{module}.g_idx"))


def _awq(state: Mapping[str, Tensor], module: str) -> _Codes:
    """qweight [in, out / 8] and qzeros [groups, out / 8], words along out, whose codes are in the order of `_AWQ_PLACES`."""

    def columns(words: Tensor) -> Tensor:
        return _nibbles(words).unflatten(1, (-1, 8))[..., list(_AWQ_PLACES)].flatten(1)

    codes = columns(state[f"{module}.qweight"]).T
    zero = columns(state[f"{module}.qzeros"]).T.float()
    return _Codes(codes[:, ::2] | codes[:, 1::2] << 4, state[f"{module}.scales"].float().T, zero, None)


def _compressed(state: Mapping[str, Tensor], module: str) -> _Codes:
    """weight_packed [out, in / 8], words along in; weight_zero_point [out / 8, groups], words along out."""
    if (shape := state[f"{module}.weight_shape"]).shape != (2,):
        raise ValueError(f"weight_shape is {shape.tolist()!r:.100}; it must be the numbers of rows and columns")
    out, features = shape.tolist()
    words, scale = state[f"{module}.weight_packed"], state[f"{module}.weight_scale"].float()
    if words.shape[1] * 8 < features or words.shape[1] * 4 >= features:
        raise ValueError(f"weight_packed has {list(words.shape)} words of {[out, features]} codes; read are 4 bits")
    points = state.get(f"{module}.weight_zero_point")
    zero = _zeros(None if points is None else points.T, scale)[:out]
    return _Codes(_bytes(words)[:, : features // 2], scale, zero, state.get(f"{module}.weight_g_idx"))


def _matrix(
    read: Callable[[Mapping[str, Tensor], str], _Codes],
    state: Mapping[str, Tensor],
    module: str,
    sizes: list[int],
    keep: bool,
    dtype: torch.dtype,
) -> Matrix:
    try:
        packed, scale, zero, group_of = read(state, module)
        features, groups = 2 * packed.shape[1], scale.shape[1]
    except KeyError as error:
        raise ValueError(f"the weights lack {error.args[0]}, of a quantized matrix") from None
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"{module}: the parts of a quantized matrix do not fit: {error}") from None
    except ValueError as error:
        raise ValueError(f"{module}: {error}") from None
    group_of = _in_sequence(features, groups, sizes) if group_of is None else group_of.long()
    fits = group_of is not None and group_of.shape == (features,) and 0 <= int(group_of.min()) <= int(group_of.max()) == groups - 1
    if group_of is None or not fits or scale.shape != zero.shape or len(packed) != len(scale):
        parts = f"{list(scale.shape)} scales and {list(zero.shape)} zeros"
        raise ValueError(f"{module} has {parts} of [{len(packed)}, {features}] codes, which do not fit: the file is damaged")
    if not _in_order(group_of):
        return ((unpack(packed) - zero[:, group_of]) * scale[:, group_of]).to(dtype)
    codes = Int4(*(part.contiguous() for part in (packed, scale, -zero * scale)))
    whole = (features // groups) % 32 == 0  # required by the kernels
    return codes if keep and whole else dequantize(codes).to(dtype)


def _block(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block that shares an fp8 scale, if scales are per block."""
    groups = (group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values())
    sizes = [quantization.get("weight_block_size"), *(group.get("block_structure") for group in groups)]
    match size := next((size for size in sizes if size), (128, 128)):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ValueError(f"weight_block_size is {size!r:.100}; it must be two numbers above 0")


def _scaled(state: Mapping[str, Tensor], module: str, block: tuple[int, int], keep: bool, dtype: torch.dtype) -> Matrix:
    """fp8 or int8 codes, with one scale for the matrix, per row, or per block."""
    weight = state[f"{module}.weight"]
    scale = next(state[name].float() for name in (f"{module}.weight_scale_inv", f"{module}.weight_scale") if name in state)
    out, features = weight.shape
    if scale.numel() in (1, out) and scale.shape != (-(-out // block[0]), -(-features // block[1])):
        scale = scale.view(-1, 1)
    elif scale.shape == (-(-out // block[0]), -(-features // block[1])):
        scale = scale.repeat_interleave(block[0], 0)[:out].repeat_interleave(block[1], 1)[:, :features]
    else:
        raise ValueError(
            f"{module} has {list(scale.shape)} scales of {[out, features]} weights; read is one, or one per row or block"
        )
    if weight.dtype == torch.int8 and keep and scale.shape[1] == 1 and f"{module}.weight_zero_point" not in state:
        return Int8(weight, scale.flatten().expand(out).contiguous())
    if weight.dtype == torch.int8 and f"{module}.weight_zero_point" in state:
        raise ValueError(f"{module} has int8 weights with zero points; read are symmetric ones")
    return (weight.float() * scale).to(dtype)
