"""`deepspeed.utils.timer`, and the lines that DeepSpeed's engine prints about its steps."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slipstream.compat.accelerator import get_accelerator
from slipstream.compat.comm import get_rank
from slipstream.compat.utils import see_memory_usage
from slipstream.observe import clock, traffic
from slipstream.observe.memory import PhaseMemory

logger = logging.getLogger("slipstream.train")
_MOST_RECORDS = 4096  # kept by a timer that nobody reads
_GIB = 1 << 30
_PHASES = {"forward": "fwd", "backward": "bwd", "step": "step"}
_GLOBAL = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")
_MICRO = tuple(f"{name}_microstep" for name in _GLOBAL)


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without the lowest and the highest tenth; `trim_percent` is a fraction and must be 0.1."""
    if trim_percent != 0.1:
        raise ValueError(f"trim_mean(trim_percent={trim_percent}): only 0.1 is served")
    return traffic.trimmed(list(data))


class Timer:
    """Milliseconds between `start` and `stop`, of the host, or of a GPU's stream."""

    def __init__(self, name: str) -> None:
        self.name_, self.started_ = name, False
        self._start: Any = None
        self.records: deque[tuple[Any, Any]] = deque(maxlen=_MOST_RECORDS)

    def start(self) -> None:
        assert not self.started_, f"{self.name_} timer has already been started"
        self._start, self.started_ = clock.mark(_device()), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        assert self.started_, "timer is not started"
        self.started_ = False
        self.records.append((self._start, clock.mark(_device())))

    def reset(self) -> None:
        self.started_ = False
        self.records.clear()

    def elapsed(self, reset: bool = True) -> float:
        """The sum of all times since the last reset. A running timer is stopped and started again."""
        if runs := self.started_:
            self.stop()
        total = sum(self._times())
        if reset:
            self.reset()
        if runs:
            self.start()
        return total

    def mean(self) -> float:
        return traffic.trimmed(self._times())

    def _times(self) -> list[float]:
        return [1e3 * clock.between(*pair) for pair in self.records]


def _device() -> torch.device:
    return torch.device(get_accelerator().device_name())


class SynchronizedWallClockTimer:
    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def get_timers(self) -> dict[str, Timer]:
        return self.timers

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    @staticmethod
    def memory_usage() -> str:
        device = get_accelerator()
        names = {"mem_allocated": "memory_allocated", "max_mem_allocated": "max_memory_allocated"}
        names |= {"cache_allocated": "memory_cached", "max_cache_allocated": "max_memory_cached"}
        return "".join(f" | {title}: {getattr(device, name)() / _GIB:.4f} GB" for title, name in names.items())

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Write `time (ms) | NAME: 1.23 | ...` on these ranks, by default the first."""
        assert normalizer > 0.0
        parts = [f" | {name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers]
        if get_rank() in (ranks or [0]):
            sys.stdout.write("time (ms)" + "".join(parts) + (self.memory_usage() if memory_breakdown else "") + "\n")
            sys.stdout.flush()

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean milliseconds by name."""
        assert normalizer > 0.0
        return {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}


SynchronizedWallClockTimer.Timer = Timer  # type: ignore[attr-defined]  # DeepSpeed's place of the class


