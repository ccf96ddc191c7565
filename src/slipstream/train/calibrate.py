"""How fast this machine is at what a step needs: a few tenths of a second of products, copies and disk transfers.

The rates are of this process with all its threads; who runs several ranks on a host states what each gets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from slipstream.ops.disk import preflight
from slipstream.train.predict import Rates

_SECONDS = 0.1
_PROBE = 64 << 20  # bytes: more than caches hold
_ETHERNET = 1.25e9  # bytes per second of 10 Gbit/s: what is assumed of the wire where nothing is stated
_BUS = 25e9  # PCIe 4.0 x16, as it is reached: between host and device


def rates(dtype: str, device: str, folder: str | None, stated: Mapping[str, float]) -> Rates:
    """Measured rates, but those that are stated. `dtype`: what products are computed in; `folder`: on the disk, where one is used.

    Raises ValueError where a device that is not here is to be measured, and where the folder will not do.
    """
    found = {"wire": _ETHERNET, "host": _BUS}
    if not {"flops", "memory"} <= stated.keys():
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no CUDA device here to be measured; state --rate flops=300T --rate memory=3T")
        found |= {"flops": _products(getattr(torch, dtype), device), "memory": _copies(device)}
    if folder is not None and not {"disk_read", "disk_write"} <= stated.keys():
        facts = preflight(folder, _PROBE)
        found |= {"disk_read": facts.read_bytes_per_s, "disk_write": facts.write_bytes_per_s}
    return Rates(**{**found, **stated})


def _products(dtype: torch.dtype, device: str) -> float:
    """FLOP per second of matrix products."""
    a = torch.ones(512, 512, dtype=dtype, device=device)
    return 2 * 512**3 * _per_second(lambda: a @ a, device)


def _copies(device: str) -> float:
    """Bytes read and written per second."""
    source = torch.ones(_PROBE, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _PROBE * _per_second(lambda: target.copy_(source), device)


def _per_second(call: Callable[[], object], device: str) -> float:
    """Calls per second, of the best of a few stretches: what disturbs makes slower, nothing makes faster."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    call()
    best, calls, deadline = 0.0, 1, time.perf_counter() + _SECONDS
    while time.perf_counter() < deadline:
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        took = time.perf_counter() - began
        best = max(best, calls / took)
        calls = calls if took > _SECONDS / 10 else calls * 2
    return best
