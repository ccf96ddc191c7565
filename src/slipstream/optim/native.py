"""Optimizers with native kernels, chunk by chunk, wherever master, moments, gradients and weights are stored.

A rule (optim/rules.py) is one optimizer's arithmetic; `NativeSteps` locates the states and the hyperparameters of each element.
Resident and offloaded states use the same calls, so a tier changes when data moves, never the result.

run   adjacent pieces with the same parameter group and step count, cut at chunks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.ops import Blocks, Stochastic
from slipstream.optim import rules
from slipstream.optim.rules import Rule
from slipstream.optim.sharded import Piece, ShardedSteps
from slipstream.zero.layout import ALIGN
from slipstream.zero.placement import Tier
from slipstream.zero.store import Section, Store, section, write
from slipstream.zero.stream import Chunk, Use, chunks
from slipstream.zero.unit import Unit

_CODED = 256  # elements that share a scale if states are in 8 bits (ops.Blocks)


class Run(NamedTuple):
    start: int
    stop: int
    group: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The storage format of a native optimizer's states."""

    dtype: torch.dtype = torch.float32  # of states; int8: codes with one scale per 256
    stochastic_seed: int | None = None  # None: round to nearest; else stochastic rounding of bf16 and codes

    @property
    def coded(self) -> bool:
        return self.dtype is torch.int8

    @property
    def align(self) -> int:
        """Parameters and shards start at multiples of so many elements, so that no block of codes is cut."""
        return _CODED if self.coded else ALIGN


