"""Where the bytes of an engine's states are, per rank, and what a step sends: counted from the units, not estimated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.optim.sharded import ShardedSteps
from slipstream.zero.shared import SharedComm
from slipstream.zero.unit import Unit


class Bytes(NamedTuple):
    """One rank's bytes. Activations are the model's and not in here."""

    weights: int  # resident between steps; a mapping that ranks share counts once, split over them
    gathered: int  # at most, while a forward or backward runs, beyond the resident
    gradients: int
    masters: int  # 0 where the weights are their own
    states: int  # two moments in fp32 for Adam; what other optimizers have made so far
    wire: int  # sent per step with one micro-batch; 0 over shared memory


def count(units: Sequence[Unit], steps: ShardedSteps | None) -> Bytes:
    """Bytes of this rank's states."""
    weights = gradients = masters = states = wire = 0
    transient = [0]
    for unit in units:
        numel, size = unit.layout.numel, unit.comms.dp.size
        item = unit.dtypes.weights.itemsize
        weights += (unit.span[1] - unit.span[0] if unit.placement.weights else numel) * item
        if unit.placement.weights and unit.memory.common is None:
            transient.append(numel * item)
        away = 0 if isinstance(unit.comms.dp, SharedComm) else numel * (size - 1) // size
        if unit.placement.weights:
            wire += away * item * (2 if unit.trainable else 1)  # forward and backward
        elif unit.placement.optim and unit.trainable:
            wire += away * item  # publish
        if unit.grads is None:
            continue
        gradients += unit.memory.local.tensor.nbytes if unit.memory.local else unit.grads.resident_nbytes
        masters += unit.master.resident_nbytes if unit.out is not None else 0
        states += steps.state_nbytes(unit) if steps is not None else 0
        wire += away * unit.dtypes.wire.itemsize * (1 if unit.placement.optim else 2)
        copies = unit.comms.dp_replicate  # MiCS: what was reduced here is all-reduced with the other groups
        if unit.memory.replica is not None and not isinstance(copies, SharedComm):
            wire += 2 * (unit.memory.replica.tensor.nbytes * (copies.size - 1) // copies.size)
    return Bytes(weights, max(transient), gradients, masters, states, wire)


def table(counted: Bytes, ring: int, num_parameters: int) -> str:
    """The counts as text, with bytes per parameter."""
    rows = [
        ("weights", counted.weights),
        ("weights gathered at a time", counted.gathered),
        ("gradients", counted.gradients),
        ("gradient ring", ring),
        ("masters", counted.masters),
        ("optimizer states", counted.states),
    ]
    total = sum(nbytes for _, nbytes in rows)
    lines = [
        f"{name:<28}{nbytes / 2**20:>12.2f} MiB{nbytes / max(num_parameters, 1):>9.2f} B/parameter"
        for name, nbytes in [*rows, ("total per rank", total)]
    ]
    return "\n".join([*lines, f"{'sent per step and rank':<28}{counted.wire / 2**20:>12.2f} MiB"])
