"""Local steps with an outer optimizer (DiLoCo, Douillard et al. 2023, arXiv 2311.08105): replicas that rarely communicate.

Each replica of the sharded states trains on its own, with its own optimizer states and gradient norm, without any communication
between replicas. After `every` steps, all replicas take a round:

    mean     = the mean over replicas of anchor - master
    momentum = outer_momentum * momentum + mean
    anchor   = anchor - outer_lr * (mean + outer_momentum * momentum)           Nesterov's, on the weights of the last round
    master   = anchor

With `overlap`, that many steps run while the differences travel, and a master keeps the progress that it made in them:

    master   = anchor + (master - its value when the round began)

A rank does so for the elements of its optimizer span, with the ranks that hold the same span in the other replicas. A replica may
be cut into pipeline stages and slices, and its states may be sharded: it is a number of consecutive ranks of each stage. Calls that
read the weights of the whole engine (a checkpoint, `save_pretrained`, ...) end a period early with a round, so that all replicas
have the same weights. A checkpoint contains the momentum under each parameter's name, and the mean of the replicas' optimizer
states, from which all replicas continue. Ranks write parts of these states, and the momentum of one replica divided by the variance
of another, which may be 0, would explode.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoint import FlatSlice
from slipstream.config import schema
from slipstream.ops import wire
from slipstream.ops.wire import WIRE_BLOCK, Feedback
from slipstream.train.saving import entries
from slipstream.train.saving.entries import spread_weights
from slipstream.train.states import States
from slipstream.world.mesh import Differs
from slipstream.zero.build import connect_axis
from slipstream.zero.comm import Buffer, Comm, Pending, sum_over
from slipstream.zero.reduction import Coded, Dense, Reduction, Rounded, wire_numel
from slipstream.zero.storage.store import Store, copy_store, read, write
from slipstream.zero.unit import Unit

log = logging.getLogger(__name__)

_CODES = {"int8": 8, "int4": 4}
READING = frozenset(
    {"save_checkpoint", "save_pretrained", "named_weights", "consolidated_state_dict", "ema", "optimizer.state_dict"}
)


@dataclass(slots=True)
class _Outer:
    """The outer optimizer of one unit, over this rank's optimizer span; fp32, in the tier of the masters."""

    anchor: Store
    momentum: Store
    sent: Feedback | None  # the quantization error of this rank's differences
    served: Feedback | None  # the quantization error of this rank's part of the mean


