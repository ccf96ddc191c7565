"""Figures of each step for TensorBoard, Weights & Biases, Comet and CSV files, by DeepSpeed's blocks and tags.

Rank 0 alone writes, from a thread of its own: a backend that is slow or hangs holds no step. If it falls behind, the oldest steps
are dropped, and their number is said at the end. A backend that fails is left out from then on, with a warning.

The x axis of every tag is the number of samples so far.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

logger = logging.getLogger(__name__)

MOST_WAITING = 1024  # steps
CLOSE_S = 10.0  # for what is left at the end


class Figure(NamedTuple):
    tag: str
    value: float
    samples: int


class Monitor(Protocol):
    def write(self, events: Sequence[Figure]) -> None: ...

    def close(self) -> None: ...


class CsvFiles:
    """One file for each tag in output_path/job_name; rows are (samples, value)."""

    def __init__(self, output_path: str, job_name: str) -> None:
        self.folder = os.path.join(output_path, job_name)
        os.makedirs(self.folder, exist_ok=True)
        self._files: dict[str, Any] = {}

    def write(self, events: Sequence[Figure]) -> None:
        for tag, value, samples in events:
            if tag not in self._files:
                path = os.path.join(self.folder, tag.replace("/", "_") + ".csv")
                is_new = not os.path.exists(path)
                self._files[tag] = open(path, "a", newline="")  # noqa: SIM115 (closed in close)
                if is_new:
                    csv.writer(self._files[tag]).writerow(["step", tag.rpartition("/")[2]])
            csv.writer(self._files[tag]).writerow([samples, value])
            self._files[tag].flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class Tensorboard:
    """Figure files in output_path/job_name."""

    def __init__(self, output_path: str, job_name: str) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer: Any = SummaryWriter(log_dir=os.path.join(output_path, job_name))

    def write(self, events: Sequence[Figure]) -> None:
        for tag, value, samples in events:
            self.writer.add_scalar(tag, value, samples)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, group: str | None, team: str | None, project: str) -> None:
        self.run: Any = importlib.import_module("wandb").init(project=project, group=group, entity=team)

    def write(self, events: Sequence[Figure]) -> None:
        for samples in dict.fromkeys(event.samples for event in events):
            self.run.log({tag: value for tag, value, at in events if at == samples}, step=samples)

    def close(self) -> None:
        self.run.finish()


class Comet:
    """An experiment of Comet; a tag is written when `samples_log_interval` samples have passed since its last value."""

    def __init__(self, samples_log_interval: int, experiment_name: str | None, project: str | None, **options: Any) -> None:
        given = {name: value for name, value in {"project_name": project, **options}.items() if value is not None}
        self.experiment: Any = importlib.import_module("comet_ml").start(**given)
        if experiment_name is not None:
            self.experiment.set_name(experiment_name)
        self.interval, self._last = samples_log_interval, dict[str, int]()

    def write(self, events: Sequence[Figure]) -> None:
        for tag, value, samples in events:
            if tag not in self._last or samples - self._last[tag] >= self.interval:
                self._last[tag] = samples
                self.experiment.log_metric(tag, value, step=samples)

    def close(self) -> None:
        self.experiment.end()


# block of the config -> (class, the package that it needs)
BACKENDS: Mapping[str, tuple[Any, str]] = {
    "tensorboard": (Tensorboard, "tensorboard"),
    "wandb": (Wandb, "wandb"),
    "comet": (Comet, "comet_ml"),
    "csv_monitor": (CsvFiles, ""),
}


def check_packages(blocks: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError for a block whose package is not installed."""
    for name in blocks:
        package = BACKENDS[name][1]
        if package and importlib.util.find_spec(package) is None:
            raise ValueError(f"{name}.enabled needs the package {package}: pip install {package}, or set {name}.enabled to false")


class Monitors:
    """Writes events to all backends from a thread, which is a daemon: a backend that hangs does not hold the process either."""

    def __init__(self, backends: Mapping[str, Monitor]) -> None:
        self.backends = dict(backends)
        self.dropped = 0
        self._waiting: deque[list[Figure]] = deque()
        self._ready = threading.Condition()
        self._ends = False
        self._thread: threading.Thread | None = None  # starts with the first events

    @property
    def enabled(self) -> bool:
        return bool(self.backends)

    def write_events(self, events: Sequence[tuple[str, Any, int]]) -> None:
        """(tag, value, samples) each. Returns at once."""
        batch = [Figure(tag, float(value), samples) for tag, value, samples in events]
        if not self.backends:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="slipstream-monitors", daemon=True)
            self._thread.start()
        with self._ready:
            if len(self._waiting) >= MOST_WAITING:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(batch)
            self._ready.notify()

    def close(self) -> None:
        """Write what is left, for CLOSE_S at most."""
        if self._thread is None:
            for name in list(self.backends):
                self._try(name, "close")
            return
        with self._ready:
            self._ends = True
            self._ready.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            names = ", ".join(self.backends)
            logger.warning("monitors: a backend (%s) still hangs after %g s; what is left is not written", names, CLOSE_S)
        if self.dropped:
            logger.warning("monitors: %d steps were dropped, because the backends were slower than the steps", self.dropped)

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._waiting and not self._ends:
                    self._ready.wait()
                if not self._waiting:
                    break
                events = [event for batch in self._waiting for event in batch]
                self._waiting.clear()
            for name in list(self.backends):
                self._try(name, "write", events)
        for name in list(self.backends):
            self._try(name, "close")

    def _try(self, name: str, method: str, *args: Any) -> None:
        try:
            getattr(self.backends[name], method)(*args)
        except Exception as error:
            logger.warning("monitors: %s failed and gets no more figures: %s: %s", name, type(error).__name__, error)
            self.backends.pop(name, None)


class MonitorMaster(Monitors):
    """DeepSpeed's class: the enabled blocks of a `DeepSpeedMonitorConfig`, on rank 0. Raises ValueError for a missing package."""

    def __init__(self, monitor_config: Any) -> None:
        blocks = {name: dict(getattr(monitor_config, name)) for name in BACKENDS}
        chosen = {name: without_switch(block) for name, block in blocks.items() if block["enabled"]}
        check_packages(chosen)
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        super().__init__(_open(chosen) if is_first else {})


def without_switch(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block's values but for `enabled`."""
    return {name: value for name, value in block.items() if name != "enabled"}


def open_monitors(blocks: Mapping[str, Mapping[str, Any]]) -> Monitors:
    """The backends of the enabled blocks, by name; values are those of the config without `enabled`."""
    return Monitors(_open(blocks))


def _open(blocks: Mapping[str, Mapping[str, Any]]) -> dict[str, Monitor]:
    return {name: BACKENDS[name][0](**values) for name, values in blocks.items()}
