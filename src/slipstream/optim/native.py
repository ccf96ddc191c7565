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

from slipstream.config.plan import Plan
from slipstream.ops import Blocks, Stochastic
from slipstream.optim import rules
from slipstream.optim.rules import Rule
from slipstream.optim.sharded import ShardedSteps, UpdatePiece
from slipstream.world.mesh import Axis
from slipstream.zero.layout import ALIGN, Span
from slipstream.zero.leaves import cuts_of_tensors, is_stack
from slipstream.zero.placement import Tier
from slipstream.zero.storage.homes import Homes
from slipstream.zero.storage.store import Section, Store, section, write
from slipstream.zero.storage.stream import StateChunk, StateUse, chunks, narrowed
from slipstream.zero.unit import Unit

_CODED = 256  # elements that share a scale in 8-bit states (ops.Blocks)
_HASHED = 16  # elements that share random bits (ops.Stochastic)


class Run(NamedTuple):
    start: int
    stop: int
    group: int
    step: int
    axes: tuple[Axis, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The storage format of a native optimizer's states."""

    dtype: torch.dtype = torch.float32  # of states; int8: codes with one scale per 256 elements
    stochastic_seed: int | None = None  # None: round to nearest; else stochastic rounding of bf16 and codes

    @classmethod
    def of(cls, plan: Plan) -> Form:
        return cls(dtype=plan.precision.state_dtype, stochastic_seed=plan.seed if plan.precision.stochastic_rounding else None)

    @property
    def coded(self) -> bool:
        return self.dtype is torch.int8

    @property
    def align(self) -> int:
        """Parameters and shards start at multiples of this many elements, so that no block of codes is cut."""
        return _CODED if self.coded else ALIGN

    @property
    def grain(self) -> int:
        """The number of elements of which a step updates all or none."""
        return _CODED if self.coded else 1 if self.stochastic_seed is None else _HASHED


@dataclass(slots=True, kw_only=True)
class Moments:
    """One unit's states, and the order in which a step visits them."""

    states: dict[str, Store]  # the rule's; in 8 bits, `MomentStore`s
    chunks: list[StateChunk]
    runs: list[Run]  # of the current step
    due: Sequence[StateChunk] = ()  # of the current step


class NativeSteps(ShardedSteps):
    """Applies a rule to the chunks of all units."""

    rule: Rule

    def __init__(
        self, inner: torch.optim.Optimizer, units: Sequence[Unit], rule: Rule, form: Form, *, chunk_numel: int, num_buffers: int
    ) -> None:
        super().__init__(inner, units, rule)
        self.form, self.homes = form, units[0].homes
        self.steps_on_host, self.streams = self.homes.steps_on_host, Tier.DISK in (self.homes.tiers.optim, self.homes.tiers.weights)
        self.chunk_numel, self.num_buffers = chunk_numel, num_buffers
        self._moments: dict[Unit, Moments] = {}
        self._options: list[dict[str, Any]] = []

    def drop(self, unit: Unit) -> None:
        del self.members[unit]
        moments = self._moments.pop(unit, None)
        for store in moments.states.values() if moments is not None else ():
            self.homes.drop(store.codes if isinstance(store, MomentStore) else store)

    def memory(self) -> Iterator[Tensor | Store]:
        for moments in self._moments.values():
            for store in moments.states.values():
                yield from (store.codes, store.scales) if isinstance(store, MomentStore) else (store,)

    def moments(self, unit: Unit) -> Moments:
        """The unit's states; made on first use, with the optimizer's initial state."""
        if unit not in self._moments:
            self._moments[unit] = self._allocate(unit)
            for piece in self.pieces([unit]):
                initial = self._initial_state(piece, flat=True)
                for name, part in self.states(piece).items():
                    if isinstance(initial.get(name), Tensor):
                        write(part, initial[name])
                if initial:
                    piece.step = int(initial.get("step", 1))
        return self._moments[unit]

    def _allocate(self, unit: Unit) -> Moments:
        states: dict[str, Store] = {}
        for name, signed in zip(self.rule.states, self.rule.signed, strict=True):
            dtype = torch.uint8 if self.form.coded and not signed else self.form.dtype
            states[name] = unit.homes.state(unit.master.numel, dtype)
        most = unit.master.numel if self.rule.is_whole else self.chunk_numel
        pieces = cut(self.homes, states, unit.master, unit.sums, unit.out, most)
        if self.form.coded:
            states = {name: MomentStore(store) for name, store in states.items()}
        return Moments(states=states, chunks=pieces, runs=[])

    def begin(self, units: Sequence[Unit]) -> None:
        self._options = [rules.plain_numbers(group) for group in self.inner.param_groups]
        nbytes = max((chunk.nbytes() for unit in units for chunk in self.moments(unit).chunks), default=0)
        for unit in units:  # only after `moments` has made the states, which may set step counts
            moments = self.moments(unit)
            moments.runs, moments.due = list(self._runs_of(unit)), moments.chunks
            if self.rest is not None:
                moments.due = narrowed(moments.chunks, [(run.start, run.stop) for run in moments.runs])
        if nbytes > (self.ring.slots[0].memory.numel() if self.ring else 0):
            self.ring = self.homes.ring(self.num_buffers, nbytes)
        if self.ring is not None:
            self.ring.since = self.homes.now()
        for piece in self.pieces(units):
            if self.due(piece) or (is_stack(piece.param) and piece.param.requires_grad):  # tensors of a stack share a step count
                piece.step += 1
        self.inner._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers check that the optimizer stepped first

    def chunks(self, unit: Unit) -> Sequence[StateChunk]:
        return self.moments(unit).due

    def _runs_of(self, unit: Unit) -> Iterator[Run]:
        """Maximal runs of adjacent trainable pieces for their next step, or one per tensor if the rule needs whole tensors.

        A run includes the padding between parameters and after the last one: gradients and weights are zero there, so no update
        changes them.
        """
        run: Run | None = None
        for piece in self.pieces([unit]):
            cuts = cuts_of_tensors(piece.param) if self.rule.is_whole else ()
            axes = tuple(unit.comms.family.parts_of(part.split) for part in cuts)
            for start, stop in self._parts(piece):
                following = Run(start, stop, piece.group, piece.step + 1, axes)
                if run is None:
                    run = following
                elif (run.group, run.step) == (piece.group, following.step) and start <= run.stop and not self.rule.is_whole:
                    run = run._replace(stop=stop)
                else:
                    yield run
                    run = following
        if run is not None:
            yield run

    def _parts(self, piece: UpdatePiece) -> Iterator[Span]:
        """The spans of a piece that a step updates, with the padding after it; each tensor of a stack if the rule needs wholes."""
        align = self.form.align
        for start, stop in self.due(piece):
            if not (self.rule.is_whole and is_stack(piece.param)):
                yield start, min(-(-stop // align) * align, piece.unit.master.numel) if stop == piece.stop else stop
                continue
            length = (piece.stop - piece.start) // piece.shape[0]
            if length % align:
                raise ValueError(
                    f"parameter {piece.name!r} is a stack of experts of {length} elements, whose norms need states in fp32, "
                    f'or a multiple of {align} elements: drop "slipstream": {{"optimizer_states": ...}}'
                )
            yield from ((at, at + length) for at in range(start, stop, length))

    def step(self, unit: Unit, chunk: StateChunk, scale: float) -> None:
        master, grads, weights = chunk.tensors["master"], chunk.tensors["grads"], chunk.tensors.get("out")
        is_buffer = chunk.slot is not None  # then `weights` is a ring buffer, which holds other chunks' weights
        done = 0
        for start, stop, group, step, axes in self._moments[unit].runs:
            a, b = max(start, chunk.start) - chunk.start, min(stop, chunk.stop) - chunk.start
            if a >= b:
                continue
            part = None if weights is None else weights[a:b]
            states = self._states(unit, chunk, a, b)
            rounding = self._rounding(unit, step, chunk.start + a)
            arrays = (master[a:b], grads[a:b], *states, part)
            self.rule.apply(self.options_of(unit, group, step), step, arrays, scale, rounding, axes)
            if weights is not None and is_buffer:
                weights[done:a].copy_(master[done:a])  # frozen parameters and padding
            done = b
        if weights is not None and is_buffer:
            weights[done:].copy_(master[done:])

    def options_of(self, unit: Unit, index: int, step: int) -> Mapping[str, Any]:
        return self._options[index]

    def _states(self, unit: Unit, chunk: StateChunk, a: int, b: int) -> list[Tensor | Blocks]:
        span = slice((chunk.start + a) // _CODED, -(-(chunk.start + b) // _CODED))
        tensors = ((chunk.tensors[name][a:b], store) for name, store in self._moments[unit].states.items())
        return [Blocks(tensor, store.scales[span]) if isinstance(store, MomentStore) else tensor for tensor, store in tensors]

    def _rounding(self, unit: Unit, step: int, start: int) -> Stochastic | None:
        if self.form.stochastic_seed is None:
            return None
        # An element's number depends on its position in its unit, not on tiers, chunks or (except for padding) ranks
        return Stochastic(self.form.stochastic_seed, step, (unit.index << 40) + unit.optim_span[0] + start)

    def states(self, piece: UpdatePiece) -> dict[str, Tensor | Section]:
        return {name: section(store, piece.start, piece.stop) for name, store in self.moments(piece.unit).states.items()}

    def scalars(self, piece: UpdatePiece) -> dict[str, Any]:
        return {"step": piece.step}

    def make_states(self, piece: UpdatePiece, dtypes: Mapping[str, torch.dtype]) -> Callable[[], None]:
        return lambda: None  # `moments` makes them on first use, as zeros

    def load_scalars(self, piece: UpdatePiece, values: dict[str, Any]) -> None:
        piece.step = int(values.get("step", 1))


def cut(homes: Homes, states: Mapping[str, Store], master: Store, grads: Store, out: Store | None, most: int) -> list[StateChunk]:
    """Cut a unit's optimizer span into chunks of at most `most` elements. `out`: its weights, if they are not their own masters."""
    uses = {name: StateUse(store, read=True, write=True) for name, store in states.items()}
    uses["master"] = StateUse(master, read=True, write=True, lane=homes.lane_from(master))
    uses["grads"] = StateUse(grads, read=True, write=False, lane=homes.lane_from(grads))
    if out is not None:
        uses["out"] = StateUse(out, read=False, write=True, lane=homes.lane_from(out))
    return chunks(master.numel, uses, most)


class MomentStore(Store):
    """An 8-bit state. Checkpoints and `optimizer_state` see fp32: reads decode, writes encode.

    The scales are always in memory, beside the codes or on the host: 1/64 byte per element.
    """

    dtype = torch.float32

    def __init__(self, codes: Store) -> None:
        self.codes, self.numel = codes, codes.numel
        device = "cpu" if codes.view(0, 0) is None else codes.get(0, 0).device
        self.scales = torch.zeros(-(-codes.numel // _CODED), dtype=torch.float32, device=device)

    def get(self, start: int, stop: int) -> Tensor:
        first = start // _CODED
        return self._read(first, -(-stop // _CODED)).float()[start - first * _CODED :][: stop - start]

    def put(self, start: int, values: Tensor) -> None:
        first, last = start // _CODED, -(-(start + values.numel()) // _CODED)
        state = self._read(first, last).float()
        state[start - first * _CODED :][: values.numel()] = values
        coded = Blocks.of(state, self.codes.dtype)
        self.codes.put(first * _CODED, coded.codes)
        self.scales[first:last] = coded.scales

    def _read(self, first: int, last: int) -> Blocks:
        return Blocks(self.codes.get(first * _CODED, min(last * _CODED, self.numel)), self.scales[first:last])

    @property
    def resident_nbytes(self) -> int:
        return self.codes.resident_nbytes + self.scales.nbytes
