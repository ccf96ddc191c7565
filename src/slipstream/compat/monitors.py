"""DeepSpeed's monitors: `MonitorMaster`, the class of `engine.monitor`, and each backend separately, with its block's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from slipstream.observe.backends import DEEPSPEED, Tensorboard
from slipstream.observe.monitors import Monitors, makers_on_first


class MonitorMaster(Monitors):
    """The enabled blocks of a `DeepSpeedMonitorConfig`, on rank 0. Raises ValueError for a missing package."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(makers_on_first({name: dict(getattr(monitor_config, name)) for name in DEEPSPEED}))

    @property
    def tb_monitor(self) -> Tensorboard | None:
        """Its `summary_writer` takes images, sounds and texts. None on other ranks, and if it is off or could not be opened."""
        return next((backend for backend in self.backends if isinstance(backend, Tensorboard)), None)


class _OneMonitor(Monitors):
    """Created from one block of a `DeepSpeedMonitorConfig`. Rank 0 writes. Raises ValueError for a missing package."""

    block: ClassVar[str]

    def __init__(self, config: Any) -> None:
        self.config = config
        super().__init__(makers_on_first({self.block: dict(config)}))

    def write_events(self, events: Sequence[tuple[str, Any, int]], flush: bool = True) -> None:
        """As `Monitors.write_events`: a thread writes and flushes within seconds, regardless of `flush`."""
        super().write_events(events)

    @property
    def enabled(self) -> bool:
        return bool(self.config.enabled)

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)


def _opened(name: str) -> Any:
    """A property of the backend; None on other ranks, and if it is off or could not be opened."""
    return property(lambda self: getattr(next(iter(self.backends), None), name, None))


_KINDS: dict[str, dict[str, Any]] = {
    "TensorBoardMonitor": {"block": "tensorboard", "summary_writer": _opened("summary_writer")},
    "WandbMonitor": {"block": "wandb"},
    "csvMonitor": {"block": "csv_monitor"},
    "CometMonitor": {"block": "comet", "experiment": _opened("experiment")},
}
TensorBoardMonitor, WandbMonitor, csvMonitor, CometMonitor = (
    type(name, (_OneMonitor,), {**fields, "__module__": __name__}) for name, fields in _KINDS.items()
)