class ThroughputTimer:
    """Samples per second of the time between `start` and `stop`; the first `start_step` steps do not count."""

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        if steps_per_output is not None and steps_per_output <= 0:
            raise ValueError(f"steps_per_output ({steps_per_output}) must be positive, or None")
        self.enabled, self.device = bool(config.enabled), torch.device(get_accelerator().current_device_name())
        self.batch_size, self.start_step, self.steps_per_output = batch_size or 1, start_step, steps_per_output
        self.logging: Callable[[str], None] = logging_fn or logger.info
        self.monitor_memory = monitor_memory
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self.started = False
        self._since: Any = 0.0
        self._last: list[tuple[Any, Any]] = []  # of the last step's micro-batches, not yet included in `total_elapsed_time`
        self._step: list[tuple[Any, Any]] = []  # of this step's

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def _settle(self) -> None:
        """Add the last step's time. Waits for the device to reach its end."""
        self.total_elapsed_time += sum(clock.between(*marks) for marks in self._last)
        self._last = []

    def start(self) -> None:
        if self.enabled and not self.started:
            self.started, self._since = True, clock.mark(self.device)

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        if not self.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if self.global_step_count >= self.start_step:
            self._step.append((self._since, clock.mark(self.device)))
        if not global_step:
            return
        self._settle()
        self.global_step_count += 1
        interval, step = self.steps_per_output, self._step
        self._last, self._step = step, []
        if report_speed and step and interval is not None and self.global_step_count % interval == 0:
            device, step_time = get_accelerator(), sum(clock.between(*marks) for marks in step)
            self.logging(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={self.batch_size / step_time}, "
                f"MemAllocated={round(device.memory_allocated() / _GIB, 2)}GB, "
                f"MaxMemAllocated={round(device.max_memory_allocated() / _GIB, 2)}GB"
            )
            if self.monitor_memory:
                see_memory_usage(f"global_step={self.global_step_count}", force=True)

    def avg_samples_per_sec(self) -> float:
        self._settle()
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if steps > 0 and self.total_elapsed_time else float("-inf")


class StepLines:
    """DeepSpeed's log lines of an engine's steps, in place of Slipstream's, and their timers."""

    def __init__(self, engine: Any) -> None:
        self.engine, plan, is_first = engine, engine.plan, engine.mesh.is_first
        self.timers, self.every = SynchronizedWallClockTimer(), plan.steps_per_print if is_first else None
        self.times, self.in_stages = plan.wall_clock_breakdown, hasattr(engine, "pipe")
        self.speed = ThroughputTimer(engine._config.timers_config, plan.batch.train_batch_size, steps_per_output=self.every)
        progress = engine.progress
        progress.every, progress.times = None, plan.activations.profile and is_first
        memory = plan.memory_breakdown and is_first
        kept = [around for around in progress.around if not isinstance(around, PhaseMemory)]
        progress.around[:] = [*kept, *([_memory] if memory else []), *([self._phase] if self.times or self.speed.enabled else [])]
        engine.states.after_step.append(lambda _: self.end_step())

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        if phase == "forward":
            self.speed.start()
        if not self.times or phase not in _PHASES:
            yield
            return
        name, watch, device = _PHASES[phase], self.engine.watch, self.engine.device
        waited, start = watch.waited_s, clock.mark(device)
        try:
            yield
        finally:
            stop, waited = clock.mark(device), watch.waited_s - waited
            for suffix in ("_microstep", ""):
                self.timers(name + suffix).records.append((start, stop))
                if name == "bwd":
                    self.timers(f"bwd_allreduce{suffix}").records.append((0.0, waited))
                    self.timers(f"bwd_inner{suffix}").records.append((start, stop - waited if isinstance(stop, float) else stop))

    def end_micro_step(self) -> None:
        if self.times and not self.in_stages:
            self.timers.log(_MICRO)
        self.speed.stop()

    def end_step(self) -> None:
        if self.times:
            if not self.in_stages:
                self.timers.log(_MICRO)
            self.timers.log(_GLOBAL)
        engine = self.engine
        if self.every and engine.global_steps % self.every == 0:
            line = "step=%d, skipped=%d, lr=%s, mom=%s"
            logger.info(line, engine.global_steps, engine.skipped_steps, engine.get_lr(), engine.get_mom())
        self.speed.batch_size = engine.plan.batch.train_batch_size
        self.speed.stop(global_step=True)


@contextmanager
def _memory(phase: str) -> Iterator[None]:
    see_memory_usage(f"Engine before {phase}", force=True)
    try:
        yield
    finally:
        see_memory_usage(f"Engine after {phase}", force=True)
