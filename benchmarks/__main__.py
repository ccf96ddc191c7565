"""`python -m benchmarks [LEG ...]`: ours beside the peers; writes the legs' sections of benchmarks/RESULTS.md (not with --quick).

Legs: step, memory, wire, start, activations, optimizer, kernels, recipes, plan, quality, disk, offload, save, clients, pretrained,
or all of them (the default). `parts` prints where our own step goes and writes nothing. `python benchmarks/ops.py` compares the
native kernels with their peers.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import (
    activations,
    clients,
    disk,
    kernels,
    memory,
    offload,
    optimizer,
    parts,
    plan,
    pretrained,
    quality,
    recipes,
    save,
    start,
    step,
    wire,
)
from benchmarks.peers import Peers, prepare
from benchmarks.ranks import ROOT
from benchmarks.report import LEGS, RESULTS, write_section
from benchmarks.worker import DTYPES
from benchmarks.workloads import WORKLOADS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("legs", nargs="*", metavar="LEG", help=f"{', '.join(LEGS)}, all (default) or parts")
    parser.add_argument("--quick", action="store_true", help="a few contenders, few steps: under three minutes in all")
    parser.add_argument(
        "--peers",
        type=Path,
        default=ROOT / ".venv-peers" / "bin" / "python",
        metavar="PYTHON",
        help="the interpreter that has DeepSpeed (default: the one `make bench` builds)",
    )
    parser.add_argument(
        "--clients",
        type=Path,
        default=clients.PYTHON,
        metavar="PYTHON",
        help="the interpreter that has accelerate (default: the one `make test-clients` builds)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="step, memory, parts: only this one")
    parser.add_argument("--workload", choices=WORKLOADS, help="step, parts: only this one")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="CONTENDER",
        help="step: only these, by the start of their names; parts: exactly these (slipstream:3 ...); "
        "kernels: of cache, memory, fp32, fp16, bf16, int8, int4",
    )
    parser.add_argument("--rounds", type=int, default=3, help="step: how often each contender runs (default 3)")
    parser.add_argument("--out", type=Path, help="where the sections go (default benchmarks/RESULTS.md; with --quick nowhere)")
    options = parser.parse_args()

    unknown = set(options.legs) - {*LEGS, "parts", "all"}
    if unknown:
        parser.error(f"no leg {', '.join(sorted(unknown))}; there are {', '.join(LEGS)}, parts and all")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that groups and namespaces are removed
    chosen = LEGS if not options.legs or "all" in options.legs else tuple(options.legs)
    quick = options.quick
    out = options.out or (None if quick else RESULTS)
    dtypes = [options.dtype] if options.dtype else ["bf16"] if quick else ["bf16", "fp32"]
    works = [options.workload] if options.workload else ["moving"] if quick else ["moving", "computing"]
    if chosen == ("parts",):
        parts.run(works[0], dtypes[0], options.only)
        return
    if chosen == LEGS and len(kernels.sets()) < 2:
        chosen = tuple(leg for leg in LEGS if leg != "kernels")
        print("kernels: left out, because this machine has one vector instruction set only")
    alone = set(chosen) <= {"activations", "kernels", "recipes", "plan", "quality", "disk", "clients", "pretrained"}  # no peers
    peers = Peers(python=None) if alone else prepare(options.peers)
    if peers.missing:
        print(peers.missing)
    rounds = 1 if quick else options.rounds
    legs: dict[str, Callable[[], str]] = {
        f"step, {work}, {dtype}": partial(step.run, peers, WORKLOADS[work], dtype, quick=quick, only=options.only, rounds=rounds)
        for work in works
        for dtype in dtypes
    } | {
        "memory": lambda: memory.run(peers, quick=quick, dtypes=dtypes),
        "wire": lambda: wire.run(peers, quick=quick),
        "start": lambda: start.run(peers, quick=quick),
        "activations": lambda: activations.run(quick=quick),
        "optimizer": lambda: optimizer.run(peers, quick=quick),
        "kernels": lambda: kernels.run(quick=quick, only=options.only),
        "recipes": lambda: recipes.run(quick=quick),
        "plan, in memory": lambda: plan.one_process(plan.IN_MEMORY, quick=quick),
        "plan, on disk": lambda: plan.one_process(plan.ON_DISK, quick=quick),
        "plan, two ranks": lambda: plan.two_ranks(quick=quick),
        "quality": lambda: quality.run(quick=quick),
        "disk": lambda: disk.run(quick=quick),
        "offload": lambda: offload.run(peers, quick=quick),
        "save": lambda: save.run(peers, quick=quick),
        "pretrained": lambda: pretrained.run(quick=quick, python=options.clients),
        "clients": lambda: clients.run(options.clients, quick=quick),
    }
    for leg, run in legs.items():
        if leg.split(",")[0] in chosen:
            began = time.monotonic()
            body = run()
            took = f"This took {(time.monotonic() - began) / 60:.1f} minutes{' (--quick)' if quick else ''}."
            if out is not None:
                write_section(leg, f"{body}\n\n{took}", out)
            print(f"\n## {leg}\n\n{body}\n\n{took}\n", flush=True)
    print(f"written to {out}" if out is not None else "--quick writes nothing without --out")


if __name__ == "__main__":
    main()
