"""The experts of a DeepSpeed checkpoint, each with its own parameters, as parts of stacks.

Files of DeepSpeed 0.19.8, besides those of any model (deepspeed_parts.py). M is the model-parallel rank; each stage numbers its
layers of experts from 0:

layer_L_expert_E_mp_rank_M_model_states.pt     expert E of the stage's layer L of experts, named by its index in the layer
[bf16_]zero_pp_rank_D_mp_rank_M_optim_states.pt  the states of rank D's experts, named by their index on that rank
expp_rank_R_mp_rank_00_optim_states.pt         without ZeRO: the optimizer of the R-th of the ranks with different experts

They are read as those of `deepspeed.moe.layer.MoE`, which has stacks. AutoEP replaces layers of transformers; `ds_autoep_layers`
lists them. It distributes whole experts over the ranks of a stage, including its slices (AutoTP). A rank's w1, w2 and w3 are stacks
of its experts (at ZeRO-3 its own part of each, and no files of experts). They become transformers' gate_up_proj and down_proj; its
router and its shared expert get transformers' names, too.

Optimizers without ZeRO number their parameters, in the order of their groups. `numbered` finds the names by shape, and among
parameters of one shape in the order of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.checkpoint.deepspeed_parts import DeepSpeedPart, PartPlace
from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.flat_slice import Box, Shape, whole_box
from slipstream.checkpoint.pickled import Stored, read

_MOST_EXPERTS = 1 << 16  # per layer: a larger number in a small file would create as many boxes
_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_NATIVE = re.compile(r"\.?(|.*\.)deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.+)")
_AUTOEP = re.compile(r"(.+\.)?experts\.w([123])(?:\.(\d+))?")


class ExpertSlot(NamedTuple):
    """A stack, and a tensor's place in it."""

    name: str
    place: PartPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpertLayer:
    num: int  # experts
    own: int  # experts of one data-parallel rank
    files: list[list[str]]  # by slice, by expert


class _ExpertName(NamedTuple):
    """A parameter of experts by its name in the files."""

    layer: _ExpertLayer
    prefix: str  # prefix of the layer's parameters, with a dot
    expert: int | None  # None: a stack of a rank's experts
    leaf: str


