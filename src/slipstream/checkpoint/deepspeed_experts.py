"""The experts of a DeepSpeed checkpoint, each with parameters of its own, as parts of the stacks of `deepspeed.moe.layer.MoE`.

Files of DeepSpeed 0.19.8 next to those of other models (deepspeed_parts.py):

layer_L_expert_E_mp_rank_00_model_states.pt    expert E of the model's layer L of experts, named by its index in the layer
[bf16_]zero_pp_rank_D_mp_rank_00_optim_states.pt  ZeRO-1, 2: the states of rank D's experts, named by their index on that rank
expp_rank_R_mp_rank_00_optim_states.pt         without ZeRO: the optimizer of the R-th rank of those that have different experts

Optimizers without ZeRO number their parameters, in the order of their groups. `numbered` finds the names by shape, and in the
order of the model among parameters of one shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.flat_slice import Shape
from slipstream.checkpoint.pickled import Stored, read

_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_00_model_states\.pt")
_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_NAME = re.compile(r"\.?(|.*\.)deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.+)")


class ExpertSlot(NamedTuple):
    """The place of an expert's parameter in the stack of its layer."""

    name: str  # of the stack
    whole: Shape
    start: int  # first of its elements


class ExpertFiles:
    """The layers of experts of a checkpoint. Raises CheckpointError if files are missing."""

    def __init__(self, folder: Path, names: Sequence[str], model: Mapping[str, Any], num_parts: int) -> None:
        files = {(int(match[1]), int(match[2])): match[0] for match in map(_FILE.fullmatch, names) if match}
        self.folder = folder
        self.numbers = [int(number) for number in model.get("num_experts") or [] if files]
        self.files = [[files.get((layer, expert), "") for expert in range(num)] for layer, num in enumerate(self.numbers)]
        self.prefixes: dict[str, int] = {}  # "blocks.0.moe." -> index of the layer
        if files or model.get("num_experts"):
            self._check(files, model, num_parts)
            self._open(model)

    def _check(self, files: Mapping[tuple[int, int], str], model: Mapping[str, Any], num_parts: int) -> None:
        if model.get("ds_autoep_layers"):
            raise CheckpointError("DeepSpeed's AutoEP made its layers of experts, and these are not imported")
        if num_parts > 1:
            raise CheckpointError(f"it has experts in {num_parts} pipeline stages or slices, which are not imported")
        for layer, row in enumerate(self.files):
            if "" in row:
                raise CheckpointError(f"it has no layer_{layer}_expert_{row.index('')}_mp_rank_00_model_states.pt")
        if len(files) != sum(self.numbers) or not files:
            raise CheckpointError(f"it has {len(files)} files of experts, and its layers have {model.get('num_experts')} experts")

    def _open(self, model: Mapping[str, Any]) -> None:
        for layer, row in enumerate(self.files):
            for name in read(self.folder / row[0]):
                self.prefixes[_split(name)[0]] = layer
        names_of_rank = {*(name for group in model["param_shapes"] or [] for name in group), *(model["frozen_param_shapes"] or ())}
        self.own = self._experts_of_a_rank(names_of_rank)
        self.is_strided = bool((model.get("ds_config") or {}).get("use_data_before_expert_parallelism"))

    def _experts_of_a_rank(self, names: set[str]) -> list[int]:
        """By layer. Without ZeRO, no rank's names are stored, and all layers are split over as many ranks as saved optimizers."""
        own: list[set[int]] = [set() for _ in self.numbers]
        for prefix, expert, _ in map(_split, filter(_NAME.fullmatch, names)):
            own[self.prefixes[prefix]].add(expert)
        ranks = max(len(self.optimizers()), 1)
        return [len(each) or number // ranks for each, number in zip(own, self.numbers, strict=True)]

    def optimizers(self) -> list[str]:
        """The files of optimizers without ZeRO, by rank."""
        files = {int(match[1]): match[0] for match in map(_OPTIM.fullmatch, (path.name for path in self.folder.iterdir())) if match}
        if sorted(files) != list(range(len(files))):
            raise CheckpointError(f"its optimizers of experts are of ranks {sorted(files)}: some are missing")
        return [files[rank] for rank in range(len(files))]

    def slot(self, name: str, shape: Shape, rank: int | None = None, world: int = 1) -> ExpertSlot | None:
        """Of a parameter; None: it is no expert's. rank: the name has the expert's index on this data-parallel rank of `world`."""
        if not self.numbers or not _NAME.fullmatch(name):
            return None
        prefix, expert, leaf = _split(name)
        layer = self.prefixes[prefix]
        if rank is not None:
            ranks = self.numbers[layer] // self.own[layer]
            expert += self.own[layer] * (rank * ranks // world if self.is_strided else rank % ranks)
        if expert >= self.numbers[layer]:
            raise CheckpointError(f"{name!r} is expert {expert} of {self.numbers[layer]}")
        stack = f"{prefix}deepspeed_moe.experts.stack.expert.{leaf}"
        return ExpertSlot(stack, (self.numbers[layer], *shape), expert * math.prod(shape))

    def others(self, params: Mapping[str, Stored]) -> Iterator[tuple[str, Stored]]:
        """The parameters that are no expert's."""
        return ((name, stored) for name, stored in params.items() if not self.numbers or not _NAME.fullmatch(name))

    def weights(self) -> Iterator[tuple[str, Stored]]:
        """The parameters of all experts, under their names in the whole model."""
        for row in self.files:
            for file in row:
                yield from _weights(read(self.folder / file))

    def on_rank(self, rank: int) -> list[tuple[str, Stored]]:
        """Those of the experts of one rank of those that have different experts."""
        files = [file for row, own in zip(self.files, self.own, strict=True) for file in row[own * rank : own * (rank + 1)]]
        return [each for file in files for each in _weights(read(self.folder / file))]


def _weights(state: Mapping[str, Any]) -> list[tuple[str, Stored]]:
    return [(name, stored) for name, stored in state.items() if isinstance(stored, Stored)]


def _split(name: str) -> tuple[str, int, str]:
    """The module of the layer with a dot, the expert, and the name of the expert's parameter."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"a file of an expert has {name!r}")
    return match[1], int(match[2]), match[3]


def numbered(
    optimizer: Mapping[str, Any], dense: Sequence[tuple[str, Stored]], experts: Sequence[tuple[str, Stored]]
) -> Iterator[tuple[str, Stored, Any]]:
    """The parameters of an optimizer that have states, their weights, and these states. No `dense` ones: only the experts'."""
    weights, groups, states = dict([*dense, *experts]), optimizer["param_groups"], optimizer["state"]
    of_experts = [group for group in groups if group.get("moe")]
    if len({group["name"] for group in of_experts}) > 1:
        raise CheckpointError("it is of ZeRO stage 0 with layers of several ep_size: save it at stage 1")
    names = _names_of(of_experts, states, experts)
    if dense:
        names |= _names_of([group for group in groups if not group.get("moe")], states, dense)
    for number, name in names.items():
        yield name, weights[name], states[number]


def _names_of(
    groups: Sequence[Mapping[str, Any]], states: Mapping[int, Any], params: Sequence[tuple[str, Stored]]
) -> dict[int, str]:
    """The names of the parameters of an optimizer's groups that have states; params: those that they may be, in the model's order.

    Raises CheckpointError if several parameters of one shape are in several groups, or only some of them have states.
    """
    by_shape: dict[Shape, list[str]] = {}
    for name, stored in params:
        by_shape.setdefault(stored.shape, []).append(name)
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
