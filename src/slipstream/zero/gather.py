"""How a unit's sharded weights are gathered: by its family's transport, or an object around it. The plan chooses per unit.

CodedGather   sends 8-bit codes (ZeRO++, qwZ)
GroupGather   sends each weight once across groups of ranks, then only within them, until the weights change (ZeRO++, hpZ)

Source: Wang et al., ZeRO++ (arXiv 2306.10209).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from slipstream.ops import wire as wire_codes
from slipstream.ops.wire import encode, sum_coded
from slipstream.zero.comm import Buffer, Comm, Cuts, Pending

_BITS = 8


class Gather(Protocol):
    """Fills a unit's full weights from the ranks' shards."""

    @property
    def exact(self) -> bool:
        """Whether the gathered weights equal those of the shards."""

    def gather_into(self, full: Tensor, shard: Tensor, cuts: Cuts) -> Pending[None]: ...

    def changed(self) -> None:
        """Called when the shards have new values, on all ranks."""


def gather_coded(over: Gather, full: Tensor, shard: Tensor, cuts: Cuts, bits: int, *, accumulate: bool = False) -> Pending[None]:
    """Fill `full` with the decoded codes of every rank's shard, or add them to it. A shard of dtype uint8 is sent as it is."""
    codes = torch.empty(wire_codes.nbytes(cuts[-1], bits), dtype=torch.uint8, device=full.device)
    own = shard
    if shard.dtype is not torch.uint8:
        own = torch.empty(wire_codes.nbytes(shard.numel(), bits), dtype=torch.uint8, device=full.device)
        encode(shard, own, bits)

    def decode(_: None) -> None:
        sum_coded(full[: cuts[-1]], [codes], bits, accumulate=accumulate)

    return over.gather_into(codes, own, wire_cuts(cuts, bits)).then(decode)


@dataclass(slots=True)
class CodedGather:
    """Sends codes. Every rank computes with decoded weights, also of its own shard. A shard stored in codes is sent unchanged."""

    over: Gather
    exact: bool = False

    def gather_into(self, full: Tensor, shard: Tensor, cuts: Cuts) -> Pending[None]:
        return gather_coded(self.over, full, shard, cuts, _BITS)

    def changed(self) -> None:
        self.over.changed()


@dataclass(slots=True)
class GroupGather:
    """For one unit: each rank keeps the spans of the ranks with its place in the other groups.

    The first gather fetches these across groups, each from its owner. From then on, until the weights change, each gather exchanges
    the kept spans within a group only. So bytes cross groups once a step, however often blocks run.
    """

    group: Comm  # neighbors on dp
    across: Comm  # the ranks with this rank's place in each group
    kept: Buffer = field(init=False)  # in `group`: the kept spans one after another; allocated with the unit
    held: bool = False  # whether `kept` has the current weights
    exact = True

    def kept_cuts(self, cuts: Cuts) -> list[int]:
        """The bounds of the ranks' spans in `kept`."""
        owners = range(self.group.index, len(cuts) - 1, self.group.size)
        return list(itertools.accumulate((cuts[i + 1] - cuts[i] for i in owners), initial=0))

    def gather_into(self, full: Tensor, shard: Tensor, cuts: Cuts) -> Pending[None]:
        kept, size = self.kept, self.group.size
        rows = [cuts[i : i + size + 1] for i in range(0, len(cuts) - 1, size)]
        if self.held:
            return self.group.gather_rows(full, kept, rows)
        self.group.reusable(kept)

        def gather(_: None) -> None:
            self.held = True
            self.group.gather_rows(full, kept, rows).wait()

        return self.across.gather_into(kept.tensor, shard, self.kept_cuts(cuts)).then(gather)

    def changed(self) -> None:
        self.held = False


def kept_by(gather: Gather, cuts: Cuts, dtype: torch.dtype) -> tuple[GroupGather, int, torch.dtype]:
    """The GroupGather that serves weights with these spans and this dtype, and the elements that this rank keeps."""
    if isinstance(gather, CodedGather):
        return kept_by(gather.over, wire_cuts(cuts, _BITS), torch.uint8)
    assert isinstance(gather, GroupGather), "every unit of a family with groups keeps weights"
    return gather, gather.kept_cuts(cuts)[-1], dtype


def wire_cuts(cuts: Cuts, bits: int) -> list[int]:
    """The spans' bounds in bytes of codes. Every bound but the last is a multiple of 256 elements, so no block is cut."""
    return [wire_codes.nbytes(cut, bits) for cut in cuts]
