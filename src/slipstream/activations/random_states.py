"""Random states beside torch's own, from which ranks of sliced layers draw separately: Megatron's tracker (arXiv:1909.08053).

    tracked.add("model-parallel-rng", seed + rank)
    with tracked.fork():              # draws inside use this state; torch's own state stays unchanged
        hidden = dropout(hidden)

`tracked` belongs to the process, like torch's generators. A checkpointed function draws the same numbers in its recompute, and an
engine's checkpoints contain the states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

MODEL_PARALLEL = "model-parallel-rng"


class RandomStates:
    """Random states of this rank's device, by name."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds = set[int]()

    def reset(self) -> None:
        """Forget all."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self._states)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state. Raises ValueError if a state has this name, or this seed, which would draw the same numbers."""
        if name in self._states or seed in self._seeds:
            raise ValueError(
                f"there is a random state {name!r} or one with the seed {seed} already; call reset() first, or take another seed"
            )
        before = _generator().get_rng_state()
        seed_device(seed)
        self._states[name] = _generator().get_rng_state()
        self._seeds.add(seed)
        _generator().set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the named state inside. Raises ValueError for an unknown name."""
        if name not in self._states:
            raise ValueError(f"there is no random state {name!r}; add({name!r}, seed) makes it, or model_parallel_cuda_manual_seed")
        before = _generator().get_rng_state()
        _generator().set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _generator().get_rng_state()
            _generator().set_rng_state(before)

    @contextmanager
    def again(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, draw again from earlier states."""
        now = self._states
        self.set_states(states)
        try:
            yield
        finally:
            self._states = now


tracked = RandomStates()


def seed_device(seed: int) -> None:
    """Seed the generator of this rank's device."""
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _generator() -> Any:
    """The module with the state of this rank's device."""
    return torch.cuda if torch.cuda.is_available() else torch