class _Link:
    """The exchange of one family's differences with the other replicas."""

    def __init__(self, comm: Comm, exchange: str) -> None:
        self.comm, self._exchange = comm, exchange
        bits = _CODES.get(exchange)
        self.reduction: Reduction = Dense(comm) if bits is None else Coded(comm, 1.0, bits)
        if exchange == "bf16":
            self.reduction = Rounded(comm)

    def cuts(self, numel: int) -> list[int]:
        """The cuts between the parts of `numel` elements that each replica averages; parts are equal, in whole blocks of codes."""
        part = -(-numel // (self.comm.size * WIRE_BLOCK)) * WIRE_BLOCK
        return [part * i for i in range(self.comm.size + 1)]

    def buffers(self, numel: int) -> tuple[Buffer, Buffer]:
        """Buffers for `numel` differences, and for what is sent. Collective."""
        numel = self.cuts(numel)[-1]
        full, bits = self.comm.allocate([(numel, torch.float32)])[0], _CODES.get(self._exchange)
        if bits is None and self._exchange == "fp32":
            return full, full
        kind = (numel, torch.bfloat16) if bits is None else (wire_numel(numel, bits), torch.uint8)
        return full, self.comm.allocate([kind])[0]


class _Flight:
    """One unit's difference in flight: first summed on the ranks that average it (scatter), then sent to all (spread)."""

    def __init__(self, link: _Link, outer: _Outer, buffers: tuple[Buffer, Buffer], difference: Tensor, alpha: float) -> None:
        self.link, self.outer, self.difference = link, outer, difference
        self.full, self.wire = buffers
        self.cuts = link.cuts(difference.numel())
        values = torch.cat([difference, difference.new_zeros(self.cuts[-1] - difference.numel())])
        link.comm.reusable(self.wire)
        own = self.full.tensor[self.cuts[link.comm.index] : self.cuts[link.comm.index + 1]]
        self.moved: Pending[Any] = link.reduction.scatter(
            values, self.wire, self.cuts, own, outer.sent, alpha=alpha, accumulate=False
        )
        self.is_spread = False

    def spread(self) -> None:
        if not self.is_spread:
            self.moved.wait()
            self.moved, self.is_spread = self.link.reduction.spread(self.full, self.wire, self.cuts, self.outer.served), True

    def mean(self) -> Tensor:
        """`alpha` times the sum over replicas, in memory that the next flight overwrites."""
        self.spread()
        self.moved.wait()
        return self.full.tensor[: self.difference.numel()]


class LocalSteps:
    """Counts the steps of an engine's states and takes the rounds."""

    def __init__(self, states: States, plan: schema.LocalSteps, transport: str) -> None:
        """Collective."""
        self.states, self.plan = states, plan
        self.since = self.rounds = 0  # steps since the last round began; number of rounds
        trained = [unit for unit in states.units if unit.grads is not None]
        self._links: dict[Differs, _Link] = {}
        self._buffers: dict[Unit, tuple[Buffer, Buffer]] = {}
        comms: dict[tuple[int, ...], Comm] = {}  # one per set of ranks, by which the watch tells transports apart
        for key, family in sorted(states.mesh.families.items()):
            units = [unit for unit in trained if unit.comms.family.differs == key]
            if family.apart.ranks not in comms:
                comms[family.apart.ranks] = connect_axis(family.apart, states.device, transport, states.watch)
            self._links[key] = link = _Link(comms[family.apart.ranks], plan.exchange)
            if plan.overlap:
                self._buffers |= {unit: link.buffers(unit.master.numel) for unit in units}
            else:  # one difference is in flight at a time
                shared = link.buffers(max((unit.master.numel for unit in units), default=0))
                self._buffers |= dict.fromkeys(units, shared)
        self._outer = {unit: self._start(unit) for unit in trained}
        self._flights: dict[Unit, _Flight] = {}

    @property
    def comm(self) -> Comm:
        """The ranks with the same place in each replica, ordered by replica."""
        return self._links[()].comm

    def end_step(self, is_applied: bool) -> None:
        """Count a step, also a step that this replica skipped: the other replicas do not know of it."""
        self.since += 1
        if self._flights and 2 * self.since >= self.plan.overlap:
            for flight in self._flights.values():
                flight.spread()
        if self._flights and self.since >= self.plan.overlap:
            self._land()
        if self.since >= self.plan.every:
            self._begin(self.plan.overlap)

    def before(self, method: str) -> None:
        """Make the replicas' weights equal before a call that reads them. Collective."""
        if (self.since or self._flights) and method in READING:
            self.take_round()
        if method in ("save_checkpoint", "optimizer.state_dict"):
            self._average_states()
        if method in READING and self.states.average is not None:
            for store in self.states.average.stores():
                store.put(0, self._averaged(store.whole()))

    def take_round(self) -> None:
        """Exchange the differences and step the anchors. Collective over all replicas."""
        if self._flights:
            self._land()
        self._begin(0)

    @torch.no_grad()
    def _begin(self, overlap: int) -> None:
        """Send the differences. Without overlap, wait for each one and step its anchor."""
        if late := [unit for unit in self.states.units if unit.grads is not None and unit not in self._outer]:
            raise ValueError(
                f"parameter {late[0].names[0]!r} was frozen at initialize() and is trained now, which slipstream.local_steps does "
                "not follow: replicas would keep weights of their own; unfreeze it before initialize()"
            )
        self.since, self.rounds = 0, self.rounds + 1
        self.states.settle()
        device, finite = self.states.device, self._find_finite()  # the device of the exchange; states may be elsewhere
        alpha, is_in = 1 / int(finite.sum()), bool(finite[self.comm.index])
        for unit, outer in self._outer.items():
            if not is_in:
                copy_store(unit.master, outer.anchor)
            difference = outer.anchor.whole().to(device) - unit.master.whole().to(device).float()
            link = self._links[unit.comms.family.differs]
            flight = _Flight(link, outer, self._buffers[unit], difference, alpha)
            if overlap:
                self._flights[unit] = flight
            else:
                self._step(outer, flight)
                copy_store(unit.master, outer.anchor)
        if not overlap or not finite.all():
            spread_weights(self.states)

    @torch.no_grad()
    def _land(self) -> None:
        """Step the anchors by the differences in flight, and move the masters with them."""
        self.states.settle()
        for unit, flight in self._flights.items():
            since_anchor = unit.master.whole().to(self.states.device).float() - flight.outer.anchor.whole().to(self.states.device)
            self._step(flight.outer, flight)
            unit.master.put(0, flight.outer.anchor.whole().to(self.states.device) + (since_anchor + flight.difference))
        self._flights.clear()
        spread_weights(self.states)

    def _step(self, outer: _Outer, flight: _Flight) -> None:
        device, mu, mean = self.states.device, self.plan.outer_momentum, flight.mean()
        momentum = outer.momentum.whole().to(device) * mu + mean
        outer.momentum.put(0, momentum)
        outer.anchor.put(0, outer.anchor.whole().to(device) - (mean + momentum * mu) * self.plan.outer_lr)

    def _find_finite(self) -> Tensor:
        """Which replicas have finite weights: bool [replicas]. Zeroes the optimizer states of the others. Collective.

        Raises RuntimeError if there is none.
        """
        own = all(bool(unit.master.whole().isfinite().all()) for unit in self._outer)
        all_finite = self.states.replica.exchange(torch.tensor([float(own)], dtype=torch.float64)).min()
        finite = self.comm.exchange(all_finite.view(1)).view(-1) > 0
        if not finite.any():
            raise RuntimeError(
                "no replica of slipstream.local_steps has finite weights: load the last checkpoint, and lower the lr"
            )
        if finite.all():
            return finite
        failed = [i for i, is_finite in enumerate(finite.tolist()) if not is_finite]
        log.warning("round %d: weights of replicas %s are not finite; they go on from the mean of the others", self.rounds, failed)
        for piece in self.states.steps.pieces() if not finite[self.comm.index] else ():
            for part in self.states.steps.states(piece).values():
                write(part, torch.zeros_like(read(part)))  # all of them: a momentum left over a variance of 0 would explode
        return finite

    @torch.no_grad()
    def _average_states(self) -> None:
        """Give all replicas the mean of the optimizer states that all of them have (one may have skipped all steps). Collective."""
        steps = self.states.steps
        own = [steps.states(piece) for piece in steps.pieces()]
        common = [set.intersection(*each) for each in zip(*self.comm.axis.gather([{*states} for states in own]), strict=True)]
        for states, names in zip(own, common, strict=True):
            for name in sorted(names):
                write(states[name], self._averaged(read(states[name])))

    def _averaged(self, values: Tensor) -> Tensor:
        """The mean over replicas of the same elements. Collective over the replicas."""
        total = values.to(self.states.device, torch.float32, copy=True)
        sum_over(total, self.comm.axis)
        return total / self.comm.size

    def _start(self, unit: Unit) -> _Outer:
        anchor, momentum = (unit.homes.state(unit.master.numel, torch.float32) for _ in range(2))
        copy_store(anchor, unit.master)
        cuts = self._links[unit.comms.family.differs].cuts(unit.master.numel)

        def lost(numel: int) -> Feedback | None:
            coded = torch.zeros(wire.nbytes(numel, 8), dtype=torch.uint8, device=self.states.device)
            return Feedback(coded) if self.plan.exchange != "fp32" else None

        return _Outer(anchor, momentum, lost(cuts[-1]), lost(cuts[1]))

    # -- checkpoints --

    def tensors(self) -> dict[str, FlatSlice]:
        """This rank's ranges of the momentum."""
        return {
            f"{entries.OUTER}{name}": part
            for unit, outer in self._outer.items()
            for name, _, part in entries.slices(unit, outer.momentum)
        }

    def restart(self, loaded: Collection[str]) -> None:
        """Continue from loaded masters, and from the momentum under the names in `loaded`; other momentum starts at zero."""
        names, self.since = set(loaded), 0
        for flight in self._flights.values():
            flight.mean()  # wait for it, and drop it
        self._flights.clear()
        for unit, outer in self._outer.items():
            copy_store(outer.anchor, unit.master)
            if not names & {f"{entries.OUTER}{name}" for name in unit.names}:
                outer.momentum.put(0, torch.zeros(outer.momentum.numel, device=self.states.device))
            for feedback in (outer.sent, outer.served):
                if feedback is not None:
                    feedback.error.zero_()

    def close(self) -> None:
        for comm in {link.comm for link in self._links.values()}:
            comm.close()
