"""The leg `clients`: seconds per step through accelerate and transformers' Trainer over the native loop's, on two ranks.

One Llama, one row of data, one JSON (ZeRO-3, fp32, AdamW, clipping): `clients_worker.py`. All three stay alive and take turns, the
native loop before each of the others; a client's figure is its turn over the mean of the native ones around it, and the noise is
one native turn over the one before. They run where `make test-clients` has installed them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ranks import _LIBC, _PR_SET_PDEATHSIG, ROOT, RunError, free_port
from benchmarks.report import Spread, host, table, verdict, verdicts

WORLD = 2
CLIENTS = {"accelerate": "accelerate, its DeepSpeed plugin", "trainer": "transformers' Trainer(deepspeed=...)"}
TARGET = 1.03
MICRO, LENGTH = 4, 64  # rows of a rank, and their tokens
PYTHON = ROOT / ".venv-clients" / "bin" / "python"


class Contender:
    """Its ranks, each on a core of its own. Leaves no process behind, if used as a context."""

    def __init__(self, kind: str, python: Path, steps: int, folder: Path, profile: Sequence[str] = ()) -> None:
        cores, port = sorted(os.sched_getaffinity(0)), str(free_port())
        self.kind, self.ranks, self.logs = kind, [], []
        for rank in range(WORLD):
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "LOCAL_WORLD_SIZE": str(WORLD),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            }
            core = cores[rank % len(cores)]

            def settle_down(core: int = core) -> None:
                os.sched_setaffinity(0, {core})
                _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

            self.logs.append(tempfile.TemporaryFile())  # noqa: SIM115 (closed below)
            command = [str(python), "-m", "benchmarks.clients_worker", kind, str(steps), str(folder), *profile]
            self.ranks.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=env,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.logs[-1],
                    preexec_fn=settle_down,
                )
            )

    def turn(self) -> dict[str, float]:
        """Of the slowest rank."""
        for rank in self.ranks:
            assert rank.stdin is not None, "it is a pipe"
            print("go", file=rank.stdin, flush=True)
        return max((self._answer(number) for number in range(WORLD)), key=lambda answer: answer["seconds"])

    def _answer(self, number: int) -> dict[str, Any]:
        rank, log = self.ranks[number], self.logs[number]
        assert rank.stdout is not None, "it is a pipe"
        for line in rank.stdout:
            if line.startswith("@"):
                return dict(json.loads(line[1:]))
        log.seek(0)
        raise RunError(f"rank {number} of {self.kind} ended with {rank.wait()}:\n{log.read().decode(errors='replace')[-3000:]}")

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        for rank, log in zip(self.ranks, self.logs, strict=True):
            assert rank.stdin is not None, "it is a pipe"
            rank.stdin.close()
            try:
                rank.wait(timeout=20)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
            log.close()


def run(python: Path, *, quick: bool) -> str:
    """Raises RunError where the clients are not installed."""
    if not python.exists():
        raise RunError(f"{python} is not there: `make test-clients` builds it")
    steps, rounds = (3, 3) if quick else (5, 8)
    kinds = ("native", *CLIENTS)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        contenders = {kind: stack.enter_context(Contender(kind, python, steps, Path(folder))) for kind in kinds}
        first = {kind: contender.turn()["loss"] for kind, contender in contenders.items()}  # not counted: caches are cold
        if any(abs(loss / first["native"] - 1) > 1e-4 for loss in first.values()):
            raise RunError(f"the contenders do not train alike: losses after {steps} steps {first}")
        natives, turns = [contenders["native"].turn()["seconds"]], {kind: [] for kind in CLIENTS}
        for _ in range(rounds):
            for kind, found in turns.items():
                found.append(contenders[kind].turn()["seconds"])
                natives.append(contenders["native"].turn()["seconds"])
    return _words(natives, turns, steps, python)


def _words(natives: list[float], turns: dict[str, list[float]], steps: int, python: Path) -> str:
    """`natives` holds the turn before the first client's, and the one after each client's."""
    noise = Spread.of([after / before for before, after in itertools.pairwise(natives)])
    rows, goals = [["native loop", Spread.of([1e3 * each for each in natives]).show(1), noise.show()]], []
    for place, (kind, found) in enumerate(turns.items()):
        around = zip(natives[place :: len(turns)], natives[place + 1 :: len(turns)], strict=False)
        ratios = Spread.of([mine / statistics.mean(two) for mine, two in zip(found, around, strict=True)])
        rows.append([CLIENTS[kind], Spread.of([1e3 * each for each in found]).show(1), ratios.show()])
        goals.append(verdict(f"a step through {kind}, over the native loop's", ratios.median, TARGET, digits=3))
    return "\n\n".join(
        [
            host(f"{_versions(python)}; one thread per rank"),
            f"Llama of 8.5M parameters, {MICRO} x {LENGTH} tokens per rank, ZeRO-3 on {WORLD} ranks, fp32, AdamW, clipping. "
            f"Turns of {steps} steps; ms per step, and the ratio to the native turns before and after, median (min-max) of "
            f"{len(found)} rounds; in the native row one turn over the turn before it: the noise.",
            table(["", "ms per step", "ratio"], rows),
            verdicts(goals),
        ]
    )


def _versions(python: Path) -> str:
    names = ("accelerate", "transformers", "deepspeed")
    script = f"from importlib.metadata import version\nprint(', '.join(f'{{n}} {{version(n)}}' for n in {names}))"
    return subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True).stdout.strip()
