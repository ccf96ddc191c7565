"""Reads GGUF files: metadata and tensors, memory-mapped, with every size checked before use.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package takes seconds to read a vocabulary, so it is
only used to dequantize rare kinds of blocks. Common kinds are kept: a Q4 block is 32 numbers with one scale (Q4_1: and one
minimum), exactly a group of `Int4`; a Q8_0 block is a group of `Int8`; Q4_K, Q5_K and Q6_K blocks are blocks of `KQuant`.

`load` uses this module for the Llama family. `open_gguf` makes a live transformers model of any other that transformers supports.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.inference.families import UnsupportedModel
from slipstream.ops.matrices import Codes, Int4, Int8, KQuant, Matrix, dequantize, pack_codes, unpack_codes
from slipstream.world.extras import needs

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _F16, _Q4_0, _Q4_1, _Q8_0, _Q4_K, _Q5_K, _Q6_K, _BF16 = 0, 1, 2, 3, 8, 12, 13, 14, 30
_PLAIN = {_F32: torch.float32, _F16: torch.float16, _BF16: torch.bfloat16}
_BLOCKS = {_Q4_0: (32, 18), _Q4_1: (32, 20), _Q8_0: (32, 34)}  # numbers and bytes per block
_BLOCKS |= {_Q4_K: (256, 144), _Q5_K: (256, 176), _Q6_K: (256, 210)}
_K_BITS = {_Q4_K: 4, _Q5_K: 5, _Q6_K: 6}
# The forms in which a kind's blocks can be kept, the best first.
_FORMS: dict[int, tuple[type[Codes], ...]] = {_Q4_0: (Int4,), _Q4_1: (Int4,), _Q8_0: (Int8,)}
_FORMS |= {_Q4_K: (KQuant, Int4), _Q5_K: (KQuant,), _Q6_K: (KQuant,)}
_RESTORED = {  # metadata that transformers ignores -> the field of its configurations
    "context_length": "n_positions",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_EACH = 0x0101010101010101  # the lowest bit of each of eight bytes
_AT_ONCE = 1 << 10  # blocks per step: they fit into CPU caches, and one thread computes them without the cost of starting others


class GgufTensor(NamedTuple):
    kind: int  # ggml's type number
    shape: tuple[int, ...]  # in torch's order: outermost first
    data: Tensor  # uint8 [bytes], a view of the mapped file


class GgufFile(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Map the file; tensors share its pages. Raises ValueError for an invalid file."""
    with path.open("rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private pages: torch needs writable memory
        except ValueError:
            raise ValueError(f"{path} is empty; it should be a GGUF file") from None
    try:
        return _read(mapped, path)
    except (struct.error, IndexError):
        raise ValueError(f"{path} ends within its header after {len(mapped)} bytes; download it again") from None


def _read(mapped: mmap.mmap, path: Path) -> GgufFile:
    magic, version, num_tensors, num_values = struct.unpack_from("<4sIQQ", mapped, 0)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it begins with {magic!r}")
    if version not in (2, 3):
        raise ValueError(f"{path} is GGUF version {version}; versions 2 and 3 are supported")
    at = 24
    metadata = {}
    for _ in range(num_values):
        key, at = _string(mapped, at)
        (kind,) = struct.unpack_from("<I", mapped, at)
        metadata[key], at = _value(mapped, at + 4, kind)
    if (parts := metadata.get("split.count", 1)) > 1:  # 0: the file was merged from parts
        merge = "merge them: llama-gguf-split --merge FIRST_PART MERGED.gguf"
        raise ValueError(f"{path} is one of {parts} parts of a model, and models are read from one file; {merge}")
    heads = []
    for _ in range(num_tensors):
        name, at = _string(mapped, at)
        (num_dims,) = struct.unpack_from("<I", mapped, at)
        *dims, kind, offset = struct.unpack_from(f"<{num_dims}QIQ", mapped, at + 4)
        at += 4 + 8 * num_dims + 12
        heads.append((name, tuple(reversed(dims)), kind, offset))
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1 or align & (align - 1):
        raise ValueError(f"{path}: general.alignment is {align!r}; it must be a power of two")
    begin = -(-at // align) * align
    content = torch.frombuffer(mapped, dtype=torch.uint8)
    tensors = {}
    for name, shape, kind, offset in heads:
        size = _nbytes(path, name, shape, kind)
        if begin + offset + size > len(mapped):
            raise ValueError(f"{path} is cut off: {name} ends at byte {begin + offset + size} of {len(mapped)}")
        tensors[name] = GgufTensor(kind, shape, content[begin + offset : begin + offset + size])
    return GgufFile(metadata, tensors)


def _string(mapped: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", mapped, at)
    end = at + 8 + length
    if end > len(mapped):
        raise IndexError
    return mapped[at + 8 : end].decode("utf-8", "replace"), end


def _value(mapped: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(mapped, at)
    if kind == _ARRAY:
        item, count = struct.unpack_from("<IQ", mapped, at)
        at += 12
        if item == _ARRAY:
            raise ValueError("GGUF arrays of arrays are not supported")
        if item in _SCALARS:
            form = f"<{count}{_SCALARS[item]}"
            return list(struct.unpack_from(form, mapped, at)), at + struct.calcsize(form)
        values = []
        for _ in range(count):
            value, at = _value(mapped, at, item)
            values.append(value)
        return values, at
    if kind not in _SCALARS:
        raise ValueError(f"a GGUF value has the unknown type {kind}")
    form = "<" + _SCALARS[kind]
    return struct.unpack_from(form, mapped, at)[0], at + struct.calcsize(form)


def _nbytes(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    numel = math.prod(shape)
    if kind in _PLAIN:
        return numel * _PLAIN[kind].itemsize
    per_block, block_bytes = _BLOCKS.get(kind) or _rare(path, name, kind)[0]
    if not shape or shape[-1] % per_block:
        raise ValueError(f"{path}: {name} {list(shape)} is not a whole number of blocks of {per_block}")
    return numel // per_block * block_bytes


def is_block(stored: GgufTensor) -> bool:
    """Whether the tensor is quantized."""
    return stored.kind not in _PLAIN


def form_of(stored: GgufTensor, forms: Collection[type[Codes]]) -> type[Codes] | None:
    """The one of `forms` in which `matrix` keeps the tensor's blocks; None if there is none."""
    return next((form for form in _FORMS.get(stored.kind, ()) if form in forms), None) if len(stored.shape) == 2 else None


def _rare(path: Path, name: str, kind: int) -> tuple[tuple[int, int], Callable[[Tensor], Tensor]]:
    """A kind's block size and its dequantization by the `gguf` package: bytes [rows, row bytes] -> fp32 [rows, in]."""
    with needs(f"{path}: {name} of ggml type {kind}", extra="serve"):
        import gguf
    try:
        quant = gguf.GGMLQuantizationType(kind)
        return gguf.GGML_QUANT_SIZES[quant], lambda rows: torch.from_numpy(gguf.quants.dequantize(rows.numpy(), quant))
    except (ValueError, KeyError):
        raise ValueError(f"{path}: {name} has ggml type {kind}, which the gguf package does not support") from None


def matrix(
    path: Path, name: str, stored: GgufTensor, *, forms: Collection[type[Codes]] = (), dtype: torch.dtype = torch.float32
) -> Matrix:
    """The tensor in `dtype`, or its unchanged blocks in one of `forms`."""
    kind, shape, data = stored
    form, num_rows = form_of(stored, forms), math.prod(shape[:-1])
    if kind in _PLAIN:
        return data.view(_PLAIN[kind]).view(shape).to(dtype)
    if kind in _K_BITS:
        return _of_k_quants(kind, data.view(num_rows, -1), form, dtype, shape)
    if kind in (_Q4_0, _Q4_1):
        q4 = _q4(kind, data.view(num_rows, -1))
        return q4 if form else dequantize(q4).view(shape).to(dtype)
    if form is Int8:
        blocks = data.view(-1, 34)
        scale = blocks[:, :2].contiguous().view(torch.float16).float()
        return Int8(blocks[:, 2:].contiguous().view(torch.int8).view(shape), scale.view(shape[0], -1))
    if kind == _Q8_0:
        out = torch.empty(math.prod(shape) // 32, 32, dtype=dtype)
        for part, blocks in zip(out.split(_AT_ONCE), data.view(-1, 34).split(_AT_ONCE), strict=True):
            part[:] = blocks[:, 2:].view(torch.int8).float() * blocks[:, :2].contiguous().view(torch.float16).float()
        return out.view(shape)
    return _rare(path, name, kind)[1](data.view(num_rows, -1)).view(shape).to(dtype)


def _of_k_quants(kind: int, rows: Tensor, form: type[Codes] | None, dtype: torch.dtype, shape: tuple[int, ...]) -> Matrix:
    """`rows`: uint8 [rows, row bytes]. Converts some blocks at a time."""
    at_once = max(1, _AT_ONCE * _BLOCKS[kind][1] // rows.shape[1])
    parts = [_k_quant(kind, batch) for batch in rows.split(at_once)]
    if form is None:
        return torch.cat([dequantize(part).to(dtype) for part in parts]).view(shape)
    k = KQuant(*map(torch.cat, zip(*parts, strict=True)))
    if form is KQuant:
        return k
    codes = unpack_codes(k.q, 4)
    return Int4(codes[:, ::2] | codes[:, 1::2] << 4, *(part.contiguous() for part in k.affine()))


def _k_quant(kind: int, rows: Tensor) -> KQuant:
    """A block of Q6_K: the lower 4 bits of its codes, two numbers 64 apart per byte; their upper 2 bits, four numbers 32 apart per
    byte; 16 scales; d. A block of Q4_K and Q5_K: d and d_min; 12 bytes of scales and minima; only Q5_K: upper bits, eight numbers
    32 apart per byte; the lower 4 bits, two numbers 32 apart per byte."""
    blocks, bits = rows.view(-1, _BLOCKS[kind][1]), _K_BITS[kind]
    if bits == 6:
        lower, upper = _eights(blocks[:, :128]).view(-1, 2, 1, 8), _eights(blocks[:, 128:192]).view(-1, 2, 1, 4)
        codes = torch.cat((lower & _EACH * 15, lower >> 4 & _EACH * 15), 2).view(-1, 2, 4, 4)
        codes |= torch.cat([upper >> shift & _EACH * 3 for shift in (0, 2, 4, 6)], 2) << 4
        scale, d = blocks[:, 192:208].view(torch.int8), blocks[:, 208:]
    else:
        lower = _eights(blocks[:, -128:]).view(-1, 4, 1, 4)
        codes = torch.cat((lower & _EACH * 15, lower >> 4 & _EACH * 15), 2)
        if bits == 5:
            upper = _eights(blocks[:, 16:48]).view(-1, 1, 4)
            codes |= torch.cat([upper >> shift & _EACH for shift in range(8)], 1).view(codes.shape) << 4
        scale, d = _scales_and_minima(blocks[:, 4:16]).view(torch.int8), blocks[:, :4]
    num = len(rows)
    q = pack_codes(codes.view(num, -1).view(torch.uint8), bits)
    return KQuant(q, scale.reshape(num, -1), d.contiguous().view(torch.float16).view(num, -1))


def _eights(part: Tensor) -> Tensor:
    """View bytes as int64, eight at a time."""
    return part.contiguous().view(torch.int64)


def _scales_and_minima(packed: Tensor) -> Tensor:
    """Unpack eight 6-bit scales and minima, uint8 [blocks, 12] -> [blocks, 8, 2]. The first 4 bytes hold scales 0 to 3, the next 4
    minima 0 to 3; the last 4 hold the lower 4 bits of the others, whose upper 2 bits are above the 6 bits of the first 8 bytes."""
    first, second, third = packed.split(4, 1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    return torch.stack((scales, minima), 2)


def _q4(kind: int, rows: Tensor) -> Int4:
    """A block of Q4_0: a scale; a number is (code - 8) * scale. A block of Q4_1: scale and minimum. Codes take 16 bytes: number j
    is in the low half of byte j, number j + 16 in the high half. A byte of `Int4` holds two neighbors instead."""
    blocks = rows.view(-1, _BLOCKS[kind][1])
    affine, pairs = blocks[:, :-16].contiguous().view(torch.float16).float(), blocks[:, -16:].contiguous().view(torch.int16)
    q = torch.cat((pairs & 0x0F | pairs >> 4 & 0xF0, pairs >> 4 & 0x0F | pairs >> 8 & 0xF0), 1).to(torch.uint8)
    parts = (q, affine[:, :1], affine[:, 1:] if kind == _Q4_1 else affine * -8)
    return Int4(*(part.reshape(len(rows), -1).contiguous() for part in parts))


# -- Through transformers --------------------------------------------------------------------------------------------------


def open_gguf(path: Path, dtype: torch.dtype) -> Any:
    """Open the file as a live, dequantized transformers model. Raises UnsupportedModel."""
    with needs(str(path), extra="serve"):
        import gguf  # noqa: F401 (transformers needs it)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # from_pretrained would need accelerate

    file = read_gguf(path)
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        _complete(config, path, file)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty, torch_dtype=dtype)["tensors"]
        for name, own in empty.state_dict().items():
            if name in state and state[name].shape != own.shape:
                raise ValueError(f"its {name} is {list(state[name].shape)}, {type(empty).__name__}'s is {list(own.shape)}")
        live, info = type(empty).from_pretrained(None, config=config, state_dict=state, dtype=dtype, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"it lacks {', '.join(sorted(info['missing_keys'])[:5])} of {type(live).__name__}")
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError),
        *(NotImplementedError, StrictDataclassError),
    ) as error:
        raise UnsupportedModel(f"transformers cannot make a causal language model of {path}: {error}") from error
    return live


def _complete(config: Any, path: Path, file: GgufFile) -> None:
    """Set fields of `config` that transformers did not read from the file. Raises ValueError for other rope scaling."""
    family = file.metadata["general.architecture"]
    stated = {key.removeprefix(f"{family}."): value for key, value in file.metadata.items()}
    for key, name in _RESTORED.items():
        if key in stated and hasattr(config, name):
            setattr(config, name, stated[key] or None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if hasattr(config, "query_pre_attn_scalar") and head_dim != 256:  # Gemma 2 and 3 27B, which llama.cpp also detects by size
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        rope["rope_theta"] = stated.get("rope.freq_base", rope["rope_theta"])
        if stated.get("rope.dimension_count", head_dim) != head_dim:
            rope["partial_rotary_factor"] = stated["rope.dimension_count"] / head_dim
    if rope.get("rope_type", "default") == "default":
        rope |= _scaling(config, stated, path, file)


def _scaling(config: Any, stated: Mapping[str, Any], path: Path, file: GgufFile) -> dict[str, Any]:
    """The file's rope scaling in transformers' form; {} if it has none. Raises ValueError if it is not supported."""
    scaling, factors = stated.get("rope.scaling.type", "none"), sorted(name for name in file.tensors if name.startswith("rope_"))
    if factors == ["rope_factors_long.weight", "rope_factors_short.weight"]:
        long, short = (matrix(path, name, file.tensors[name]).tolist() for name in factors)  # type: ignore[union-attr]
        original = stated.get("rope.scaling.original_context_length", config.max_position_embeddings)
        lengths = {"original_max_position_embeddings": original, "attention_factor": stated.get("rope.scaling.attn_factor")}
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short, **lengths}
    if scaling == "linear" and not factors:
        return {"rope_type": scaling, "factor": stated["rope.scaling.factor"]}
    if scaling != "none" or factors:
        raise ValueError(f"its rope scaling ({', '.join(factors) or scaling}) is not supported for such a file")
    return {}