class NativeSteps(ShardedSteps):
    """Applies a rule to the chunks of all units."""

    def __init__(
        self, inner: torch.optim.Optimizer, units: Sequence[Unit], rule: Rule, form: Form, *, chunk_numel: int, num_buffers: int
    ) -> None:
        super().__init__(inner, units)
        self.rule, self.form, self.homes = rule, form, units[0].homes
        self.steps_on_host, self.streams = self.homes.steps_on_host, Tier.DISK in (self.homes.tiers.optim, self.homes.tiers.weights)
        self.chunk_numel, self.num_buffers = chunk_numel, num_buffers
        self.stores: dict[int, dict[str, Store]] = {}  # unit index -> the rule's states, or their codes
        self.scales: dict[int, dict[str, Tensor]] = {}  # unit index -> scales of codes; always in memory, 1/64 byte per element
        self._chunks: dict[int, list[Chunk]] = {}
        self._runs: dict[int, list[Run]] = {}
        self._options: list[dict[str, Any]] = []
        self.unit_tables += [self.stores, self.scales, self._chunks]

    def drop(self, unit: Unit) -> None:
        for store in self.stores.pop(unit.index, {}).values():
            self.homes.drop(store)
        self.scales.pop(unit.index, None)
        self._chunks.pop(unit.index, None)  # they reference the stores

    def _stores(self, unit: Unit) -> dict[str, Store]:
        if unit.index not in self.stores:
            self.stores[unit.index], self.scales[unit.index] = {}, {}
            for name, signed in zip(self.rule.states, self.rule.signed, strict=True):
                dtype = torch.uint8 if self.form.coded and not signed else self.form.dtype
                self.stores[unit.index][name] = store = unit.homes.state(unit.master.numel, dtype)
                if self.form.coded:
                    device = "cpu" if store.view(0, 0) is None else store.get(0, 0).device
                    self.scales[unit.index][name] = torch.zeros(-(-store.numel // _CODED), device=device)
            for piece in self.pieces[unit.index]:
                initial = self._initial_state(piece, flat=True)
                for name, part in self.states(unit, piece).items():
                    if isinstance(initial.get(name), Tensor):
                        write(part, initial[name])
                if initial:
                    piece.step = int(initial.get("step", 1))
        return self.stores[unit.index]

    def unsupported_option(self, groups: Sequence[Mapping[str, Any]]) -> str:
        return rules.unsupported_option(self.inner, self.rule, groups)

    def begin(self, units: Sequence[Unit]) -> None:
        self._options = [
            {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"}
            for group in self.inner.param_groups
        ]
        nbytes = max((chunk.nbytes() for unit in units for chunk in self.chunks(unit)), default=0)
        # Only after `chunks` has made the states: those may set step counts
        self._runs = {unit.index: list(self._runs_of(unit)) for unit in units}
        if nbytes > (self.ring.slots[0].memory.numel() if self.ring else 0):
            self.ring = self.homes.ring(self.num_buffers, nbytes)
        if self.ring is not None:
            self.ring.since = self.homes.now()
        for piece in (piece for unit in units for piece in self.pieces[unit.index] if piece.param.requires_grad):
            piece.step += 1
        self.inner._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers check that the optimizer stepped first

    def chunks(self, unit: Unit) -> Sequence[Chunk]:
        if unit.index not in self._chunks:
            assert unit.grads is not None
            lane = self.homes.lane_from
            uses = {name: Use(store, read=True, write=True) for name, store in self._stores(unit).items()}
            uses["master"] = Use(unit.master, read=True, write=True, lane=lane(unit.master))
            uses["grads"] = Use(unit.grads, read=True, write=False, lane=lane(unit.grads))
            if unit.out is not None:
                uses["out"] = Use(unit.out, read=False, write=True, lane=lane(unit.out))
            most = unit.master.numel if self.rule.is_whole else self.chunk_numel
            self._chunks[unit.index] = chunks(unit.master.numel, uses, most)
        return self._chunks[unit.index]

    def _runs_of(self, unit: Unit) -> Iterator[Run]:
        """Maximal runs of adjacent trainable pieces for their next step, or one run per piece if the rule needs whole parameters.

        A run includes the padding between parameters and after the last one: gradients and weights are zero there, so no update
        changes them.
        """
        run: Run | None = None
        for piece in self.pieces[unit.index]:
            if not piece.param.requires_grad:
                continue
            align, step = self.form.align, piece.step + 1
            stop = min(-(-piece.stop // align) * align, unit.master.numel)
            if run is not None:
                extends = (run.group, run.step) == (piece.group, step) and piece.start <= run.stop
                if extends and not self.rule.is_whole:
                    run = run._replace(stop=stop)
                    continue
                yield run
            run = Run(piece.start, stop, piece.group, step)
        if run is not None:
            yield run

    def step(self, unit: Unit, chunk: Chunk, scale: float) -> None:
        master, grads, weights = chunk.tensors["master"], chunk.tensors["grads"], chunk.tensors.get("out")
        is_buffer = chunk.slot is not None  # `weights` is then a ring buffer that holds other chunks' weights
        done = 0
        for start, stop, group, step in self._runs[unit.index]:
            a, b = max(start, chunk.start) - chunk.start, min(stop, chunk.stop) - chunk.start
            if a >= b:
                continue
            part = None if weights is None else weights[a:b]
            states = self._states(unit, chunk, a, b)
            rounding = self._rounding(unit, step, chunk.start + a)
            self.rule.apply(self._options[group], step, rules.Arrays(master[a:b], grads[a:b], states, part), scale, rounding)
            if weights is not None and is_buffer:
                weights[done:a].copy_(master[done:a])  # frozen parameters and padding
            done = b
        if weights is not None and is_buffer:
            weights[done:].copy_(master[done:])

    def _states(self, unit: Unit, chunk: Chunk, a: int, b: int) -> list[Tensor | Blocks]:
        tensors = [chunk.tensors[name][a:b] for name in self.rule.states]
        if not self.form.coded:
            return list(tensors)
        span = slice((chunk.start + a) // _CODED, -(-(chunk.start + b) // _CODED))
        scales = self.scales[unit.index]
        return [Blocks(codes, scales[name][span]) for name, codes in zip(self.rule.states, tensors, strict=True)]

    def _rounding(self, unit: Unit, step: int, start: int) -> Stochastic | None:
        if self.form.stochastic_seed is None:
            return None
        # An element's number depends on its position in its unit, not on tiers, chunks or (except for padding) ranks
        return Stochastic(self.form.stochastic_seed, step, (unit.index << 40) + unit.optim_span[0] + start)

    def state_nbytes(self, unit: Unit) -> int:
        nbytes = unit.master.numel * self.form.dtype.itemsize + (-(-unit.master.numel // _CODED) * 4 if self.form.coded else 0)
        return len(self.rule.states) * nbytes

    def states(self, unit: Unit, piece: Piece) -> dict[str, Tensor | Section]:
        stores = self._stores(unit)
        if not self.form.coded:
            return {name: section(store, piece.start, piece.stop) for name, store in stores.items()}
        scales = self.scales[unit.index]
        coded = {name: CodedStore(store, scales[name]) for name, store in stores.items()}
        return {name: Section(store, piece.start, piece.stop - piece.start) for name, store in coded.items()}

    def scalars(self, unit: Unit, piece: Piece) -> dict[str, Any]:
        return {"step": piece.step}

    def make_states(self, unit: Unit, piece: Piece, dtypes: Mapping[str, torch.dtype]) -> Callable[[], None]:
        return lambda: None  # `_stores` makes them on first use, as zeros

    def load_scalars(self, unit: Unit, piece: Piece, values: dict[str, Any]) -> None:
        piece.step = int(values.get("step", 1))


class CodedStore(Store):
    """An fp32 view of an 8-bit state, for checkpoints and `optimizer_state`: decodes reads and encodes writes."""

    dtype = torch.float32

    def __init__(self, codes: Store, scales: Tensor) -> None:
        self.codes, self.scales, self.numel = codes, scales, codes.numel

    def is_away(self, start: int, stop: int) -> bool:
        return True

    def view(self, start: int, stop: int) -> Tensor | None:
        return None

    def settle(self) -> None:
        self.codes.settle()

    def get(self, start: int, stop: int) -> Tensor:
        first, last = self._blocks(start, stop)
        return self._read(first, last).float()[start - first : stop - first]

    def put(self, start: int, values: Tensor) -> None:
        stop = start + values.numel()
        first, last = self._blocks(start, stop)
        state = self._read(first, last).float()
        state[start - first : stop - first] = values
        coded = Blocks.of(state, self.codes.dtype)
        self.codes.put(first, coded.codes)
        self.scales[first // _CODED : -(-last // _CODED)] = coded.scales

    def _blocks(self, start: int, stop: int) -> tuple[int, int]:
        return start // _CODED * _CODED, min(-(-stop // _CODED) * _CODED, self.numel)

    def _read(self, first: int, last: int) -> Blocks:
        return Blocks(self.codes.get(first, last), self.scales[first // _CODED : -(-last // _CODED)])

    @property
    def resident_nbytes(self) -> int:
        return self.codes.resident_nbytes + self.scales.nbytes
