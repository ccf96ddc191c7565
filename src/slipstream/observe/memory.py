"""The memory of this rank's device and of its process, before and after each phase of a step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)
_MIB = 1 << 20


class MemoryReading(NamedTuple):
    """In bytes. On a CPU, device memory is that of the process."""

    allocated: int
    reserved: int
    peak: int  # of allocated memory, since the process started or the last reset
    host: int  # resident
    host_shared: int  # part of `host` shared with other processes, as the ranks of a host share weights
    host_peak: int

    @classmethod
    def of(cls, device: torch.device) -> MemoryReading:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = {name: int(value.split()[0]) << 10 for name, _, value in (line.partition(":") for line in lines) if "kB" in value}
        host = fields["VmRSS"], fields.get("RssShmem", 0), fields["VmHWM"]
        if device.type != "cuda":
            return cls(host[0], host[0], host[2], *host)
        cuda = torch.cuda
        return cls(cuda.memory_allocated(device), cuda.memory_reserved(device), cuda.max_memory_allocated(device), *host)


class PhaseMemory:
    """Logs the memory around each phase of an engine, on each rank."""

    def __init__(self, engine: Any) -> None:
        from slipstream.train.planning import explain  # slow to import

        resting = explain.of_states(engine.states).rest
        self.device, self.rank = engine.device, engine.rank
        self.predicted = sum(line.nbytes for line in resting if line.tier.name == "DEVICE")

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        before = MemoryReading.of(self.device)
        try:
            yield
        finally:
            after = MemoryReading.of(self.device)
            logger.info(
                "memory, %s, rank %d: allocated %.1f -> %.1f MiB, reserved %.1f MiB, peak %.1f MiB; host %.1f -> %.1f MiB, of it "
                "shared %.1f MiB, peak %.1f MiB; states, as predicted, %.1f MiB",
                phase,
                self.rank,
                *(value / _MIB for value in (before.allocated, after.allocated, after.reserved, after.peak)),
                *(value / _MIB for value in (before.host, after.host, after.host_shared, after.host_peak)),
                self.predicted / _MIB,
            )


def tell_phases(engine: Any) -> None:
    """Log the memory around forward, backward and step, on each rank."""
    show_lines(logger)  # rank 0's log is shown by the engine
    engine.progress.around.append(PhaseMemory(engine))


def show_lines(logger: logging.Logger) -> None:
    """Write a logger's lines of level INFO to stderr, unless the script has handlers or a level for it."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET and logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
