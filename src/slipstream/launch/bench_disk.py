"""`slipstream bench-disk DIR`: find the block size and queue depth of `aio` for the disk that holds a folder."""

from __future__ import annotations

import argparse
import json
from typing import Any

from slipstream.ops.disk import DiskRate, sweep

_ENOUGH = 0.97  # a setting that reaches this share of the best rate, with less memory in flight, counts as equally good


def choose(settings: list[DiskRate]) -> DiskRate:
    """The setting with the fewest bytes in flight among the fastest. Offloaded states are read as often as they are written."""
    best = max(map(_together, settings))
    fast = [setting for setting in settings if _together(setting) >= _ENOUGH * best]
    return min(fast, key=lambda setting: (setting.block_nbytes * setting.depth, setting.block_nbytes))


def _together(setting: DiskRate) -> float:
    """The harmonic mean of both rates; 0 if the disk was too busy to complete an operation in the time."""
    return 2 / (1 / setting.read + 1 / setting.write) if setting.read and setting.write else 0.0


def execute(options: argparse.Namespace) -> int:
    """Run the `slipstream bench-disk` command. Returns the exit code."""
    shown = {"block": "block size", "depth": "in flight", "read": "read MB/s", "write": "write MB/s"}
    settings = list[DiskRate]()
    for setting in sweep(options.folder, options.size, options.block_sizes, options.depths, options.seconds):
        if not options.json and not settings:
            print("".join(f"{name:>12}" for name in shown.values()))
        settings.append(setting)
        if not options.json:
            rates = f"{setting.read / 1e6:12,.0f}{setting.write / 1e6:12,.0f}"
            print(f"{setting.block_nbytes // 1024:10,} K{setting.depth:12}{rates}", flush=True)
    chosen = choose(settings)
    depth = "queue_depth" if chosen.engine == "io_uring" else "intra_op_parallelism"
    aio: dict[str, Any] = {"aio": {"block_size": chosen.block_nbytes, depth: chosen.depth}}
    if options.json:
        print(json.dumps({**aio, "settings": [setting._asdict() for setting in settings]}, indent=2))
        return 0
    print(f"\nreads and writes at the same time, by {chosen.engine}; the fastest with the least in flight:\n{json.dumps(aio)}")
    return 0
