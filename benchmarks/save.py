"""The leg `save`: a checkpoint of 1.6 GB of state, fio's sequential write of as many bytes, torch.save and DeepSpeed.

In turns, and each until all is on disk: torch.save and DeepSpeed return before that, so their files are synced afterwards, and
the time of the call is shown too. fio writes blocks of a checksum's size: through the page cache and synced at the end (as
torch.save and DeepSpeed do), and past it, eight at a time (as we do). Then the cost of an asynchronous save to training, the
memory of a Hugging Face folder, and the state of the disk after saves that are killed.

The cost of an asynchronous save is judged as a share of an interval: of the save's own time (saves back to back, the shortest
interval possible), and of INTERVAL_S. Reported with it are the interval of which it is 5 %, and its floor: a bare copy of as many
bytes while training waits, and their way to the disk while it does not, from memory that is allocated already, with neither
checksums nor a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks import worker
from benchmarks.legs import Options
from benchmarks.peers import Peers, prepare
from benchmarks.ranks import free_port, rank_env
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.worker import ROOT, Failed, Worker
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
    out = worker.run([*command, "--end_fsync=1"])
    job = json.loads(out[out.index("{") :])["jobs"][0]
    file.unlink()
    return float(job["job_runtime"]) / 1e3


def launch(kind: str, folder: Path, peers: Peers, width: int) -> Worker:
    arguments = {"kind": kind, "folder": str(folder / kind), "width": width, "depth": DEPTH}
    is_peer = kind == "deepspeed"
    env = rank_env(0, 1, free_port()) | peers.env() if is_peer else {}
    return Worker("benchmarks.save_worker:hold", arguments, name=kind, python=peers.python if is_peer else None, env=env)


def run(options: Options) -> str:
    if shutil.which("fio") is None:
        raise RuntimeError("the leg `save` needs fio: apt-get install fio")
    peers, width, rounds = prepare(options.peers), WIDTH // 4 if options.quick else WIDTH, options.num_rounds(5)
    kinds = ["slipstream", "torch", *(["deepspeed"] if peers.python else []), "asynchronous"]
    nbytes = 12 * (width * width + width) * DEPTH
    measured: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    disk: dict[str, list[float]] = {"cached": [], "direct": []}
    first: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder, ExitStack() as stack:
        scratch, workers = Path(folder), {}

        def save(kind: str) -> dict[str, float] | None:
            """None for a peer that has failed; ours that fails ends the leg."""
            try:
                if kind not in workers:
                    workers[kind] = stack.enter_context(launch(kind, scratch, peers, width))
                    workers[kind].ready()
                return dict(workers[kind].call("save"))
            except Failed as error:
                if kind != "deepspeed":
                    raise
                print(error)
                failed[kind] = error.reason
                return None

        for kind in kinds:
            if (warm := save(kind)) is not None:
                first[kind] = warm
        for _ in range(rounds):
            disk["cached"].append(fio(scratch / "fio", nbytes, direct=False))
            for kind in [kind for kind in kinds if kind not in failed]:
                if (one := save(kind)) is not None:
                    measured[kind].append(one)
            disk["direct"].append(fio(scratch / "fio", nbytes, direct=True))
        memory = workers["slipstream"].call("pretrained")
        crashes = _crashes(scratch, 15 if options.quick else KILLS)
    valid = {kind: each for kind, each in measured.items() if kind not in failed}
    return _words(valid, failed, first["asynchronous"], disk, nbytes, memory, crashes, peers)


def _crashes(scratch: Path, kills: int) -> str:
    points, ways = 0, ("at once", "behind", "pretrained")  # of tests/crashes.py
    for i, way in enumerate(ways):
        folder = scratch / way
        folder.mkdir()
        share = kills * (i + 1) // len(ways) - kills * i // len(ways)
        out = worker.run([sys.executable, ROOT / "tests" / "crashes.py", folder, 7, way, share])
        points += int(out.split()[1])
    return (
        f"Killed (SIGKILL) at {kills} random instants of saves, a third each of save_checkpoint, of asynchronous ones and of "
        f"save_pretrained over an existing folder, and before each of the {points} system calls of one of each: the previous or "
        "the new checkpoint loaded after every one."
    )


def _words(
    measured: Mapping[str, list[dict[str, float]]],
    failed: Mapping[str, str],
    first: Mapping[str, float],
    disk: Mapping[str, list[float]],
    nbytes: int,
    memory: Mapping[str, float],
    crashes: str,
    peers: Peers,
) -> str:
    def seconds(kind: str, what: str) -> list[float]:
        return [each[what] for each in measured[kind]]

    names = {"slipstream": "Slipstream, save_checkpoint", "torch": "torch.save", "deepspeed": "DeepSpeed, save_checkpoint"}
    rows = [
        ["fio, page cache, fsync", "-", Spread.of(disk["cached"]).show(2), _rate(nbytes, disk["cached"])],
        ["fio, direct", "-", Spread.of(disk["direct"]).show(2), _rate(nbytes, disk["direct"])],
    ]
    for kind, name in names.items():
        if kind in failed:
            rows.append([name, failed[kind]])
        elif kind in measured:
            size = int(measured[kind][0]["nbytes"])
            call, on_disk = Spread.of(seconds(kind, "call")).show(2), Spread.of(seconds(kind, "disk")).show(2)
            rows.append([name, call, on_disk, _rate(size, seconds(kind, "disk"))])
    ours = seconds("slipstream", "disk")

    def ratio(above: list[float], below: list[float]) -> float:
        return Spread.ratio(above, below).median

    def times(others: list[float]) -> float:
        return ratio(others, ours)

    goals = [verdict("rate, times fio's through the page cache", times(disk["cached"]), 0.8, at_least=True)]
    goals += [verdict("rate, times fio's direct", times(disk["direct"]), 0.8, at_least=True)]
    goals += [verdict("torch.save, synced, times ours", times(seconds("torch", "disk")), 4, at_least=True)]
    if "deepspeed" in measured:
        goals += [verdict("DeepSpeed's save, synced, times ours", times(seconds("deepspeed", "disk")), 1.5, at_least=True)]
    taken, shortest = seconds("asynchronous", "taken"), seconds("asynchronous", "disk")
    floor = [each["copy"] + each["written"] for each in measured["asynchronous"]]
    usual, step = Spread.of(taken).median, Spread.of(seconds("asynchronous", "step")).show(2)
    parts = [("the call", "call"), ("taken from training, the call included", "taken"), ("until on disk", "disk")]
    parts += [("floor: a bare copy while training waits", "copy"), ("floor: from there to the disk while it does not", "written")]
    cost = [[name, Spread.of(seconds("asynchronous", what)).show(2), f"{first[what]:.2f}"] for name, what in parts]
    goals += [verdict("an asynchronous save, % of the save's own time", 100 * ratio(taken, shortest), 5)]
    goals += [["its floor, % of the save's own time", f"{100 * ratio(floor, shortest):.1f}", "reported"]]
    goals += [["an asynchronous save, times its floor", f"{ratio(taken, floor):.2f}", "reported"]]
    goals += [verdict(f"an asynchronous save, % of {INTERVAL_S:.0f} s", 100 * usual / INTERVAL_S, 5)]
    goals += [verdict("memory of save_pretrained, units", memory["peak"] / memory["unit"], 2)]
    return "\n\n".join(
        [
            f"{nbytes / 1e9:.2f} GB of master weights and moments, one process; seconds, median (min-max) of {len(ours)} rounds. "
            f"{peers}.",
            table(["", "the call", "until on disk", "10^9 bytes/s"], rows),
            f"Asynchronous (checkpoint.writer.decoupled), during steps of {step} s on all cores; 5 % of an interval of "
            f"{usual / 0.05:.0f} s:",
            table(["", "seconds", "the first time"], cost),
            f"save_pretrained needs {memory['peak'] / 1e6:.0f} MB at its peak beyond what the process had; a unit has "
            f"{memory['unit'] / 1e6:.0f} MB.",
            crashes,
            verdicts(goals),
        ]
    )


def _rate(nbytes: int, seconds: list[float]) -> str:
    return f"{nbytes / 1e9 / Spread.of(seconds).median:.2f}"
