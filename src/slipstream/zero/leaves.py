"""The plain tensors that a model's parameters consist of: units lay out, shard, gather and save these leaves.

whole  a parameter of the model. Most have one leaf: themselves
leaf   a tensor with memory. A quantized weight of another library has several: torchao's is a wrapper around codes, scales and
       zero points (torch's `__tensor_flatten__` protocol, which any wrapper follows); bitsandbytes' is its codes, and its
       `quant_state` holds the scales. `open_up` replaces each leaf in place by a frozen parameter, so that gathering fills the
       memory with which the library computes. Metadata (block size, type) stays with the whole, on every rank

Leaves of a quantized weight are never cast, whatever the config's precision.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.world.mesh import Differs, Split

_PARTS = "_slipstream_parts"  # attribute of a parameter: its Parts
_KIND = "_slipstream_kind"  # attribute of a parameter: see `keep_apart`
_STACK = "_slipstream_stack"  # attribute of a parameter: it is a stack
_AXES = ("tp", "ep")

Ranges = tuple[tuple[int, int], ...]


class Part(NamedTuple):
    """How a parameter is a part of a whole: the ranks along the axis of `split` hold different ranges of dimension `dim`."""

    split: Split
    dim: int
    numel: int  # length of the whole's dimension `dim`
    ranges: Ranges | None  # [start, stop) of this rank, in memory order; None: the i-th of equal consecutive ranges

    def ranges_of(self, index: int) -> Ranges:
        """The ranges of the `index`-th part. If ranges were given, `index` must be this rank's."""
        length = self.numel // self.split.size
        return self.ranges or ((index * length, (index + 1) * length),)

    @property
    def is_dealt(self) -> bool:
        """Whether one rank has the whole and the others nothing (the experts of a list)."""
        return self.ranges in (((0, self.numel),), ((0, 0),))


def mark_part(
    param: nn.Parameter,
    axis: str,
    size: int,
    dim: int = 0,
    *,
    whole: int | None = None,
    ranges: Ranges | None = None,
    slices: int = 1,
) -> None:
    """Mark a parameter as a part of a whole, before `initialize`. A parameter may be marked once for each axis.

    axis    "tp" or "ep"
    size    the number of different parts. If it is less than the axis has ranks, neighbors hold the same part, and their gradients
            are added. Size 1 on tp is for a parameter that is whole but sees a share of the activations on each rank
    dim     the dimension that is split
    whole   the length of this dimension in the whole; default: size times the parameter's
    ranges  this rank's [start, stop) in the whole, in the parameter's memory order; default: equal consecutive ranges by index
    slices  number of tp slices of the experts that ep ranks have (`world.mesh.Split`)

    Raises ValueError if these do not fit the parameter.
    """
    if axis not in _AXES:
        raise ValueError(f"parameters can be split over the axes {' and '.join(_AXES)}, not over {axis!r}")
    if not 0 <= dim < param.dim() or size < 1:
        raise ValueError(f"a parameter of shape {tuple(param.shape)} has no dimension {dim} to split into {size} parts")
    numel = size * param.shape[dim] if whole is None else whole
    length = sum(stop - start for start, stop in ranges) if ranges is not None else numel / size
    if length != param.shape[dim] or any(not 0 <= start <= stop <= numel for start, stop in ranges or ()):
        raise ValueError(
            f"dimension {dim} of a parameter of shape {tuple(param.shape)} cannot be {ranges or f'one of {size} parts'} of {numel}"
        )
    if size > 1 or axis == "tp":
        others = [part for part in parts_of(param) if part.split.axis != axis]
        setattr(param, _PARTS, (*others, Part(Split(axis, size, slices=slices), dim, numel, ranges)))


def mark_stack(param: nn.Parameter) -> None:
    """Mark a parameter as a stack of tensors along its first dimension (experts), which optimizers treat one by one.

    LAMB's norms and Muon's matrices are then those of each expert, whichever rank has it.
    """
    setattr(param, _STACK, True)


def is_stack(param: Tensor) -> bool:
    return getattr(param, _STACK, False)


