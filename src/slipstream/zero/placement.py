"""Where each training state is sharded and in which memory it rests: two values say all that tells strategies apart.

Training keeps three states per parameter: weights, gradients, optimizer state. A `Placement` names, for each, the mesh
axes over which it is sharded; `()` is replicated. Each state extends the sharding of the one before it, so shards nest.
`Tiers` names the memory that this rank's part of each rests in between uses.
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
    """A memory."""

    DEVICE = "device"
    HOST = "host"  # where the device is the host, the same as DEVICE
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Memories per state. The optimizer steps in host memory where its states rest there or on disk."""

    weights: Tier = Tier.DEVICE  # of sharded weights
    optim: Tier = Tier.DEVICE  # masters and moments
    kept: float = 0.0  # the fraction of each unit's masters and moments that stays in memory all the same
    weights_kept: int = 0  # how many of this rank's weights stay in memory all the same: the first units'
    ahead: bool = False  # where sharded states rest on disk: whether there is to be room for new values beside the old ones

    def grads(self, *, on_host: bool) -> Tier:
        """Reduced gradients wait where the optimizer steps, on disk only where the weights rest there too and the device is the
        host: what leaves another device has passed through the host's memory, and stays there."""
        if self.weights is self.optim is Tier.DISK and on_host:
            return Tier.DISK
        return Tier.DEVICE if self.optim is Tier.DEVICE else Tier.HOST
