"""Placement (which states are sharded) and tiers (the memory of each state): all that distinguishes the strategies.

Training keeps three states per parameter: weights, gradients, optimizer state. A `Placement` says whether a rank has its shard or
all of each. The family determines the ranks: its `shards` (world/mesh.py), which may be some of the ranks that hold the same
parameters (MiCS, HSDP). Optimizer states extend the sharding of the others, so shards nest.
`Tiers` names the memory that stores this rank's part of each state between uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Placement:
    """Whether each state is sharded over its family's shards. `Placement()` is data parallelism; all three are ZeRO-3."""

    weights: bool = False
    grads: bool = False
    optim: bool = False

    def __post_init__(self) -> None:
        if (self.weights or self.grads) and not self.optim:
            raise ValueError(f"weights and gradients are sharded only if the optimizer states are, but got {self}")


def stage_placement(stage: int) -> Placement:
    """The placement of a ZeRO stage: 0 shards nothing, 1 the optimizer states, 2 gradients too, 3 weights too.

    Source: Rajbhandari et al., ZeRO (arXiv 1910.02054).
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage is {stage}; it must be 0, 1, 2 or 3")
    return Placement(weights=stage >= 3, grads=stage >= 2, optim=stage >= 1)


class Tier(Enum):
    DEVICE = "device"
    HOST = "host"  # the same as DEVICE if the device is the host
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The memory of each state. If optimizer states are on the host or on disk, the optimizer steps on the host."""

    weights: Tier = Tier.DEVICE  # of sharded weights
    optim: Tier = Tier.DEVICE  # masters and moments
    kept: float = 0.0  # the fraction of each unit's masters and moments that stays in memory under Tier.DISK
    weights_kept: int = 0  # the number of this rank's weights that stay in memory under Tier.DISK: the first units'

    def grads(self, *, on_host: bool) -> Tier:
        """The memory of reduced gradients: where the optimizer steps. They are on disk only if the weights are too and the device
        is the host, because another device's gradients have to pass through host memory anyway."""
        if self.weights is self.optim is Tier.DISK and on_host:
            return Tier.DISK
        return Tier.DEVICE if self.optim is Tier.DEVICE else Tier.HOST
