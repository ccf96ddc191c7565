"""Local steps with an outer optimizer (DiLoCo, Douillard et al. 2023, arXiv 2311.08105): replicas that meet now and then.

The replicas of the sharded states train on their own, each with its own optimizer states and gradient norm; nothing travels between
them. After `every` steps, all replicas take a round:

    mean     = the mean over replicas of anchor - master
    momentum = outer_momentum * momentum + mean
    anchor   = anchor - outer_lr * (mean + outer_momentum * momentum)           Nesterov's, on the weights of the last round
    master   = anchor

A rank does so for the elements of its optimizer span, with the ranks that have the same span in the other replicas. A replica may
be cut into pipeline stages and slices, and its states sharded: it is so many consecutive ranks of each stage. Calls that
read the weights of the whole engine (a checkpoint, `save_pretrained`, ...) end a period early with a round, so that all replicas
have the same weights. A checkpoint has the momentum under each parameter's name, and the mean of the replicas' optimizer states,
which all of them go on from: ranks write parts of them, and a momentum of one replica over the variance of another, which may be
0, would explode.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from slipstream.checkpoint import FlatSlice
from slipstream.config.plan import LocalStepsPlan
from slipstream.ops import wire
from slipstream.ops.wire import WIRE_BLOCK, Feedback
from slipstream.train.saving import entries
from slipstream.train.saving.entries import spread_weights
from slipstream.train.states import States
from slipstream.world.mesh import Differs
from slipstream.zero.build import connect_axis
from slipstream.zero.comm import Comm, sum_over
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
    sent: Feedback | None  # what this rank's differences have lost on the wire
    served: Feedback | None  # what this rank's part of the mean has lost on the wire


class _Link:
    """The exchange of one family's differences with the other replicas."""

    def __init__(self, comm: Comm, longest: int, exchange: str) -> None:
        self.comm, bits = comm, _CODES.get(exchange)
        numel = self.cuts(longest)[-1]
        self._full = comm.allocate([(numel, torch.float32)])[0]  # differences, and their mean
        self._wire, self._reduction = self._full, cast(Reduction, Dense(comm))
        if bits is not None:
            self._wire = comm.allocate([(wire_numel(numel, bits), torch.uint8)])[0]
            self._reduction = Coded(comm, 1.0, bits)
        elif exchange == "bf16":
            self._wire, self._reduction = comm.allocate([(numel, torch.bfloat16)])[0], Rounded(comm)

    def cuts(self, numel: int) -> list[int]:
        """The parts of `numel` elements that each replica averages: equal, of whole blocks of codes."""
        part = -(-numel // (self.comm.size * WIRE_BLOCK)) * WIRE_BLOCK
        return [part * i for i in range(self.comm.size + 1)]

    def mean(self, outer: _Outer, difference: Tensor, alpha: float) -> Tensor:
        """`alpha` times the sum over replicas."""
        cuts = self.cuts(difference.numel())
        values = torch.cat([difference, difference.new_zeros(cuts[-1] - difference.numel())])
        sums = self._full.tensor[: cuts[-1]]
        self.comm.reusable(self._wire)
        own = sums[cuts[self.comm.index] : cuts[self.comm.index + 1]]
        self._reduction.scatter(values, self._wire, cuts, own, outer.sent, alpha=alpha, accumulate=False).wait()
        self._reduction.spread(self._full, self._wire, cuts, outer.served)
        return sums[: difference.numel()]


class LocalSteps:
    """Counts the steps of an engine's states, and takes the rounds."""

    def __init__(self, states: States, plan: LocalStepsPlan, transport: str) -> None:
        """Collective."""
        self.states, self.plan = states, plan
        self.since = self.rounds = 0  # steps since the last round; rounds
        trained = [unit for unit in states.units if unit.grads is not None]
        self._links: dict[Differs, _Link] = {}
        for key, family in sorted(states.mesh.families.items()):
            longest = max((unit.master.numel for unit in trained if unit.comms.family.differs == key), default=0)
            comm = connect_axis(family.apart, states.device, transport, states.watch)
            self._links[key] = _Link(comm, longest, plan.exchange)
        self._outer = {unit: self._start(unit) for unit in trained}

    @property
    def comm(self) -> Comm:
        """The ranks with the same place in each replica, ordered by replica."""
        return self._links[()].comm

    def end_step(self, is_applied: bool) -> None:
        """Count a step, also one that this replica has skipped: the others do not know of it."""
        self.since += 1
        if self.since >= self.plan.every:
            self.take_round()

    def before(self, method: str) -> None:
        """Make the replicas' weights equal before a call that reads them. Collective."""
        if self.since and method in READING:
            self.take_round()
        if method in ("save_checkpoint", "optimizer.state_dict"):
            self._average_states()

    @torch.no_grad()
    def take_round(self) -> None:
        """Exchange the differences and step the anchors. Collective over all replicas."""
        self.since, self.rounds = 0, self.rounds + 1
        self.states.settle()
        device = self.states.device  # of the exchange; states may rest elsewhere
        mu, finite = self.plan.momentum, self._find_finite()
        alpha, is_in = 1 / int(finite.sum()), bool(finite[self.comm.index])
        for unit, outer in self._outer.items():
            anchor = outer.anchor.whole().to(device)
            difference = anchor - unit.master.whole().to(device).float() if is_in else torch.zeros_like(anchor)
            mean = self._links[unit.comms.family.differs].mean(outer, difference, alpha)
            momentum = outer.momentum.whole().to(device) * mu + mean
            outer.momentum.put(0, momentum)
            outer.anchor.put(0, anchor - (mean + momentum * mu) * self.plan.lr)
            copy_store(unit.master, outer.anchor)
        spread_weights(self.states)

    def _find_finite(self) -> Tensor:
        """Which replicas have finite weights, bool [replicas]; this rank's moments that are not finite become 0. Collective.

        Raises RuntimeError if there is none.
        """
        own = all(bool(unit.master.whole().isfinite().all()) for unit in self._outer)
        whole = self.states.replica.exchange(torch.tensor([float(own)], dtype=torch.float64)).min()
        finite = self.comm.exchange(whole.view(1)).view(-1) > 0
        if not finite.any():
            raise RuntimeError(
                "no replica of slipstream.local_steps has finite weights: load the last checkpoint, and lower the lr"
            )
        if finite.all():
            return finite
        lost = [i for i, is_finite in enumerate(finite.tolist()) if not is_finite]
        log.warning("round %d: weights of replicas %s are not finite; they go on from the mean of the others", self.rounds, lost)
        for piece in self.states.steps.pieces() if not finite[self.comm.index] else ():
            for part in self.states.steps.states(piece).values():
                write(part, read(part).float().nan_to_num(0.0, 0.0, 0.0))
        return finite

    @torch.no_grad()
    def _average_states(self) -> None:
        """Give all replicas the mean of their optimizer states. Collective."""
        steps = self.states.steps
        for piece in steps.pieces():
            for part in steps.states(piece).values():
                values = read(part).float()
                sum_over(values, piece.unit.comms.family.apart)
                write(part, values / self.comm.size)

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
        """Go on from masters that were loaded, and from the momentum under these names; other momentum starts anew."""
        names, self.since = set(loaded), 0
        for unit, outer in self._outer.items():
            copy_store(outer.anchor, unit.master)
            if not names & {f"{entries.OUTER}{name}" for name in unit.names}:
                outer.momentum.put(0, torch.zeros(outer.momentum.numel, device=self.states.device))
            for feedback in (outer.sent, outer.served):
                if feedback is not None:
                    feedback.error.zero_()

    def close(self) -> None:
        """Free the transports."""
        for link in self._links.values():
            link.comm.close()