def keep_apart(param: Tensor, kind: Literal["dense", "rows"]) -> None:
    """Keep a parameter in units of a kind: its gradients are never compressed, or only their nonzero rows are sent."""
    setattr(param, _KIND, kind)


def kind_of(param: Tensor) -> str:
    """The kind that `keep_apart` set; "" for none."""
    kind: str = getattr(param, _KIND, "")
    return kind


def forget_kinds(model: nn.Module) -> None:
    """Undo `keep_apart` of an earlier engine."""
    for param in model.parameters():
        vars(param).pop(_KIND, None)


def rows_of(model: nn.Module) -> dict[str, Tensor]:
    """The embedding weights by name."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {f"{path}.weight".lstrip("."): module.weight for path, module in model.named_modules() if isinstance(module, kinds)}


def mark_rows(model: nn.Module) -> list[str]:
    """Send only the nonzero rows of embeddings' gradients; returns the names of their weights."""
    weights = rows_of(model)
    for weight in weights.values():
        keep_apart(weight, "rows")
    return sorted(weights)


def mark_tied(param: nn.Parameter, stages: Sequence[int]) -> None:
    """Mark a parameter that several pipeline stages hold, each with gradients of its own, before `initialize`."""
    others = [part for part in parts_of(param) if part.split.axis != "pp"]
    setattr(param, _PARTS, (*others, Part(Split("pp", 1, tuple(stages)), 0, param.shape[0], None)))


def parts_of(param: Tensor) -> tuple[Part, ...]:
    """The marks of `mark_part` and `mark_tied`; () for a parameter that every rank of its stage has whole."""
    parts: tuple[Part, ...] = getattr(param, _PARTS, ())
    return parts


def cuts_of(param: Tensor) -> tuple[Part, ...]:
    """The parts of a parameter by which ranks hold different ranges."""
    return tuple(part for part in parts_of(param) if part.split.size > 1)


def cuts_of_tensors(param: Tensor) -> tuple[Part, ...]:
    """Its cuts, except the one that distributes entire tensors (a stack's, or wholes): those tensors are cut by the others only."""
    return tuple(part for part in cuts_of(param) if not (part.is_dealt or (part.dim == 0 and is_stack(param))))


def whole_shape(param: Tensor, own: Sequence[int] | None = None) -> tuple[int, ...]:
    """The shape of the whole parameter. own: the shape of this rank's part, if the parameter does not show it now."""
    shape = list(param.shape if own is None else own)
    for part in cuts_of(param):
        shape[part.dim] = part.numel
    return tuple(shape)


def part_of(whole: Tensor, param: Tensor) -> Tensor:
    """This rank's part of a whole. The parts must have ranges, as `slice_model` sets them."""
    for part in cuts_of(param):
        assert part.ranges is not None, "a part without ranges"
        whole = take(whole, part.dim, part.ranges)
    return whole


