"""Optimizers in native passes, chunk by chunk, wherever master, moments, gradients and weights rest.

A `Rule` is one optimizer's arithmetic; `NativeSteps` knows where the states are and which hyperparameters hold for which
elements. Resident and offloaded states go through the same calls, so a tier changes when things move and never what is computed.

run   a stretch of neighbouring pieces that share a parameter group and a step count, cut at chunks
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream import ops
from slipstream.optim.sharded import Piece, ShardedSteps
from slipstream.zero.store import Chunk, Ring, Section, Store, Use, chunks, section
from slipstream.zero.unit import Unit

_CHUNK = 1 << 21  # elements: 28 MiB with gradients and weights in 16 bits; long enough for any disk, short beside a budget


class Rule(ABC):
    """One optimizer's arithmetic on a run of elements."""

    states: tuple[str, ...]  # what it keeps per element, as torch names it

    @abstractmethod
    def apply(
        self, options: Mapping[str, Any], step: int, master: Tensor, grad: Tensor, states: Sequence[Tensor], out: Tensor | None,
        scale: float,
    ) -> None:  # fmt: skip
        """Update `master` and `states` in place with `grad` times `scale`, and write the new weights to `out`. All 1D."""


class AdamW(Rule):
    """Adam and AdamW. Source: Kingma & Ba (arXiv 1412.6980); Loshchilov & Hutter (arXiv 1711.05101)."""

    states = ("exp_avg", "exp_avg_sq")

    def __init__(self, *, decoupled: bool, bias_correction: bool) -> None:
        self.decoupled, self.bias_correction = decoupled, bias_correction

    def apply(
        self, options: Mapping[str, Any], step: int, master: Tensor, grad: Tensor, states: Sequence[Tensor], out: Tensor | None,
        scale: float,
    ) -> None:  # fmt: skip
        beta1, beta2 = options["betas"]
        ops.adamw(
            master, grad, states[0], states[1], out, scale=scale, lr=options["lr"], beta1=beta1, beta2=beta2, eps=options["eps"],
            weight_decay=options["weight_decay"], step=step, decoupled=self.decoupled, bias_correction=self.bias_correction,
        )  # fmt: skip


class Run(NamedTuple):
    start: int
    stop: int
    group: int
    step: int


class NativeSteps(ShardedSteps):
    """A rule over the chunks of all units."""

    def __init__(
        self, inner: torch.optim.Optimizer, units: Sequence[Unit], rule: Rule, *, state_dtype: torch.dtype,
        chunk_numel: int = _CHUNK, num_buffers: int = 4,
    ) -> None:  # fmt: skip
        super().__init__(inner, units)
        self.rule, self.state_dtype = rule, state_dtype
        self.chunk_numel, self.num_buffers = min(chunk_numel, _CHUNK), num_buffers
        self.stores: dict[int, dict[str, Store]] = {}  # unit index -> the rule's states
        self._chunks: dict[int, list[Chunk]] = {}
        self._runs: dict[int, list[Run]] = {}
        self._options: list[dict[str, Any]] = []

    def _stores(self, unit: Unit) -> dict[str, Store]:
        if unit.index not in self.stores:
            made = {name: unit.homes.state(unit.master.numel, self.state_dtype) for name in self.rule.states}
            self.stores[unit.index] = made
            for piece in self.pieces[unit.index]:
                given = self._given_state(piece, flat=True)
                if given:
                    for name, store in made.items():
                        store.put(piece.start, given[name])
                    piece.step = int(given["step"])
        return self.stores[unit.index]

    def begin(self, units: Sequence[Unit]) -> None:
        self._options = [
            {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"}
            for group in self.inner.param_groups
        ]
        self._runs = {unit.index: list(_runs(self.pieces[unit.index])) for unit in units}
        nbytes = max((chunk.nbytes() for unit in units for chunk in self.chunks(unit)), default=0)
        if nbytes > (self.ring.slots[0].memory.numel() if self.ring else 0):
            self.ring = Ring(self.num_buffers, nbytes)
        self.inner._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask whether the optimizer stepped first

    def chunks(self, unit: Unit) -> Sequence[Chunk]:
        if unit.index not in self._chunks:
            assert unit.grads is not None
            uses = {name: Use(store, read=True, write=True) for name, store in self._stores(unit).items()}
            uses["master"] = Use(unit.master, read=True, write=True)
            uses["grads"] = Use(unit.grads, read=True, write=False)
            if unit.out is not None:
                uses["out"] = Use(unit.out, read=False, write=True)
            self._chunks[unit.index] = chunks(unit.master.numel, uses, self.chunk_numel)
        return self._chunks[unit.index]

    def step(self, unit: Unit, chunk: Chunk, scale: float) -> None:
        master, out = chunk.tensors["master"], chunk.tensors.get("out")
        grads = chunk.tensors["grads"].to(master.device)
        weights = out if out is None or out.device == master.device else torch.empty_like(out, device=master.device)
        is_buffer = chunk.slot is not None or weights is not out  # and holds other chunks' weights
        done = 0
        for start, stop, group, step in self._runs[unit.index]:
            a, b = max(start, chunk.start) - chunk.start, min(stop, chunk.stop) - chunk.start
            if a >= b:
                continue
            states = [chunk.tensors[name][a:b] for name in self.rule.states]
            part = None if weights is None else weights[a:b]
            self.rule.apply(self._options[group], step, master[a:b], grads[a:b], states, part, scale)
            if weights is not None and is_buffer:
                weights[done:a].copy_(master[done:a])  # frozen ones, and gaps
            done = b
        if weights is not None and out is not None and is_buffer:
            weights[done:].copy_(master[done:])
            if weights is not out:
                out.copy_(weights)

    def state_nbytes(self, unit: Unit) -> int:
        return len(self.rule.states) * unit.master.numel * self.state_dtype.itemsize

    def states(self, unit: Unit, piece: Piece) -> dict[str, Tensor | Section]:
        return {name: section(store, piece.start, piece.stop) for name, store in self._stores(unit).items()}

    def scalars(self, unit: Unit, piece: Piece) -> dict[str, Any]:
        return {"step": piece.step}

    def make_states(self, unit: Unit, piece: Piece, dtypes: Mapping[str, torch.dtype]) -> Callable[[], None]:
        return lambda: None  # they are there, or zero

    def load_scalars(self, unit: Unit, piece: Piece, values: dict[str, Any]) -> None:
        piece.step = int(values["step"])


def _runs(pieces: Sequence[Piece]) -> Iterator[Run]:
    """Maximal runs of trainable neighbours; counts their steps. The zero gap between two parameters belongs to the run: its
    gradient is zero and its weight too, so no update changes it."""
    run: Run | None = None
    for piece in pieces:
        if not piece.param.requires_grad:
            continue
        piece.step += 1
        if run is not None and (run.group, run.step) == (piece.group, piece.step) and piece.start - run.stop < 64:
            run = run._replace(stop=piece.stop)
        else:
            if run is not None:
                yield run
            run = Run(piece.start, piece.stop, piece.group, piece.step)
    if run is not None:
        yield run
