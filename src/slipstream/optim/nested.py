"""An optimizer, and those whose `step` its own calls (Lookahead, several optimizers as one): their groups and states as one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


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
                vars(member)[hooks] = OrderedDict(vars(member).get(hooks, ()))

    def counts(self) -> list[dict[str, Any]]:
        """The numbers in each optimizer's attributes; some count its steps."""
        return [{name: value for name, value in vars(each).items() if isinstance(value, int | float)} for each in self.members]

    def set_counts(self, counts: Iterable[Mapping[str, Any]]) -> None:
        for member, values in zip(self.members, counts, strict=True):
            vars(member).update(values)

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

    def pop_all(self) -> dict[Tensor, dict[str, Any]]:
        return {tensor: self.pop(tensor) for tensor in {tensor for states in self.states() for tensor in states}}


def _optimizers(values: Iterable[Any]) -> Iterator[torch.optim.Optimizer]:
    for value in values:
        if isinstance(value, torch.optim.Optimizer):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from _optimizers(value.values() if isinstance(value, dict) else value)
