"""New weights for an open engine, tensor by tensor, in the place of the old ones.

A `Target` knows which roles each name fills and in which form a role is kept. `fill` takes tensors by their names in the model, in
any order, each of them read once and not kept: nothing is held beside the weights themselves but one matrix on its way into its
form (packed, int8, int4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.inference.config import DecoderConfig
from slipstream.inference.models import is_surplus, places
from slipstream.inference.quantize import to_int4, to_int8
from slipstream.inference.weights import DecoderWeights, Int4, Int8, Matrix, leaves

_WRAPPERS = ("base_model.model.", "module.", "_orig_mod.")  # PEFT's, DDP's and torch.compile's prefixes


class Form(NamedTuple):
    """How a weight is kept."""

    kind: torch.dtype | type[Int8] | type[Int4]
    device: torch.device
    group: int = 0  # of Int4: inputs that share a scale

    @classmethod
    def of(cls, weight: Matrix) -> Form:
        match weight:
            case Int8():
                return cls(Int8, weight.q.device)
            case Int4():
                return cls(Int4, weight.q.device, 2 * weight.q.shape[1] // weight.scale.shape[1])
            case _:
                return cls(weight.dtype, weight.device)

    def made_of(self, weight: Tensor) -> Matrix:
        """Quantized from the precision in which it comes, as at loading."""
        if isinstance(self.kind, torch.dtype):
            return weight.to(self.device, self.kind)
        made: Matrix = to_int8(weight.contiguous()) if self.kind is Int8 else to_int4(weight.contiguous(), self.group)
        return type(made)(*(part.to(self.device) for part in made))


class Place(NamedTuple):
    """Where a tensor of the model goes."""

    shape: tuple[int, ...]
    parts: list[tuple[str, Tensor]]  # roles, and for each the part of the tensor that fills it, as a view on meta


@dataclass(frozen=True, slots=True)
class Target:
    """An engine's weights, as far as new ones need to know them."""

    places: Mapping[str, Place]
    forms: Mapping[str, Form]  # by role
    idle: frozenset[str]  # names that may come and fill nothing

    @classmethod
    def decoder(cls, config: DecoderConfig, weights: DecoderWeights) -> Target:
        forms = {role: Form.of(leaf) for role, leaf in leaves(weights)}
        forms.setdefault("head", forms["embed"])  # tied
        idle = frozenset(["lm_head.weight"] if is_surplus(config, "lm_head.weight") else [])
        return cls({name: Place(*place) for name, place in places(config).items()}, forms, idle)

    @classmethod
    def module(cls, model: torch.nn.Module) -> Target:
        """A live model's parameters, each in its own role."""
        named = dict(model.named_parameters())
        empty = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in named.items()}
        found = {name: Place(tuple(one.shape), [(name, one)]) for name, one in empty.items()}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - named.keys()
        buffers = {name for name, _ in model.named_buffers()}
        return cls(found, {name: Form.of(one.data) for name, one in named.items()}, frozenset(tied | buffers))

    @torch.no_grad()
    def fill(self, put: Callable[[str, Matrix], None], tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Every weight, once, by `put(role, weight)`, as core.Runner has it.

        Raises ValueError for a name, shape or number of weights that is not the model's.
        """
        left = {role for place in self.places.values() for role, _ in place.parts}
        for given, tensor in tensors:
            name = _bare(given)
            if name in self.idle or name.endswith("rotary_emb.inv_freq"):
                continue
            if name not in self.places:
                raise ValueError(f"{given!r} is none of this model's weights, which are called as {next(iter(self.places))!r}")
            shape, parts = self.places[name]
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{given!r} is {list(tensor.shape)}; this model's is {list(shape)}")
            whole = tensor.detach().contiguous()
            for role, part in parts:
                view = whole.as_strided(part.shape, part.stride(), whole.storage_offset() + part.storage_offset())
                put(role, self.forms[role].made_of(view))
                left.discard(role)
        if left:
            lacking = [name for name, place in self.places.items() if left.intersection(role for role, _ in place.parts)]
            raise ValueError(f"{len(left)} weights have not come: {', '.join(lacking[:3])}{', ...' if len(lacking) > 3 else ''}")


def _bare(name: str) -> str:
    """Without what wrappers put before it."""
    while prefix := next((prefix for prefix in _WRAPPERS if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name
