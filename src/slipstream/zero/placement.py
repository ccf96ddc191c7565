"""Placement (over which axes each state is sharded) and tiers (in which memory it is stored): all that distinguishes strategies.

Training keeps three states per parameter: weights, gradients, optimizer state. A `Placement` names, for each, the mesh
axes over which it is sharded; `()` is replicated. Each state extends the sharding of the one before it, so shards nest.
`Tiers` names the memory that stores this rank's part of each state between uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Mesh axes per state. `Placement()` is plain data parallelism; `Placement(dp, dp, dp)` is ZeRO-3."""

    weights: Axes = ()
    grads: Axes = ()
    optim: Axes = ()

    def __post_init__(self) -> None:
        if self.optim[: len(self.grads)] != self.grads or self.grads[: len(self.weights)] != self.weights:
            raise ValueError(f"each state must extend the sharding of the one before it (weights, grads, optim), but got {self}")


def stage_placement(stage: int, axes: Axes = ("dp",)) -> Placement:
    """The placement of a ZeRO stage over `axes`: 0 shards nothing, 1 the optimizer, 2 gradients too, 3 weights too.

    MiCS/HSDP is stage 3 over the inner axis of a two-axis mesh. Source: Rajbhandari et al., ZeRO (arXiv 1910.02054).
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage is {stage}; it must be 0, 1, 2 or 3")
    return Placement(weights=axes if stage >= 3 else (), grads=axes if stage >= 2 else (), optim=axes if stage >= 1 else ())


class Tier(Enum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"  # the same as DEVICE if the device is the host
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The memory of each state. If optimizer states are on the host or on disk, the optimizer steps on the host."""

    weights: Tier = Tier.DEVICE  # of sharded weights
    optim: Tier = Tier.DEVICE  # masters and moments
    kept: float = 0.0  # the fraction of each unit's masters and moments that stays in memory in spite of Tier.DISK
    weights_kept: int = 0  # the number of this rank's weights that stay in memory in spite of Tier.DISK: the first units'

    def grads(self, *, on_host: bool) -> Tier:
        """The memory of reduced gradients: where the optimizer steps. They are on disk only if the weights are too and the device
        is the host, because gradients of another device have to pass through host memory anyway."""
        if self.weights is self.optim is Tier.DISK and on_host:
            return Tier.DISK
        return Tier.DEVICE if self.optim is Tier.DEVICE else Tier.HOST
