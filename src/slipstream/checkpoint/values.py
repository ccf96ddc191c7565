"""Encodes nested Python values as JSON, losslessly: `decode` returns the same types, bit for bit.

`encode` turns a value into a JSON skeleton and a flat dict of tensors that the skeleton refers to by name; `decode` is its inverse.
JSON's own types (None, bool, int, finite float, str, list, dict with plain string keys) stay readable; every other type is an
object with a single key that begins with "$":

    $tuple $dict $ordered $counter $size    containers ($dict: keys that are not plain strings, as pairs)
    $set $frozenset $namespace              sets of hashable scalars and tuples; an argparse.Namespace, as pairs
    $float $bytes $dtype $path              a float that is not finite (its 8 bytes), bytes, a torch.dtype, a pathlib.Path
    $tensor $array $scalar                  a tensor's name; a numpy array (bytes in a tensor); a numpy scalar

A defaultdict becomes a dict, because its factory is code. Any other type raises CheckpointError with path and type: nothing is
pickled. Decoded tensors are on the CPU, without gradient; two references to one tensor become two tensors.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoint.document import DTYPES
from slipstream.checkpoint.errors import CheckpointError

_DEPTH = 100  # nesting levels; also stops cycles
_INT_BITS = 4096  # Python limits int <-> str to some 14,000 bits
_NUMPY_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")
_REMEDY = "store numbers, strings, lists, dicts, tuples, sets, tensors or numpy arrays instead"


def encode(value: Any, path: str, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """JSON skeleton of `value` and its tensors, named `prefix/0`, `prefix/1`, ...; `path` is for messages."""
    tensors: dict[str, Tensor] = {}

    def keep(tensor: Tensor) -> str:
        name = f"{prefix}/{len(tensors)}"
        tensors[name] = tensor
        return name

    return _encode(value, path, 0, keep), tensors


def _encode(value: Any, path: str, depth: int, keep: Callable[[Tensor], str]) -> Any:
    if depth > _DEPTH:
        raise CheckpointError(f"{path[:200]}...: nested deeper than {_DEPTH} levels (a cycle?)")
    kind = type(value)
    if kind in _SEQUENCES:
        items = [_encode(item, f"{path}[{i}]", depth + 1, keep) for i, item in enumerate(value)]
        return items if kind is list else {_SEQUENCES[kind]: items}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, f"{path}[{key!r}]", depth + 1, keep) for key, item in value.items()}
    if kind in _SETS:
        for item in value:
            if not _is_key(item):
                raise CheckpointError(f"{path}: a set with a value of type {_type_name(item)}; {_REMEDY}")
        return {_SETS[kind]: [_encode(item, path, depth + 1, keep) for item in value]}
    if kind in _MAPPINGS:
        pairs = []
        for key, item in (vars(value) if kind is Namespace else value).items():
            if not _is_key(key):
                raise CheckpointError(f"{path}: a key of type {_type_name(key)}; {_REMEDY}")
            where = f"{path}[{key!r}]"
            pairs.append([_encode(key, where, depth + 1, keep), _encode(item, where, depth + 1, keep)])
        return {_MAPPINGS[kind]: pairs}
    return _encode_leaf(value, path, keep)


def _encode_leaf(value: Any, path: str, keep: Callable[[Tensor], str]) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        if value.bit_length() > _INT_BITS:
            raise CheckpointError(f"{path}: an int of {value.bit_length()} bits; at most {_INT_BITS} are kept")
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind is type(Path()):
        return {"$path": str(value)}
    if kind is Tensor or kind is torch.nn.Parameter:
        check_dense(path, value)
        return {"$tensor": keep(value.detach())}
    return _encode_numpy(value, path, keep)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError for a sparse tensor, one on meta, and one of a dtype without a name in metadata.json."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in DTYPES.values():
        raise CheckpointError(
            f"{name}: a tensor with layout {tensor.layout}, dtype {tensor.dtype} on {tensor.device}; "
            "only dense tensors with data can be stored"
        )


def _encode_numpy(value: Any, path: str, keep: Callable[[Tensor], str]) -> Any:
    numpy = sys.modules.get("numpy")  # if it is not imported, no value is numpy's
    if numpy is not None and _NUMPY_DTYPE.fullmatch(str(getattr(getattr(value, "dtype", None), "str", ""))):
        if isinstance(value, numpy.generic):
            return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
        if type(value) is numpy.ndarray:
            raw = bytearray(value.tobytes())
            data = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
            return {"$array": [value.dtype.str, list(value.shape), keep(data)]}
    raise CheckpointError(f"{path}: a value of type {_type_name(value)} cannot be stored in a checkpoint; {_REMEDY}")


_MAPPINGS: dict[type, str] = {
    dict: "$dict",
    defaultdict: "$dict",
    OrderedDict: "$ordered",
    Counter: "$counter",
    Namespace: "$namespace",
}
_SETS: dict[type, str] = {set: "$set", frozenset: "$frozenset"}
_SEQUENCES: dict[type, str] = {list: "", tuple: "$tuple", torch.Size: "$size"}


def _is_key(key: Any) -> bool:
    kind = type(key)
    if kind is tuple:
        return all(_is_key(part) for part in key)
    return key is None or kind in (str, int, float, bool, bytes, torch.dtype)


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def decode(skeleton: Any, fetch: Callable[[str], Tensor], path: str) -> Any:
    """The value of a skeleton; `fetch` returns a tensor by name. Raises CheckpointError for anything that `encode` never writes."""
    try:
        return _decode(skeleton, fetch)
    except (TypeError, ValueError, KeyError, IndexError, struct.error, RecursionError, OverflowError) as error:
        reason = error if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the stored value of {path} is damaged or hostile: {reason}") from error


def _decode(skeleton: Any, fetch: Callable[[str], Tensor]) -> Any:
    if isinstance(skeleton, list):
        return [_decode(item, fetch) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if not any(key.startswith("$") for key in skeleton):
        return {key: _decode(item, fetch) for key, item in skeleton.items()}
    if len(skeleton) != 1:
        raise CheckpointError(f"an object with the keys {sorted(skeleton)[:4]}")
    ((mark, body),) = skeleton.items()
    if mark in _ATOMS:
        return _ATOMS[mark](body)
    if mark in _MADE_OF_ITEMS:
        return _MADE_OF_ITEMS[mark]([_decode(item, fetch) for item in _list(body)])
    if mark == "$tensor":
        return fetch(body)
    if mark == "$scalar" or mark == "$array":
        return _decode_numpy(mark, _list(body), fetch)
    raise CheckpointError(f"an object marked {mark!r}")


def _keys(items: list[Any]) -> list[Any]:
    for item in items:
        if not _is_key(item):
            raise CheckpointError(f"a key of type {_type_name(item)}")
    return items


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    pairs = [(key, value) for key, value in map(_list, items)]
    _keys([key for key, _ in pairs])
    return pairs


_MADE_OF_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "$tuple": tuple,
    "$set": lambda items: set(_keys(items)),
    "$frozenset": lambda items: frozenset(_keys(items)),
    "$dict": lambda items: dict(_pairs(items)),
    "$ordered": lambda items: OrderedDict(_pairs(items)),
    "$counter": lambda items: Counter(dict(_pairs(items))),
    "$namespace": lambda items: Namespace(**dict(_pairs(items))),
}


def _decode_numpy(mark: str, body: list[Any], fetch: Callable[[str], Tensor]) -> Any:
    import numpy

    if not _NUMPY_DTYPE.fullmatch(body[0]):
        raise CheckpointError(f"a numpy dtype {body[0]!r}")
    dtype = numpy.dtype(body[0])
    if mark == "$scalar":
        (scalar,) = numpy.frombuffer(bytes.fromhex(body[1]), dtype)
        return scalar
    shape = [_int(size) for size in _list(body[1])]
    data = fetch(body[2])
    if data.dtype is not torch.uint8 or data.dim() != 1 or data.numel() != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"an array of {shape} x {dtype} in a tensor of {tuple(data.shape)} x {data.dtype}")
    if data.is_meta:
        return data  # a preview (see load_metadata): the bytes have not been read
    return numpy.frombuffer(data.numpy().tobytes(), dtype).reshape(shape).copy()


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a dtype {name!r}")
    return dtype


_ATOMS: dict[str, Callable[[Any], Any]] = {
    "$size": lambda body: torch.Size(map(_int, _list(body))),
    "$float": lambda body: struct.unpack(">d", bytes.fromhex(body))[0],
    "$bytes": lambda body: base64.b64decode(body, validate=True),
    "$dtype": _dtype,
    "$path": Path,
}


def _list(body: Any) -> list[Any]:
    if not isinstance(body, list):
        raise CheckpointError(f"{type(body).__name__} where a list belongs")
    return body


def _int(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{value!r} where a size belongs")
    return value
