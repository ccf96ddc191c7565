"""DeepSpeed's monitors, one by one: each is `Monitors` of one backend, with the values of its block as attributes."""

from __future__ import annotations

from typing import Any, ClassVar

from slipstream.observe.backends import Comet
from slipstream.observe.monitors import Monitors, makers_on_first


class _OneMonitor(Monitors):
    """Made of a block of a `DeepSpeedMonitorConfig`. Rank 0 writes. Raises ValueError for a missing package."""

    block: ClassVar[str]

    def __init__(self, config: Any) -> None:
        self.config = config
        super().__init__(makers_on_first({self.block: dict(config)}))

    @property
    def enabled(self) -> bool:
        return bool(self.config.enabled)

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)


_KINDS = {"TensorBoardMonitor": "tensorboard", "WandbMonitor": "wandb", "csvMonitor": "csv_monitor"}
TensorBoardMonitor, WandbMonitor, csvMonitor = (
    type(name, (_OneMonitor,), {"block": block, "__module__": __name__}) for name, block in _KINDS.items()
)


class CometMonitor(_OneMonitor):
    block = "comet"

    @property
    def experiment(self) -> Any:
        """Comet's experiment; None on other ranks, and if it is off or could not be opened."""
        return next((backend.experiment for backend in self.backends if isinstance(backend, Comet)), None)