@dataclass(slots=True)
class ExpertFiles:
    """The layers of experts of a checkpoint. `open` raises CheckpointError if files are missing."""

    folder: Path
    is_strided: bool = False
    native: dict[str, _ExpertLayer] = field(default_factory=dict)  # by prefix: "blocks.0.moe."
    autoep: dict[str, _ExpertLayer] = field(default_factory=dict)  # by prefix: "model.layers.0.mlp."
    has_shared_gate: set[str] = field(default_factory=set)  # prefixes of AutoEP's layers

    @classmethod
    def open(cls, folder: Path, parts: Sequence[DeepSpeedPart], degree: int) -> ExpertFiles:
        self = cls(folder, bool((parts[0].model.get("ds_config") or {}).get("use_data_before_expert_parallelism")))
        for first in range(0, len(parts), degree):
            if parts[first].model.get("ds_autoep_layers"):
                self._open_autoep(parts[first].model, range(first, first + degree))
            elif parts[first].model.get("num_experts"):
                self._open_native(parts[first].model, range(first, first + degree))
        return self

    def __bool__(self) -> bool:
        return bool(self.native or self.autoep)

    @property
    def layers(self) -> list[_ExpertLayer]:
        return [*self.native.values(), *self.autoep.values()]

    def _files(self, layer: int, num: int, ranks: Sequence[int]) -> list[str]:
        """The files of a layer's experts, each of which one of these ranks wrote."""
        files = []
        for expert in range(num):
            names = [f"layer_{layer}_expert_{expert}_mp_rank_{rank:02d}_model_states.pt" for rank in ranks]
            existing = [name for name in names if (self.folder / name).is_file()]
            if not existing:
                raise CheckpointError(f"it has no {names[0]}" + (", nor of another rank" if len(names) > 1 else ""))
            files.append(existing[0])
        return files

    def _open_native(self, model: Mapping[str, Any], ranks: range) -> None:
        named = {*(name for group in model["param_shapes"] or [] for name in group), *(model["frozen_param_shapes"] or ())}
        own: dict[str, int] = {}
        for match in filter(None, map(_NATIVE.fullmatch, named)):
            own[match[1]] = max(own.get(match[1], 0), int(match[2]) + 1)
        if (self.folder / "zero").is_dir():  # DeepSpeed converts only layers of which each rank has all experts
            self.native |= {prefix: _ExpertLayer(num=num, own=num, files=[]) for prefix, num in own.items()}
            return
        # Without ZeRO no rank's names are stored, so all layers are split over as many ranks as saved optimizers
        num_ranks = max(len(self.optimizers()), 1)
        for index, num in enumerate(map(int, model["num_experts"])):
            files = [self._files(index, num, [rank]) for rank in ranks]
            matched = _NATIVE.fullmatch(next(iter(read(self.folder / files[0][0])), ""))
            if matched is None:
                raise CheckpointError(f"{files[0][0]} has no parameter of an expert")
            self.native[matched[1]] = _ExpertLayer(num=num, own=own.get(matched[1], num // num_ranks), files=files)

    def _open_autoep(self, model: Mapping[str, Any], ranks: range) -> None:
        has_files = not (self.folder / "zero").is_dir()
        for layer in model["ds_autoep_layers"]:
            num, own = int(layer["num_experts"]), int(layer["num_local_experts"])
            prefix = str(layer["expert_key_prefix"]).removesuffix("experts")
            placed = [expert for rank in (layer.get("expert_placement") or {}).get("ranks", []) for expert in rank["experts"]]
            is_even = 0 < own <= num <= _MOST_EXPERTS and own * int(layer["ep_size"]) == num
            if not is_even or placed not in ([], list(range(num))):
                raise CheckpointError(
                    f"the experts of {prefix!r} are placed as {placed or (num, own)}, which is not in equal parts"
                )
            is_apart = has_files and layer.get("checkpoint_format") != "zero3_partitioned"
            files = [self._files(int(layer["moe_layer_id"]), num, ranks)] if is_apart else []  # over all ranks of a stage
            self.autoep[prefix] = _ExpertLayer(num=num, own=own, files=files)
            if f"{prefix}shared_experts_gate.weight" in (model["module"] or {}):
                self.has_shared_gate.add(prefix)

    def optimizers(self) -> list[str]:
        """The files of optimizers without ZeRO, by rank."""
        files = {int(match[1]): match[0] for match in map(_OPTIM.fullmatch, (path.name for path in self.folder.iterdir())) if match}
        if sorted(files) != list(range(len(files))):
            raise CheckpointError(f"its optimizers of experts are of ranks {sorted(files)}: some are missing")
        return [files[rank] for rank in range(len(files))]

    def _named(self, name: str) -> _ExpertName | None:
        match = _NATIVE.fullmatch(name) if self.native else None
        if match is not None and match[1] in self.native:
            return _ExpertName(self.native[match[1]], match[1], int(match[2]), match[3])
        match = _AUTOEP.fullmatch(name) if self.autoep else None
        if match is not None and (prefix := match[1] or "") in self.autoep:
            return _ExpertName(self.autoep[prefix], prefix, None if match[3] is None else int(match[3]), f"w{match[2]}")
        return None

    def slot(self, name: str, place: PartPlace, rank: int | None = None, world: int = 1) -> ExpertSlot | None:
        """The slot of an expert's parameter; None if the parameter is no expert's. place: of the parameter in the unsliced one.

        rank: the name contains the expert's index on this data-parallel rank of `world`
        """
        named = self._named(name)
        if named is None:
            return None
        layer, first, num = named.layer, named.expert or 0, 1
        inner, boxes = place.whole, place.boxes or (whole_box(place.whole),)
        if named.expert is None:
            num, inner = place.whole[0], place.whole[1:]
            boxes = (whole_box(inner),)
        if rank is not None:
            ranks = layer.num // layer.own
            first += layer.own * (rank * ranks // world if self.is_strided else rank % ranks)
        if first + num > layer.num:
            raise CheckpointError(f"{name!r} is expert {first + num - 1} of {layer.num}")
        target = f"{named.prefix}deepspeed_moe.experts.stack.expert.{named.leaf}"
        if named.prefix in self.autoep:
            target = f"{named.prefix}experts.{'down_proj' if named.leaf == 'w2' else 'gate_up_proj'}"
            if named.leaf != "w2":
                row = inner[0] if named.leaf == "w3" else 0
                boxes = (Box((row, *(0 for _ in inner[1:])), inner),)
                inner = (2 * inner[0], *inner[1:])
        lifted = [Box((expert, *box.offsets), (1, *box.sizes)) for expert in range(first, first + num) for box in boxes]
        return ExpertSlot(target, PartPlace((layer.num, *inner), tuple(lifted)))

    def is_autoep(self, name: str) -> bool:
        """Whether the parameter belongs to AutoEP's experts, which are never sliced."""
        named = self._named(name)
        return named is not None and named.prefix in self.autoep

    def known_as(self, name: str) -> str:
        """The name of a parameter or buffer that is no expert's; in transformers' layer, if AutoEP replaced it."""
        prefix = next((prefix for prefix in self.autoep if name.startswith(prefix)), None)
        if prefix is None:
            return name
        leaf = name.removeprefix(prefix)
        if leaf.startswith("router."):
            leaf = f"gate.{leaf.removeprefix('router.').removeprefix('gate.')}"
        elif prefix in self.has_shared_gate:
            leaf = leaf.replace("shared_experts", "shared_expert", 1)
        return prefix + leaf

    def is_alias(self, name: str, module: Mapping[str, Any]) -> bool:
        """Whether this is AutoEP's router under the name of the model's own router."""
        prefix = next((prefix for prefix in self.autoep if name.startswith(prefix)), None)
        head, _, leaf = name.removeprefix(prefix or "").partition(".")
        return prefix is not None and head != "router" and f"{prefix}router.{leaf}" in module

    def others(self, params: Mapping[str, Stored]) -> Iterator[tuple[str, Stored]]:
        """The parameters that are no experts'."""
        return ((name, stored) for name, stored in params.items() if self._named(name) is None)

    def weights(self) -> Iterator[tuple[int, str, Sequence[Stored]]]:
        """The parameters of all experts: (slice, name in the whole model, tensor of each slice)."""
        for layer in self.layers:
            for row in zip(*layer.files, strict=True):  # the files of one expert
                states = [dict(_weights(read(self.folder / file))) for file in row]
                for name in states[0]:
                    for index in range(len(row)):
                        yield index, name, [state[name] for state in states]

    def on_rank(self, rank: int) -> dict[str, tuple[Shape, ExpertSlot]]:
        """The experts' parameters of one of the ranks with different experts."""
        params: dict[str, tuple[Shape, ExpertSlot | None]] = {}
        for layer in self.native.values():
            for file in layer.files[0][layer.own * rank : layer.own * (rank + 1)]:
                for name, stored in _weights(read(self.folder / file)):
                    params[name] = stored.shape, self.slot(name, PartPlace(stored.shape))
        for prefix, layer in self.autoep.items():
            state = dict(_weights(read(self.folder / layer.files[0][0])))
            for name in (f"{prefix}experts.{w}" for w in ("w1", "w2", "w3")):
                shape = layer.own, *state[f"{name}.0"].shape
                params[name] = shape, self.slot(name, PartPlace(shape), rank, layer.num // layer.own)
        return {name: (shape, slot) for name, (shape, slot) in params.items() if slot is not None}

    def in_order(self, dense: Mapping[str, Stored], optimizer: Mapping[str, Any]) -> list[tuple[str, Shape]]:
        """The names and shapes of parameters that are no experts', in the order of an optimizer's numbers.

        AutoEP's routers come last if the caller passed a list of parameters, not a generator.
        """
        order = [(name, stored.shape) for name, stored in dense.items()]
        if not self.autoep:
            return order
        numbers = [number for group in optimizer["param_groups"] if not group.get("moe") for number in group["params"]]
        states = [optimizer["state"].get(number, {}).values() for number in numbers]
        shapes = [value.shape for values in states for value in list(values)[-1:] if isinstance(value, Stored)]
        late = sorted(order, key=lambda pair: pair[0].startswith(tuple(f"{prefix}router." for prefix in self.autoep)))
        for candidate in (order, late):
            if [shape for _, shape in candidate if shape in shapes] == shapes:
                return candidate
        raise CheckpointError(
            "its optimizer has no names, and its states are in another order than the parameters: save it at stage 1"
        )

    def whole_shape(self, name: str, shape: Shape) -> Shape:
        """The shape of a whole parameter that has this shape on one of the ranks with different experts."""
        named = self._named(name)
        return shape if named is None or named.expert is not None else (named.layer.num, *shape[1:])


def _weights(state: Mapping[str, Any]) -> list[tuple[str, Stored]]:
    return [(name, stored) for name, stored in state.items() if isinstance(stored, Stored)]


def unwrapped(optimizer: Any) -> tuple[Any, dict[int, Stored]]:
    """An optimizer's own state, and its masters by number if bf16's FP16_UnfusedOptimizer wraps it.

    In fp16, DeepSpeed 0.19.8 divides gradients there by the loss scale, but has not multiplied the loss: moments are too small.
    """
    if not isinstance(optimizer, dict) or not optimizer.get("fp32_groups"):
        return optimizer, {}
    scale = optimizer.get("cur_scale", 1)
    if optimizer.get("dynamic_loss_scale") or scale != 1:  # a dynamic scale was higher before
        raise CheckpointError(
            f"it is of fp16 and ZeRO stage 0, whose moments DeepSpeed divides by the loss scale ({scale}): save it at stage 1, or "
            "load its weights alone (torch.load with weights_only=True)"
        )
    inner = optimizer["optimizer_state_dict"]
    groups = zip((group["params"] for group in inner["param_groups"]), optimizer["fp32_groups"], strict=True)
    return inner, {number: master for group in groups for number, master in zip(*group, strict=True)}


def numbered(
    optimizer: Mapping[str, Any], dense: Iterable[tuple[str, Shape]], experts: Sequence[tuple[str, Shape]]
) -> Iterator[tuple[int, str, Any]]:
    """(number, name, states) of the optimizer's parameters that have states; without `dense`, only of experts'."""
    groups, states, dense = optimizer["param_groups"], optimizer["state"], list(dense)
    of_experts = [group for group in groups if group.get("moe")]
    if len({group["name"] for group in of_experts}) > 1:
        raise CheckpointError("it is of ZeRO stage 0 with layers of several ep_size: save it at stage 1")
    names = _names_of(of_experts, states, experts)
    if dense:
        names |= _names_of([group for group in groups if not group.get("moe")], states, dense)
    for number, name in names.items():
        yield number, name, states[number]


def _names_of(
    groups: Sequence[Mapping[str, Any]], states: Mapping[int, Any], params: Sequence[tuple[str, Shape]]
) -> dict[int, str]:
    """The names of an optimizer's parameters that have states. params: the candidates, in the model's order.

    Raises CheckpointError if parameters of one shape are in several groups, or only some of them have states.
    """
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in params:
        by_shape.setdefault(tuple(shape), []).append(name)
    numbers: dict[Shape, list[int]] = {}
    owners: dict[Shape, set[int]] = {}
    for index, group in enumerate(groups):
        for number in group["params"]:
            values = states.get(number, {}).values()
            for shape in {value.shape for value in values if isinstance(value, Stored) and value.shape}:
                numbers.setdefault(shape, []).append(number)
                owners.setdefault(shape, set()).add(index)
    result: dict[int, str] = {}
    for shape, ids in numbers.items():
        names = by_shape.get(shape, [])
        if len(names) != len(ids) or len(owners[shape]) > 1:
            raise CheckpointError(
                f"its optimizer has no names, and has {len(ids)} states of shape {shape} in {len(owners[shape])} groups for "
                f"{', '.join(names[:3]) or 'no parameter'}: save it at stage 1, or load its weights alone (torch.load)"
            )
        result |= dict(zip(ids, names, strict=True))
    return result
