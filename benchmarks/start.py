"""The leg `start`: what an import costs beyond torch's, and how long until the first step is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import systems
from benchmarks.peers import Peers
from benchmarks.ranks import ROOT, RunError, run_ranks
from benchmarks.report import Spread, machine, table, verdict, verdicts
from benchmarks.worker import Job
from benchmarks.workloads import WORKLOADS

WORLD = 2
TARGET = 0.2

_IMPORT = """
import json, sys, time
import torch
start = time.perf_counter()
{statement}
print("\\n@" + json.dumps(time.perf_counter() - start))
"""

STATEMENTS = {
    "import slipstream": ("import slipstream", False),
    "import slipstream and everything that initialize() needs": ("from slipstream import initialize", False),
    "import deepspeed": ("import deepspeed", True),
    "from torch.distributed.fsdp import fully_shard": ("from torch.distributed.fsdp import fully_shard", False),
}

FIRST_STEP = ("slipstream:1", "slipstream:3", "ddp", "fsdp2:reshard", "deepspeed:1", "deepspeed:3")


def import_once(statement: str, python: str, env: dict[str, str]) -> tuple[float, bool]:
    """Seconds beyond `import torch`, in a fresh process, and whether anything was printed or warned of."""
    done = subprocess.run(
        [python, "-c", _IMPORT.format(statement=statement)],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    said, _, seconds = done.stdout.rpartition("@")
    return float(json.loads(seconds)), bool(said.strip() or done.stderr.strip())


def imports(peers: Peers, rounds: int) -> tuple[str, list[list[str]]]:
    seconds: dict[str, list[float]] = {}
    noisy: set[str] = set()
    for turn in range(rounds + 1):  # the first one fills the page cache
        for name, (statement, of_peers) in STATEMENTS.items():
            if of_peers and not peers.python:
                continue
            env = {**peers.environment(), "DS_ACCELERATOR": "cpu"} if of_peers else {}
            took, printed = import_once(statement, str(peers.python) if of_peers else sys.executable, env)
            if turn:
                seconds.setdefault(name, []).append(took)
            if printed:
                noisy.add(name)
    rows = [
        [f"`{name}`" if name.startswith("from") else name, Spread.of(took).show(), "yes" if name in noisy else "no"]
        for name, took in seconds.items()
    ]
    ours = "import slipstream"
    printed = ours in noisy
    judged = [
        verdict("import slipstream beyond import torch, s", Spread.of(seconds[ours]).median, TARGET),
        ["import slipstream prints", "something" if printed else "nothing", "nothing", "**missed**" if printed else "reached"],
    ]
    return table(["import, after `import torch`", "s", "prints"], rows), judged


def first_steps(peers: Peers, contenders: Sequence[str], rounds: int) -> str:
    work = WORKLOADS["computing"]
    seconds: dict[str, list[tuple[float, float]]] = {}
    trouble: dict[str, str] = {}
    for turn in range(rounds):
        for name in contenders if turn % 2 == 0 else reversed(contenders):
            if name in trouble:
                continue
            try:
                outcome = run_ranks(Job(system=name, work=work, dtype="fp32", steps=1), WORLD, peers)
            except RunError as error:
                print(error)
                trouble[name] = str(error).strip().splitlines()[-1]
                continue
            whole = max(rank["first_step"] for rank in outcome.ranks) - outcome.spawned
            engine = max(rank["first_step"] - rank["built"] for rank in outcome.ranks)
            seconds.setdefault(name, []).append((whole, engine))
            print(f"  start {name}: {whole:.2f} s, of them {engine:.2f} s from the model to the first step", flush=True)
    rows = [
        [systems.label(name), *(Spread.of(values).show(2) for values in zip(*seconds[name], strict=True))]
        for name in contenders
        if name in seconds
    ] + [[systems.label(name), why, ""] for name, why in trouble.items()]
    head = ["contender", "from the start of the processes, s", "from the finished model, s"]
    return (
        f"Until the first step is done, {WORLD} ranks, {work.describe()}, fp32; the rest of the time is Python, torch and "
        f"the model's own initialization:\n\n" + table(head, rows)
    )


def run(peers: Peers, *, quick: bool) -> str:
    text, judged = imports(peers, 2 if quick else 10)
    contenders = [name for name in FIRST_STEP if peers.python or not systems.needs_peers(name)]
    if quick:
        contenders = [name for name in contenders if name.endswith("3")]
    steps = first_steps(peers, contenders, 1 if quick else 3)
    return "\n\n".join((machine(peers), text, verdicts(judged), steps))
