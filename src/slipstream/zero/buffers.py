"""A model's buffers (running statistics, masks): their dtypes in an engine, and their values on several ranks.

The first rank's buffers are saved and distributed. Each rank updates its buffers from its own batches, and nothing reduces them.
DDP and DeepSpeed keep the first rank's, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.zero.comm import Comm


def first_values(tensors: Sequence[Tensor], comm: Comm) -> list[Tensor]:
    """Copies of `tensors` with the first rank's values, in one broadcast. Non-dense tensors keep each rank's own. Collective."""
    copies = [tensor.detach().clone() for tensor in tensors]
    dense = [i for i, copy in enumerate(copies) if _is_dense(copy)] if comm.size > 1 else []
    if not dense:
        return copies
    for i in dense:
        copies[i] = copies[i].contiguous()
    raw = [copies[i].view(-1).view(torch.uint8) for i in dense]
    flat = torch.cat([part.to(comm.device) for part in raw])
    comm.broadcast(flat)
    for part, received in zip(raw, flat.split([part.numel() for part in raw]), strict=True):
        part.copy_(received)
    return copies


def spread_first(buffers: Sequence[Tensor], comm: Comm) -> None:
    """Overwrite the dense buffers with the first rank's. Collective.

    Writes through `.data`, as batch norm does, so that a graph that has saved a buffer does not count it as modified.
    """
    for buffer, value in zip(buffers, first_values(buffers, comm), strict=True):
        if comm.index != 0 and _is_dense(buffer):
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in buffer.stride())  # expanded: shared memory
            buffer.data[once].copy_(value[once])


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(cast(Any, tensor))


class BufferRule(NamedTuple):
    weights: torch.dtype | None = None  # dtype of the weights; None: they keep theirs
    stated: torch.dtype | None = None  # of all buffers
    in_fp32: Sequence[str] | None = None  # patterns, with *, that are searched in names; None: those of transformers' classes


BUFFERS_STAY = BufferRule()


def buffer_dtypes(model: nn.Module, rule: BufferRule) -> Iterator[tuple[nn.Module, str, torch.Tensor, torch.dtype]]:
    """Yield each buffer as (module, name, buffer, its dtype in an engine).

    That is `stated`, if set. Otherwise persistent buffers get the dtype of the weights, as in `model.to(dtype)`, and derived ones
    (rotary frequencies, registered with persistent=False) keep theirs. Integers keep their dtype, and so do floats of 8 bits or
    less, which are codes.

    With 16-bit weights, the buffers of `in_fp32` are fp32. Without `in_fp32` and `stated`, the buffers that transformers'
    `from_pretrained` keeps in fp32 are. For example, DeepSeek-V3's router biases differ by less than bf16 resolves, so bf16 would
    choose other experts.
    """
    in_fp32 = _kept_in_fp32(model, rule)
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            dtype = rule.stated or (None if name in module._non_persistent_buffers_set else rule.weights)
            if in_fp32 is not None and in_fp32.search(f"{path}.{name}".removeprefix(".")):
                dtype = torch.float32
            yield module, name, buffer, dtype if dtype and buffer.is_floating_point() and buffer.itemsize > 1 else buffer.dtype


def convert_buffers(model: nn.Module, rule: BufferRule) -> None:
    """Convert the model's buffers to the dtypes of `buffer_dtypes`."""
    for module, name, buffer, dtype in list(buffer_dtypes(model, rule)):
        if buffer.dtype is not dtype:
            setattr(module, name, buffer.to(dtype))


def _kept_in_fp32(model: nn.Module, rule: BufferRule) -> re.Pattern[str] | None:
    """A pattern for the names of buffers that are fp32 beside 16-bit weights."""
    if rule.weights not in (torch.bfloat16, torch.float16):
        return None
    of_classes = rule.in_fp32 is None and rule.stated is None
    below = _of_classes(model, rule.weights) if of_classes else [("", pattern) for pattern in rule.in_fp32 or ()]
    patterns = [f"^{re.escape(path)}[.].*{_regex(each)}" if path else _regex(each) for path, each in below]
    try:
        return re.compile("|".join(patterns)) if patterns else None
    except re.error as error:
        raise ValueError(f"data_types.keep_in_fp32_modules ({rule.in_fp32}): no regular expression, but for *: {error}") from None


def _regex(pattern: str) -> str:
    return pattern.replace("*", ".*")  # like transformers: all else is a regular expression


def _of_classes(model: nn.Module, weights: torch.dtype) -> set[tuple[str, str]]:
    """(path of a module, pattern below it) if its class lists names to keep in fp32, beside both 16-bit dtypes or only fp16."""
    lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if weights is torch.float16 else [])]
    return {(path, name) for path, module in model.named_modules() for each in lists for name in getattr(module, each, None) or ()}
