"""Overwrites the weights of an open engine in place, tensor by tensor.

An `UpdateTarget` maps names in the model to roles, and roles to the form in which a weight is stored. `fill` takes the tensors in
any order and reads each once. The peak of additional memory is one matrix during its conversion (packed, int8, int4).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.inference.config import TransformerConfig
from slipstream.inference.families import FAMILIES
from slipstream.inference.models import Pick, canonical, head_name, is_surplus, places
from slipstream.inference.weights import DecoderWeights, leaves
from slipstream.ops.matrices import Codes, Int4, Int8, Matrix, to_int4, to_int8

_WRAPPERS = re.compile(r"^((base_model\.model|module|_orig_mod)\.)+")  # the prefixes of PEFT, DDP and torch.compile


class WeightForm(NamedTuple):
    kind: torch.dtype | type[Codes]
    device: torch.device
    group: int = 0  # only Int4: inputs per scale

    @classmethod
    def of(cls, weight: Matrix) -> WeightForm:
        match weight:
            case Tensor():
                return cls(weight.dtype, weight.device)
            case Int4():
                return cls(Int4, weight.q.device, 2 * weight.q.shape[1] // weight.scale.shape[1])
            case _:
                return cls(type(weight), weight.q.device)

    def convert(self, weight: Tensor) -> Matrix:
        """Quantize or cast a weight. Quantizes from the precision of `weight`, as loading does."""
        if isinstance(self.kind, torch.dtype):
            return weight.to(self.device, self.kind)
        matrix: Matrix = to_int8(weight.contiguous()) if self.kind is Int8 else to_int4(weight.contiguous(), self.group)
        return type(matrix)(*(part.to(self.device) for part in matrix))


# tensor name -> (shape, [(role, function that selects its part)])
Places = Mapping[str, tuple[tuple[int, ...], list[tuple[str, Pick]]]]


@dataclass(frozen=True, slots=True)
class UpdateTarget:
    """The names, roles and forms of an engine's weights."""

    places: Places
    forms: Mapping[str, WeightForm]  # by role
    idle: frozenset[str]  # names that are accepted and ignored
    rename: Callable[[str], str] = str  # translates to the names of `places`

    @classmethod
    def decoder(cls, config: TransformerConfig, weights: DecoderWeights) -> UpdateTarget:
        forms = {role: WeightForm.of(leaf) for role, leaf in leaves(weights)}
        forms.setdefault("head", forms["embed"])  # tied
        idle = frozenset([head_name(config)] if is_surplus(config, head_name(config)) else [])
        rename = partial(canonical, FAMILIES[config.family])
        return cls(places(config), forms, idle, rename)

    @classmethod
    def module(cls, model: torch.nn.Module) -> UpdateTarget:
        """A live model's parameters; each one's role is its name."""
        named = dict(model.named_parameters())
        places: Places = {name: (tuple(one.shape), [(name, lambda w: w)]) for name, one in named.items()}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - named.keys()
        buffers = {name for name, _ in model.named_buffers()}
        return cls(places, {name: WeightForm.of(one.data) for name, one in named.items()}, frozenset(tied | buffers))

    @torch.no_grad()
    def fill(self, put: Callable[[str, Matrix], None], tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Call core.Runner's `put(role, weight)` for every weight.

        Raises ValueError if a name is unknown, a shape is wrong or weights are missing.
        """
        missing = {role for _, parts in self.places.values() for role, _ in parts}
        for full_name, tensor in tensors:
            name = self.rename(_WRAPPERS.sub("", full_name))
            if name in self.idle or name.endswith("rotary_emb.inv_freq"):
                continue
            if name not in self.places:
                raise ValueError(f"{full_name!r} is none of this model's weights, whose names are like {next(iter(self.places))!r}")
            shape, parts = self.places[name]
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{full_name!r} is {list(tensor.shape)}; this model's is {list(shape)}")
            source = tensor.detach().contiguous()
            for role, pick in parts:
                put(role, self.forms[role].convert(pick(source)))
                missing.discard(role)
        for device in {form.device for form in self.forms.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the engine's thread may use another stream
        if missing:
            lacking = [name for name, (_, parts) in self.places.items() if missing.intersection(role for role, _ in parts)]
            raise ValueError(f"{len(missing)} weights are missing: {', '.join(lacking[:3])}{', ...' if len(lacking) > 3 else ''}")
