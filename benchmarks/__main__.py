"""Measure Slipstream and its peers into benchmarks/RESULTS.md: `python -m benchmarks [LEG ...] [--all] [--quick]`."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks import peers
from benchmarks.legs import LEGS, MINUTES, ORDER, Leg, Options
from benchmarks.report import RESULTS, head, table, write_section


def parse(arguments: Sequence[str] | None = None) -> tuple[list[Leg], Options, Path | None]:
    """The legs, their options, and the file to write to, if any."""
    usual = Options()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="legs (level 1 is the default, 2 comes with --all, 0 is run by name only):\n"
        + "\n".join(f"  {leg.section:28} {leg.level}  {leg.minutes:4g} min  {leg.question}" for leg in LEGS),
    )
    parser.add_argument("legs", nargs="*", metavar="LEG", help="default: those of level 1")
    parser.add_argument("--all", action="store_true", help="the legs of level 2")
    parser.add_argument(
        "--quick", action="store_true", help="few contenders, few steps: shows that a leg runs, and is no measurement"
    )
    parser.add_argument("--peers", type=Path, default=usual.peers, metavar="PYTHON", help="an interpreter with DeepSpeed")
    parser.add_argument("--serve-peers", type=Path, default=usual.serve_peers, metavar="PYTHON", help="one with vLLM and llama.cpp")
    parser.add_argument(
        "--clients", type=Path, default=usual.clients, metavar="PYTHON", help="one with accelerate and transformers"
    )
    parser.add_argument("--dtype", choices=usual.dtypes, help="step and memory: only this one")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="CONTENDER",
        help="only contenders whose names start so (slipstream:3 deepspeed, llama vllm:bf16); kernels: of cache, memory, fp32, "
        "fp16, bf16, int8, int4; stall: loads with these words; cuda: train, serve",
    )
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="step, long, gpt2: beside it, Slipstream of another checkout")
    parser.add_argument("--rounds", type=int, help="how often each contender runs, in the legs that repeat")
    parser.add_argument("--out", type=Path, help="where the sections go (default benchmarks/RESULTS.md; with --quick nowhere)")
    given = parser.parse_args(arguments)
    names = {leg.name for leg in LEGS}
    if unknown := set(given.legs) - names:
        parser.error(f"no leg {', '.join(sorted(unknown))}; there are {', '.join(dict.fromkeys(leg.name for leg in LEGS))}")
    dtypes = (given.dtype,) if given.dtype else usual.dtypes[: 1 if given.quick else None]
    chosen = [leg for leg in LEGS if (leg.name in given.legs if given.legs else leg.level == 1 + given.all)]
    chosen = [leg for leg in chosen if leg.arguments.get("dtype", dtypes[0]) in dtypes]
    options = Options(
        peers=given.peers,
        serve_peers=given.serve_peers,
        clients=given.clients,
        quick=given.quick,
        only=tuple(given.only),
        dtypes=dtypes,
        rounds=given.rounds,
        before=given.before.resolve() if given.before else None,
    )
    return chosen, options, given.out or (None if given.quick else RESULTS)


def prepare(legs: Sequence[Leg], options: Options) -> None:
    """What is compiled or converted once, before any clock starts."""
    needs = {leg.needs for leg in legs}
    if "deepspeed" in needs and (missing := peers.prepare(options.peers).missing):
        print(missing)
    if "models" in needs:
        from benchmarks.serving import models

        models.prepare(models.FOLDER)


def measure(legs: Sequence[Leg], options: Options, out: Path | None) -> list[str]:
    """Run the legs, one after the other, and write each section as it comes. Returns the sections of those that failed."""
    failed, rows, total = [], [], 0.0
    for leg in legs:
        top, began, body = head(leg.level), time.monotonic(), ""
        try:
            body = leg.run(options)
        except Exception:
            traceback.print_exc()
            failed.append(leg.section)
        minutes = (time.monotonic() - began) / 60
        total += minutes
        rows.append([leg.section, f"{minutes:.1f}", f"{leg.minutes:g}", "" if body else "failed"])
        if not body:
            continue
        took = f"This took {minutes:.1f} minutes of {leg.minutes:g}{' (--quick)' if options.quick else ''}."
        if out is not None and leg.level:
            write_section(leg.section, f"{top}\n\n{body}\n\n{took}", ORDER, out)
        print(f"\n## {leg.section}\n\n{top}\n\n{body}\n\n{took}\n", flush=True)
    rows.append(["in all", f"{total:.1f}", f"{sum(leg.minutes for leg in legs):g}", ""])
    times = table(["leg", "minutes", "budget", ""], rows)
    print(f"{times}\n", flush=True)
    levels = [level for level in (1, 2) if list(legs) == [leg for leg in LEGS if leg.level == level]]
    if out is not None and levels:
        write_section(MINUTES[levels[0] - 1], f"{head(levels[0])}\n\n{times}", ORDER, out)
    return failed


def main(arguments: Sequence[str] | None = None) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes, groups and namespaces are removed
    legs, options, out = parse(arguments)
    prepare(legs, options)
    failed = measure(legs, options, out)
    print(f"written to {out}" if out is not None else "nothing is written with --quick, unless --out names a file")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
