"""The leg `save`: a checkpoint of 1.6 GB of state, beside fio's sequential write of as many bytes, torch.save and DeepSpeed.

In turns, until all is on disk for everybody: torch.save and DeepSpeed return before that, so their files are synced behind them,
and the time of their call alone is told too. fio writes blocks of a checksum's size, through the page cache and synced at the end
as we do, and directly. Then what a save behind training takes from training, and what is left of saves that are killed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.peers import Peers
from benchmarks.ranks import ROOT
from benchmarks.report import Spread, machine, table, verdict, verdicts
from slipstream.checkpoint.document import BLOCK

FOLDER = ROOT / "runs"
WIDTH, DEPTH = 4096, 8  # 134 million parameters: master and two moments in fp32
KILLS = 200


def fio(file: Path, nbytes: int, *, direct: bool) -> float:
    """Seconds of a sequential write; the file is new."""
    file.unlink(missing_ok=True)
    os.sync()
    command = ["fio", "--output-format=json", "--name=write", "--rw=write", f"--filename={file}", f"--size={nbytes}"]
    command += [f"--bs={BLOCK}", "--fallocate=none", *(["--direct=1", "--ioengine=io_uring", "--iodepth=8"] if direct else [])]
    done = subprocess.run([*command, "--end_fsync=1"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    file.unlink()
    return float(job["job_runtime"]) / 1e3


class Worker(NamedTuple):
    process: subprocess.Popen[str]
    out: IO[str]

    @classmethod
    def start(cls, kind: str, folder: Path, peers: Peers, width: int) -> Worker:
        python = str(peers.python) if kind == "deepspeed" else sys.executable
        env = os.environ | (peers.environment() if kind == "deepspeed" else {}) | {"DS_ACCELERATOR": "cpu"}
        script = str(ROOT / "benchmarks" / "save_worker.py")
        process = subprocess.Popen(
            [python, script, kind, str(folder / kind), str(width), str(DEPTH)], env=env, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdout is not None, "it is a pipe"
        worker = cls(process, process.stdout)
        worker.answer()
        return worker

    def answer(self) -> dict[str, float]:
        for line in self.out:
            if line.startswith("@"):
                return dict(json.loads(line[1:]))
        raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait()}")

    def save(self) -> dict[str, float]:
        assert self.process.stdin is not None, "it is a pipe"
        print("save", file=self.process.stdin, flush=True)
        return self.answer()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def run(peers: Peers, *, quick: bool) -> str:
    if shutil.which("fio") is None:
        raise RuntimeError("the leg `save` needs fio: apt-get install fio")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        return _report(Path(scratch), peers, width=WIDTH // 4 if quick else WIDTH, rounds=2 if quick else 5, quick=quick)


def _report(scratch: Path, peers: Peers, *, width: int, rounds: int, quick: bool) -> str:
    kinds = ["slipstream", "torch", *(["deepspeed"] if peers.python else []), "behind"]
    nbytes = 12 * (width * width + width) * DEPTH
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    disk: dict[str, list[float]] = {"cached": [], "direct": []}
    workers: dict[str, Worker] = {}
    try:
        for kind in kinds:
            workers[kind] = Worker.start(kind, scratch, peers, width)
            workers[kind].save()  # warm
        for _ in range(rounds):
            disk["cached"].append(fio(scratch / "fio", nbytes, direct=False))
            for kind in kinds:
                found[kind].append(workers[kind].save())
            disk["direct"].append(fio(scratch / "fio", nbytes, direct=True))
    finally:
        for worker in workers.values():
            worker.stop()
    return _words(found, disk, nbytes, _crashes(scratch, 10 if quick else KILLS), peers)


def _crashes(scratch: Path, kills: int) -> str:
    script = str(ROOT / "tests" / "crashes.py")
    points = 0
    for way in ("at once", "behind"):
        folder = scratch / way
        folder.mkdir()
        done = subprocess.run([sys.executable, script, str(folder), "7", way, str(kills // 2)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{way}: after a crash neither the previous nor the new checkpoint loads: {done.stderr}")
        points += int(done.stdout.split()[1])
    return (
        f"Killed (SIGKILL) at {kills} random instants of saves, half of them behind training, and before each of the {points} "
        f"system calls that make one of each: the previous or the new checkpoint loaded after every one."
    )


def _words(
    found: dict[str, list[dict[str, float]]], disk: dict[str, list[float]], nbytes: int, crashes: str, peers: Peers
) -> str:
    def seconds(kind: str, what: str) -> list[float]:
        return [each[what] for each in found[kind]]

    names = {"slipstream": "Slipstream, save_checkpoint", "torch": "torch.save", "deepspeed": "DeepSpeed, save_checkpoint"}
    rows = [
        ["fio, page cache, fsync", "-", Spread.of(disk["cached"]).show(2), _rate(nbytes, disk["cached"])],
        ["fio, direct", "-", Spread.of(disk["direct"]).show(2), _rate(nbytes, disk["direct"])],
    ]
    for kind, name in names.items():
        if kind in found:
            size = int(found[kind][0]["nbytes"])
            call, whole = Spread.of(seconds(kind, "call")).show(2), Spread.of(seconds(kind, "disk")).show(2)
            rows.append([name, call, whole, _rate(size, seconds(kind, "disk"))])
    ours = seconds("slipstream", "disk")

    def times(others: list[float]) -> float:
        return Spread.of([other / mine for other, mine in zip(others, ours, strict=True)]).median

    goals = [verdict("rate, times fio's through the page cache", times(disk["cached"]), 0.8, at_least=True)]
    goals += [verdict("torch.save, synced, times ours", times(seconds("torch", "disk")), 4, at_least=True)]
    if "deepspeed" in found:
        goals += [verdict("DeepSpeed's save, synced, times ours", times(seconds("deepspeed", "disk")), 1.5, at_least=True)]
    behind: list[dict[str, Any]] = list(found["behind"])
    shown = {what: Spread.of(seconds("behind", what)).show(2) for what in ("call", "disk", "taken", "step")}
    copies = Spread.of([each["call"] / (each["copy_s_per_byte"] * nbytes) for each in behind])
    goals += [verdict("taken from training, % of the time from a save to its end", 100 * _median(behind, "taken", "disk"), 5)]
    return "\n\n".join([
        machine(peers),
        f"{nbytes / 1e9:.2f} GB of master weights and moments, one process; seconds, median (min-max) of {len(ours)} rounds.",
        table(["", "the call", "until on disk", "10^9 bytes/s"], rows),
        f"Behind training (checkpoint.writer.decoupled): the call takes {shown['call']} s, {copies.show(1)} times a bare copy of "
        f"as many bytes; the write ends {shown['disk']} s after the call began, and {shown['taken']} s less was trained meanwhile, "
        f"the call included (steps of {shown['step']} s).",
        crashes,
        verdicts(goals),
    ])  # fmt: skip


def _rate(nbytes: int, seconds: list[float]) -> str:
    return f"{nbytes / 1e9 / Spread.of(seconds).median:.2f}"


def _median(rows: list[dict[str, Any]], one: str, other: str) -> float:
    return Spread.of([row[one] / row[other] for row in rows]).median
