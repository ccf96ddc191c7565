"""Measure this machine's rates for planning: a few tenths of a second of matrix products, copies and disk transfers.

The rates are of this process with all its threads. If several ranks share a host, state each rank's share by `--rate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.utils.benchmark import Timer

from slipstream.ops.disk import preflight
from slipstream.train.planning.predict import Rates

_SECONDS = 0.1
_PROBE = 64 << 20  # bytes, more than caches hold
_ETHERNET = 1.25e9  # bytes per second of 10 Gbit/s: the default for the wire
_BUS = 25e9  # bytes per second of PCIe 4.0 x16 in practice: the default between host and device


def rates(dtype: str, device: str, folder: str | None, stated: Mapping[str, float]) -> Rates:
    """Measure the rates that are not in `stated`. `dtype`: of matrix products; `folder`: on the disk to measure, or None.

    Raises ValueError if the device to measure does not exist, or the folder cannot be used.
    """
    measured = {"wire": _ETHERNET, "host": _BUS}
    if not {"flops", "memory"} <= stated.keys():
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("no CUDA device to measure; state its rates: --rate flops=300T --rate memory=3T")
        measured |= {"flops": _products(getattr(torch, dtype), device), "memory": _copies(device)}
    if folder is not None and not {"disk_read", "disk_write"} <= stated.keys():
        facts = preflight(folder, _PROBE)
        measured |= {"disk_read": facts.read_bytes_per_s, "disk_write": facts.write_bytes_per_s}
    return Rates(**{**measured, **stated})


def _products(dtype: torch.dtype, device: str) -> float:
    """FLOP per second of matrix products."""
    a = torch.ones(512, 512, dtype=dtype, device=device)
    return 2 * 512**3 * _per_second(lambda: a @ a)


def _copies(device: str) -> float:
    """Bytes read and written per second."""
    source = torch.ones(_PROBE, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _PROBE * _per_second(lambda: target.copy_(source))


def _per_second(call: Callable[[], object]) -> float:
    """Calls per second in the best of a few runs, because noise only slows down."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())  # it synchronizes a device
    return 1 / min(timer.blocked_autorange(min_run_time=_SECONDS).times)
