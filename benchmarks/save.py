"""The leg `save`: a checkpoint of 1.6 GB of state, beside fio's sequential write of as many bytes, torch.save and DeepSpeed.

In turns, and everybody until all is on disk: torch.save and DeepSpeed return before that, so their files are synced behind them,
and the time of their call alone is told too. fio writes blocks of a checksum's size, through the page cache and synced at the end
(as torch.save and DeepSpeed do), and past it, eight at a time (as we do). Then what a save behind training takes from training,
what memory a Hugging Face folder takes, and what is left of saves that are killed.

A save behind training takes a time, and that is a share of an interval: of how often one saves. It is judged for the shortest
interval there is, from a call to the end of its save (saves back to back), and at one save in INTERVAL_S, which is chosen. Told are
the interval from which on it is 5 %, and the same shares of its floor: a bare copy of as many bytes while training waits, and
their way to the disk while it does not, from memory that is there already, with neither checksums nor a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, NamedTuple

from benchmarks.peers import Peers
from benchmarks.ranks import ROOT
from benchmarks.report import Spread, machine, table, verdict, verdicts
from slipstream.checkpoint.document import BLOCK

FOLDER = ROOT / "runs"
WIDTH, DEPTH = 4096, 8  # 134 million parameters: master and two moments in fp32
KILLS = 200
INTERVAL_S = 30.0


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
    log: IO[str]

    @classmethod
    def start(cls, kind: str, folder: Path, peers: Peers, width: int) -> Worker:
        python = str(peers.python) if kind == "deepspeed" else sys.executable
        env = os.environ | (peers.environment() if kind == "deepspeed" else {}) | {"DS_ACCELERATOR": "cpu"}
        script = str(ROOT / "benchmarks" / "save_worker.py")
        log = open(folder / f"{kind}.log", "w+")  # noqa: SIM115 (it lives as long as the process)
        process = subprocess.Popen(
            [python, script, kind, str(folder / kind), str(width), str(DEPTH)],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert process.stdout is not None, "it is a pipe"
        return cls(process, process.stdout, log)

    def answer(self) -> dict[str, float]:
        for line in self.out:
            if line.startswith("@"):
                return dict(json.loads(line[1:]))
        code = self.process.wait()
        self.log.seek(0)
        raise RuntimeError(f"{self.process.args!r} ended with {code}:\n{self.log.read()[-3000:]}")

    def ask(self, what: str = "save") -> dict[str, float]:
        assert self.process.stdin is not None, "it is a pipe"
        print(what, file=self.process.stdin, flush=True)
        return self.answer()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


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
    first: dict[str, dict[str, float]] = {}
    try:
        for kind in kinds:
            workers[kind] = Worker.start(kind, scratch, peers, width)
            workers[kind].answer()
            first[kind] = workers[kind].ask()  # warm
        for _ in range(rounds):
            disk["cached"].append(fio(scratch / "fio", nbytes, direct=False))
            for kind in kinds:
                found[kind].append(workers[kind].ask())
            disk["direct"].append(fio(scratch / "fio", nbytes, direct=True))
        memory = workers["slipstream"].ask("pretrained")
    finally:
        for worker in workers.values():
            worker.stop()
    return _words(found, first["behind"], disk, nbytes, memory, _crashes(scratch, 15 if quick else KILLS), peers)


def _crashes(scratch: Path, kills: int) -> str:
    script = str(ROOT / "tests" / "crashes.py")
    points, ways = 0, ("at once", "behind", "pretrained")
    for i, way in enumerate(ways):
        folder = scratch / way
        folder.mkdir()
        share = str(kills * (i + 1) // len(ways) - kills * i // len(ways))
        done = subprocess.run([sys.executable, script, str(folder), "7", way, share], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{way}: after a crash neither the previous nor the new checkpoint loads: {done.stderr}")
        points += int(done.stdout.split()[1])
    return (
        f"Killed (SIGKILL) at {kills} random instants of saves, a third each of save_checkpoint, of the same behind training and "
        f"of save_pretrained over a folder that is there, and before each of the {points} system calls that make one of each: the "
        f"previous or the new one loaded after every one."
    )


def _words(
    found: dict[str, list[dict[str, float]]],
    first: dict[str, float],
    disk: dict[str, list[float]],
    nbytes: int,
    memory: dict[str, float],
    crashes: str,
    peers: Peers,
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

    def ratio(others: list[float], these: list[float]) -> float:
        return Spread.of([other / each for other, each in zip(others, these, strict=True)]).median

    def times(others: list[float]) -> float:
        return ratio(others, ours)

    goals = [verdict("rate, times fio's through the page cache", times(disk["cached"]), 0.8, at_least=True)]
    goals += [verdict("rate, times fio's direct", times(disk["direct"]), 0.8, at_least=True)]
    goals += [verdict("torch.save, synced, times ours", times(seconds("torch", "disk")), 4, at_least=True)]
    if "deepspeed" in found:
        goals += [verdict("DeepSpeed's save, synced, times ours", times(seconds("deepspeed", "disk")), 1.5, at_least=True)]
    taken, shortest = seconds("behind", "taken"), seconds("behind", "disk")
    floor = [each["copy"] + each["written"] for each in found["behind"]]
    usual, step = Spread.of(taken).median, Spread.of(seconds("behind", "step")).show(2)
    parts = [("the call", "call"), ("taken from training, the call included", "taken"), ("until on disk", "disk")]
    parts += [("floor: a bare copy, training waiting", "copy"), ("floor: from there to the disk, training going on", "written")]
    behind = [[name, Spread.of(seconds("behind", what)).show(2), f"{first[what]:.2f}"] for name, what in parts]
    goals += [verdict("taken by a save behind training, % of the save's own time", 100 * ratio(taken, shortest), 5)]
    goals += [["its floor, % of the save's own time", f"{100 * ratio(floor, shortest):.1f}", "told", ""]]
    goals += [["taken by a save behind training, times its floor", f"{ratio(taken, floor):.2f}", "told", ""]]
    goals += [verdict(f"taken by a save behind training, % of {INTERVAL_S:.0f} s", 100 * usual / INTERVAL_S, 5)]
    goals += [verdict("memory that save_pretrained takes, units", memory["peak"] / memory["unit"], 2)]
    return "\n\n".join(
        [
            machine(peers),
            f"{nbytes / 1e9:.2f} GB of master weights and moments, one process; seconds, median (min-max) of {len(ours)} rounds.",
            table(["", "the call", "until on disk", "10^9 bytes/s"], rows),
            f"Behind training (checkpoint.writer.decoupled), in steps of {step} s on all cores; 5 % of an interval of "
            f"{usual / 0.05:.0f} s:",
            table(["", "seconds", "the first time"], behind),
            f"save_pretrained takes {memory['peak'] / 1e6:.0f} MB at its peak beyond what is there; a unit has "
            f"{memory['unit'] / 1e6:.0f} MB.",
            crashes,
            verdicts(goals),
        ]
    )


def _rate(nbytes: int, seconds: list[float]) -> str:
    return f"{nbytes / 1e9 / Spread.of(seconds).median:.2f}"
