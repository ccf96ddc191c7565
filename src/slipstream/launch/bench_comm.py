"""`slipstream bench-comm`: the speed of every collective between the ranks of a job, by size and transport.

The command starts its own ranks with `slipstream run`. If ranks are already running (`srun slipstream bench-comm`), it measures
those.
"""

from __future__ import annotations

import argparse
import json
import os

from slipstream.train.planning import collectives
from slipstream.world.discover import discover


def _print(rates: list[collectives.Rate], shown: collectives.Rate) -> None:
    if not rates or rates[-1][:2] != shown[:2]:
        print(f"\n{shown.operation}, {shown.transport}\n{'bytes':>14}{'time us':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}")
    print(f"{shown.nbytes:14,}{shown.seconds * 1e6:12,.1f}{shown.algbw / 1e9:12.3f}{shown.busbw / 1e9:12.3f}", flush=True)


def _measure(options: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from slipstream.world.join import init_distributed

    init_distributed(verbose=False)
    is_first, rates = dist.get_rank() == 0, list[collectives.Rate]()
    try:
        if is_first and not options.json:
            print(f"{dist.get_world_size()} ranks, {torch.get_num_threads()} thread(s) each, fp32; times of the slowest rank")
        sizes = [options.min << step for step in range(0, 64, 2) if options.min << step <= options.max]
        for rate in collectives.measure(sizes, options.ops or tuple(collectives.OPERATIONS), options.seconds):
            if is_first and not options.json:
                _print(rates, rate)
            rates.append(rate)
        if is_first and options.json:
            print(json.dumps([rate._asdict() for rate in rates], indent=2))
    finally:
        dist.destroy_process_group()
    return 0


def execute(options: argparse.Namespace) -> int:
    """Run the `slipstream bench-comm` command. Returns the exit code. Raises ValueError if there is nothing to measure."""
    if options.max < options.min:
        raise ValueError(f"--max {options.max} is below --min {options.min} (bytes); no size is left")
    place = discover(os.environ)
    if place is not None and int(place["WORLD_SIZE"]) > 1:
        return _measure(options)
    from slipstream.launch import cli

    ranks = ["--nproc", str(options.nproc)] if options.nproc else []
    if not ranks and not options.hostfile:
        import torch

        ranks = ["--nproc", str(max(2, torch.cuda.device_count()))]
    hosts = ["--hostfile", options.hostfile] if options.hostfile else []
    if ranks == ["--nproc", "1"] and not hosts:
        raise ValueError("--nproc 1: a single rank communicates with nobody; start 2 or more, or name hosts by --hostfile")
    own = ["--min", str(options.min), "--max", str(options.max), "--seconds", str(options.seconds)]
    own += ["--ops", ",".join(options.ops)] if options.ops else []
    own += ["--json"] if options.json else []
    return cli.main(["run", "--quiet", *ranks, *hosts, "-m", "slipstream.launch.cli", "bench-comm", *own])
