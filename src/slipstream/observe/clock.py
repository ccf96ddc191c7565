"""Marks in time, of the host or as events of a GPU's stream, so that nothing waits until a time is read."""

from __future__ import annotations

import time
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """A mark for now, in the order of the device's work."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, stop: Any) -> float:
    """Seconds between two marks. Waits until the device reaches the second one."""
    if isinstance(stop, float):
        return stop - float(start)
    stop.synchronize()
    return 1e-3 * float(start.elapsed_time(stop))