def take(whole: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """The elements of a dimension in these ranges, in order of the ranges."""
    return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def is_quantized(param: Tensor) -> bool:
    """Whether a parameter is a quantized weight of another library."""
    return is_traceable_wrapper_subclass(cast(Any, param)) or getattr(param, "quant_state", None) is not None


def differs_of(param: nn.Parameter) -> Differs:
    """The parameter's splits, which are its family's key."""
    return tuple(sorted(part.split for part in parts_of(param)))


class Leaf(NamedTuple):
    """One tensor of one parameter."""

    name: str  # the parameter's name, with a suffix if it has several leaves
    tensor: nn.Parameter  # a plain tensor before `open_up`
    whole: nn.Parameter
    exact: bool  # never cast


class _Place(NamedTuple):
    """The attribute that holds a leaf, if the leaf is not the parameter itself."""

    suffix: str
    holder: Any
    attribute: str

    @property
    def tensor(self) -> Any:
        return getattr(self.holder, self.attribute)


def named_leaves(model: nn.Module) -> Iterator[Leaf]:
    """Yield every leaf of every parameter once, under its first name, in order of registration."""
    for name, whole in model.named_parameters():
        places, unknown = list(_places(whole)), cast(Any, whole)  # to mypy, no parameter is a wrapper
        if not is_traceable_wrapper_subclass(unknown):
            is_fp8 = whole.is_floating_point() and whole.itemsize == 1  # codes, with a scale elsewhere in the model
            is_code = not whole.is_floating_point() or (is_fp8 and not whole.requires_grad)
            yield Leaf(name, whole, whole, bool(places) or is_code)
        for place in places:
            yield Leaf(f"{name}.{place.suffix}", place.tensor, whole, True)


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for all names of one tensor, and differs from those of all other live tensors."""
    unknown = cast(Any, tensor)  # to mypy, no tensor is a wrapper
    if tensor.numel() == 0 or is_traceable_wrapper_subclass(unknown):  # without memory of its own
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def open_up(model: nn.Module) -> None:
    """Replace every leaf that is a plain tensor by a frozen parameter, in place. The model's results do not change."""
    for whole in model.parameters():
        places = list(_places(whole))
        for place in places:
            if not isinstance(place.tensor, nn.Parameter):
                setattr(place.holder, place.attribute, nn.Parameter(place.tensor.detach(), requires_grad=False))
        if places and vars(whole).get("CB") is not None:  # bitsandbytes' int8: its layer computes with CB
            vars(whole)["CB"] = whole
            whole.__class__ = nn.Parameter  # its `to` accepts all arguments
    for module in model.modules():  # bitsandbytes' 4-bit layers would copy the codes to other memory on some CPUs
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False


def trainable_error(name: str, whole: nn.Parameter) -> str:
    """The error text for a quantized or complex parameter that requires a gradient."""
    if whole.is_complex():
        return (
            f"parameter {name!r} is complex ({whole.dtype}) and requires a gradient, but optimizers update real elements here: "
            f"keep torch.view_as_real(...) of it as the parameter, with torch.view_as_complex in the forward, or freeze it"
        )
    parts = ", ".join(place.suffix for place in _places(whole))
    return (
        f"parameter {name!r} is quantized (its parts: {parts}) and requires a gradient, but no optimizer can update it: "
        f"freeze it with requires_grad_(False) and train adapters on top, or load the model unquantized"
    )


def refuse_trainable(model: nn.Module) -> None:
    """Raise ValueError if a quantized parameter requires a gradient or is on meta, a complex one requires a gradient, or any
    parameter is a DTensor."""
    dtensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())  # imported if a DTensor exists
    for name, parameter in model.named_parameters():
        whole: Any = parameter  # to mypy, no parameter is a wrapper
        if isinstance(whole, dtensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor ({whole.placements} over {whole.device_mesh.size()} ranks), and ZeRO shards "
                f"plain parameters. Set tensor_parallel.autotp_size instead, and pass the model to initialize() before "
                f"parallelize_module, fully_shard or distribute_tensor"
            )
        is_in_parts = any(True for _ in _places(whole))
        if whole.requires_grad and (is_in_parts or whole.is_complex()):
            raise ValueError(trainable_error(name, whole))
        if is_in_parts and whole.is_meta:
            raise ValueError(
                f"parameter {name!r} is a {type(whole).__name__} on meta, and no initializer can fill its parts. Load the "
                f"quantized model before initialize"
            )


def _places(whole: Any) -> Iterator[_Place]:
    """The places of the leaves that are not the parameter itself."""
    if is_traceable_wrapper_subclass(whole):
        for attribute in whole.__tensor_flatten__()[0]:
            inner = getattr(whole, attribute)
            if is_traceable_wrapper_subclass(inner):
                yield from (place._replace(suffix=f"{attribute}.{place.suffix}") for place in _places(inner))
            else:
                yield _Place(attribute, whole, attribute)
        return
    attributes = vars(whole)
    state, nested = attributes.get("quant_state"), getattr(attributes.get("quant_state"), "state2", None)
    candidates = (  # with the suffixes of bitsandbytes' checkpoints
        ("absmax", state, "absmax"),
        ("quant_map", state, "code"),
        ("nested_offset", state, "offset"),
        ("nested_absmax", nested, "absmax"),
        ("nested_quant_map", nested, "code"),
        ("SCB", whole if "SCB" in attributes else None, "SCB"),
    )
    for suffix, holder, attribute in candidates:
        if isinstance(getattr(holder, attribute, None), Tensor):
            yield _Place(suffix, holder, attribute)
