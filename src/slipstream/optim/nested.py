"""An optimizer, and those whose `step` its own calls (Lookahead, several optimizers as one): their groups and states as one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# Attributes in which torch notes what it has warned of and checked
_NOTES = {"_opt_called", "_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused"}


class Nested:
    """An optimizer and the optimizers in its attributes, however deep.

    A tensor's state in all of them is one dictionary. In it, `NAME@i` is the state NAME of an inner optimizer: of number i of
    those that have states of their own.
    """

    def __init__(self, outer: torch.optim.Optimizer) -> None:
        self.members = [outer]
        for member in self.members:  # grows meanwhile
            known = set(map(id, self.members))
            self.members += [each for each in _optimizers(vars(member).values()) if id(each) not in known]
            # What Optimizer.__init__ sets. Wrappers do not call it, because it copies the groups
            vars(member).setdefault("defaults", {})
            for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                if not isinstance(vars(member).get(hooks), OrderedDict):  # handles of hooks refer weakly to theirs
                    vars(member)[hooks] = OrderedDict(vars(member).get(hooks, ()))
        self.find_counts()
        self.first_counts = self.counts()

    def homes(self) -> list[dict[Any, Any]]:
        """Where counts are: each optimizer's attributes, and beside tensors in each mapping of states."""
        return [*map(vars, self.members), *(member.state for member in self.members)]

    def find_counts(self) -> None:
        """Look for names beside tensors in the mappings of states; `counts` knows those that were there."""
        self._beside: list[list[Any]] = [[key for key in member.state if not isinstance(key, Tensor)] for member in self.members]

    def counts(self) -> list[dict[str, Any]]:
        """The numbers in each home; some count steps."""
        pairs = zip(self.members, self._beside, strict=True)
        beside: list[dict[str, Any]] = [{name: member.state.get(name) for name in names} for member, names in pairs]
        values = [*map(vars, self.members), *beside]
        return [
            {name: value for name, value in home.items() if isinstance(value, int | float) and name not in _NOTES}
            for home in values
        ]

    def changed_counts(self) -> list[dict[str, Any]]:
        """The counts that have changed since this was built. The others are options; each rank may have its own (`rank`). Flags
        are none: they tell what an optimizer has built, which is not saved."""
        self.find_counts()
        pairs = zip(self.counts(), self.first_counts, strict=True)
        return [
            {name: value for name, value in now.items() if first.get(name) != value and not isinstance(value, bool)}
            for now, first in pairs
        ]

    def set_counts(self, counts: Iterable[Mapping[str, Any]]) -> None:
        """Set all counts, and remove those that have none."""
        for home, now, values in zip(self.homes(), self.counts(), counts, strict=True):
            for name in now.keys() - values.keys():
                del home[name]
            home.update(values)

    def groups(self) -> list[dict[str, Any]]:
        """The distinct parameter groups, the outer optimizer's first."""
        return list({id(group): group for member in self.members for group in member.param_groups}.values())

    def states(self) -> list[Any]:
        """The distinct mappings of tensors to states."""
        return list({id(member.state): member.state for member in self.members}.values())

    def state(self, tensor: Tensor) -> dict[str, Any]:
        parts = enumerate(states.get(tensor, {}) for states in self.states())
        return {f"{name}@{i}" if i else name: value for i, part in parts for name, value in part.items()}

    def pop(self, tensor: Tensor) -> dict[str, Any]:
        state = self.state(tensor)
        for states in self.states():
            states.pop(tensor, None)
        return state

    def put(self, tensor: Tensor, state: Mapping[str, Any]) -> None:
        """Replace the tensor's state."""
        self.pop(tensor)
        all_states = self.states()
        for key, value in state.items():
            name, _, i = key.partition("@")
            all_states[int(i or 0)].setdefault(tensor, {})[name] = value

    def misfit(self, names: Iterable[str]) -> str:
        """Why states of these names cannot be put; "" if they can."""
        places = {"", *map(str, range(1, len(self.states())))}
        wrong = sorted(name for name in names if name.partition("@")[2] not in places)
        kind = type(self.members[0]).__name__
        return f"{wrong[0]!r} is a state of an optimizer inside another, and this {kind} has no such optimizer" if wrong else ""

    def pop_all(self) -> dict[Tensor, dict[str, Any]]:
        tensors = {tensor for states in self.states() for tensor, state in states.items() if isinstance(state, dict)}
        return {tensor: self.pop(tensor) for tensor in tensors}


def _optimizers(values: Iterable[Any]) -> Iterator[torch.optim.Optimizer]:
    for value in values:
        if isinstance(value, torch.optim.Optimizer):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from _optimizers(value.values() if isinstance(value, dict) else value)
