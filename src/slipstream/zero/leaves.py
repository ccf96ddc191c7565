"""The plain tensors that a model's parameters consist of: what units lay out, shard, gather and save.

whole  a parameter as the model has it. Most are their own only leaf
leaf   a tensor with memory. Quantized weights of other libraries are several: torchao's is a wrapper around codes, scales and
       zero points (torch's `__tensor_flatten__` protocol, which any wrapper follows); bitsandbytes' is its codes, and its
       `quant_state` holds the scales. `open_up` makes each a frozen parameter, put back where it was found, so that gathering it
       fills what the library computes with. What is no tensor (block size, type) stays with the whole, on every rank

Leaves of several are kept bit by bit: no precision that a config asks for is theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Leaf(NamedTuple):
    """One tensor of one parameter."""

    name: str  # the parameter's, and where it has several leaves, which of them
    tensor: nn.Parameter  # a plain tensor before `open_up`
    whole: nn.Parameter
    exact: bool  # kept as it is, whatever precision the rest has


class _Place(NamedTuple):
    """Where a leaf beside or inside its parameter is found."""

    suffix: str
    holder: Any
    attribute: str

    @property
    def tensor(self) -> Any:
        return getattr(self.holder, self.attribute)


def named_leaves(model: nn.Module) -> Iterator[Leaf]:
    """Every leaf of every parameter once, under its first name, in order of registration."""
    for name, whole in model.named_parameters():
        places, unknown = list(_places(whole)), cast(Any, whole)  # to mypy, no parameter is a wrapper
        if not is_traceable_wrapper_subclass(unknown):
            yield Leaf(name, whole, whole, bool(places) or not whole.dtype.is_floating_point)
        for place in places:
            yield Leaf(f"{name}.{place.suffix}", place.tensor, whole, True)


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """The same for all names of one tensor, and for no other while both are there. Wrappers have no memory of their own."""
    unknown = cast(Any, tensor)  # to mypy, no tensor is a wrapper
    if tensor.numel() == 0 or is_traceable_wrapper_subclass(unknown):
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def open_up(model: nn.Module) -> None:
    """Make every leaf that is none a frozen parameter, in place. The model computes what it did."""
    for whole in model.parameters():
        places = list(_places(whole))
        for place in places:
            if not isinstance(place.tensor, nn.Parameter):
                setattr(place.holder, place.attribute, nn.Parameter(place.tensor.detach(), requires_grad=False))
        if places and vars(whole).get("CB") is not None:  # bitsandbytes' int8: what its layer takes over and computes with
            vars(whole)["CB"] = whole
            whole.__class__ = nn.Parameter  # whose `to` takes all arguments
    for module in model.modules():  # bitsandbytes' 4 bits would move codes into memory of their own for some processors
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False


def say_trainable(name: str, whole: nn.Parameter) -> str:
    """Why a quantized parameter cannot require a gradient."""
    parts = ", ".join(place.suffix for place in _places(whole))
    return (
        f"parameter {name!r} is quantized (its parts: {parts}) and requires a gradient, which no optimizer could apply to it: "
        f"freeze it with requires_grad_(False) and train adapters on top, or load the model unquantized"
    )


def say_sparse(name: str) -> str:
    """Why a parameter cannot have a sparse gradient."""
    return (
        f"parameter {name!r} gets a sparse gradient, and only dense ones are reduced between ranks: set `module.sparse = False` on "
        f"its nn.Embedding or nn.EmbeddingBag (or drop sparse=True); the gradient has the same values"
    )


def refuse_sparse(model: nn.Module) -> None:
    """Raises ValueError naming a parameter whose module says that its gradient will be sparse."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ValueError(say_sparse(f"{path}.weight" if path else "weight"))


def _refuse_distributed(model: nn.Module) -> None:
    """Raises ValueError naming a parameter that torch has spread over ranks already."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())  # imported by whoever has made one
    for name, parameter in model.named_parameters():
        whole = cast(Any, parameter)
        if isinstance(whole, kind):
            raise ValueError(
                f"parameter {name!r} is a DTensor ({whole.placements} over {whole.device_mesh.size()} ranks): tensor parallelism "
                f"is not built yet, and ZeRO shards plain parameters by itself. Give initialize() the model before "
                f"parallelize_module, fully_shard or distribute_tensor"
            )


def refuse_trainable(model: nn.Module) -> None:
    """Raises ValueError naming a parameter of several leaves that is to be trained, or is on meta, or any DTensor."""
    _refuse_distributed(model)
    for name, whole in model.named_parameters():
        parts = [place.suffix for place in _places(whole)]
        if not parts:
            continue
        if whole.requires_grad:
            raise ValueError(say_trainable(name, whole))
        if whole.is_meta:
            raise ValueError(
                f"parameter {name!r} is a {type(whole).__name__} on meta: what its parts are to hold is in no initializer. Load "
                f"the quantized model before initialize"
            )


def _places(whole: Any) -> Iterator[_Place]:
    """Of the leaves that are not the parameter itself."""
    if is_traceable_wrapper_subclass(whole):
        for attribute in whole.__tensor_flatten__()[0]:
            inner = getattr(whole, attribute)
            if is_traceable_wrapper_subclass(inner):
                yield from (place._replace(suffix=f"{attribute}.{place.suffix}") for place in _places(inner))
            else:
                yield _Place(attribute, whole, attribute)
        return
    beside = vars(whole)
    state, nested = beside.get("quant_state"), getattr(beside.get("quant_state"), "state2", None)
    found = (  # under the names that bitsandbytes saves them by
        ("absmax", state, "absmax"),
        ("quant_map", state, "code"),
        ("nested_offset", state, "offset"),
        ("nested_absmax", nested, "absmax"),
        ("nested_quant_map", nested, "code"),
        ("SCB", whole if "SCB" in beside else None, "SCB"),
    )
    for suffix, holder, attribute in found:
        if isinstance(getattr(holder, attribute, None), Tensor):
            yield _Place(suffix, holder, attribute)
