"""The leg `plan`: what `engine.explain` and `slipstream plan` predict, beside what the kernel counts.

One process per case, with a model whose noise is small beside it. Memory: the process's high-water mark over two steps, above
what it had after the same steps of a tiny model of the same config. Disk: `read_bytes` and `write_bytes` of /proc/self/io.

    python -m benchmarks.plan CASE      one case in this process, as JSON
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import slipstream
from benchmarks import memory, systems
from benchmarks.memory import MALLOC
from benchmarks.peers import Peers
from benchmarks.ranks import ROOT
from benchmarks.report import host, table, verdict, verdicts
from benchmarks.worker import DTYPES
from benchmarks.workloads import Workload, build_batch, build_model
from slipstream.config import DataWorld, ModelFacts, resolve
from slipstream.train import calibrate, explain
from slipstream.train.dry_run import dry_run

WORK = Workload(name="planned", width=512, depth=12, heads=8, vocab=8192, batch=2, length=128)
TINY = dataclasses.replace(WORK, name="tiny", depth=1, vocab=64)  # of the same width: the matrix library's scratch memory is there
STEPS = 2
MEMORY, TRAFFIC = 1.10, 1.02  # the larger of predicted and measured over the other, at most

Case = dict[str, Any]


def _case(stage: int, dtype: str, *, disk: str = "", micros: int = 1, activations: str = "keep", **zero: Any) -> Case:
    return {"stage": stage, "dtype": dtype, "disk": disk, "micros": micros, "activations": activations, **zero}


IN_MEMORY = (
    _case(0, "fp32"),
    _case(1, "fp32", activations="recompute"),
    _case(3, "fp32"),
    _case(3, "bf16", micros=2, activations="recompute"),
)
ON_DISK = (
    _case(1, "fp32", disk="optimizer"),
    _case(2, "bf16", disk="optimizer", ratio=0.5),
    _case(3, "bf16", disk="weights"),
    _case(3, "bf16", disk="everything", micros=2, activations="recompute"),
    _case(3, "fp32", disk="everything", activations="recompute"),
)
RANKS = (("slipstream:1:gloo", "fp32"), ("slipstream:2:gloo", "bf16"), ("slipstream:3:gloo", "bf16"))


def config(case: Case, folder: str, batch: int) -> dict[str, Any]:
    """The case's JSON."""
    zero: dict[str, Any] = {"stage": case["stage"], "sub_group_size": 1 << 20}
    if case["disk"] in ("optimizer", "everything"):
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder, "ratio": case.get("ratio", 1.0)}
    if case["disk"] in ("weights", "everything"):
        zero["offload_param"] = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": case["micros"],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": case["dtype"] == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "slipstream": {"activations": case["activations"]},
    }


def measure(case: Case, folder: str, work: Workload = WORK) -> dict[str, float]:
    """Predicted and measured bytes and seconds of a case, in this process."""
    tiny = _train(case, folder, TINY)
    profile = explain.of_engine(tiny, *build_batch(TINY, 0)).profile  # what a dry run imports is no part of a step
    assert profile is not None
    rates = calibrate.rates(profile.dtype, "cpu", folder if case["disk"] else None, {})
    tiny.destroy()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    engine = _train(case, folder, work)
    batch = build_batch(work, 0)
    forecast = dataclasses.replace(explain.of_engine(engine, *batch), rates=rates)
    assert forecast.peak is not None and forecast.times is not None
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # begin the high-water mark again
    moved, began = _moved(engine), time.perf_counter()
    _steps(engine, case, batch)
    read, written = (after - start for after, start in zip(_moved(engine), moved, strict=True))
    seconds = (time.perf_counter() - began) / STEPS
    found = {
        "memory": forecast.peak.memory,
        "memory measured": _status("VmHWM") - before,
        "read": forecast.flow.disk_read,
        "read measured": read / STEPS,
        "written": forecast.flow.disk_written,
        "written measured": written / STEPS,
        "seconds": forecast.times.seconds,
        "seconds measured": seconds,
    }
    engine.destroy()
    return found


def _train(case: Case, folder: str, work: Workload) -> Any:
    """An engine that has made its first steps: everything that it will ever allocate is there."""
    engine, *_ = slipstream.initialize(model=build_model(work), config=config(case, folder, work.batch))
    _steps(engine, case, build_batch(work, 0))
    return engine


def _steps(engine: Any, case: Case, batch: Any) -> None:
    for _ in range(STEPS * case["micros"]):
        engine.backward(engine(*batch))
        engine.step()


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _moved(engine: Any) -> tuple[int, int]:
    """Bytes that this process has read from and written to disks, once nothing moves."""
    engine._settle_disk()
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def name_of(case: Case) -> str:
    where = {"": "in memory", "optimizer": "optimizer on disk", "weights": "weights on disk", "everything": "everything on disk"}
    rest = [f"half of the {where[case['disk']]}" if case.get("ratio") else where[case["disk"]]]
    rest += ["recompute"] if case["activations"] == "recompute" else []
    rest += [f"{case['micros']} micro-batches"] if case["micros"] > 1 else []
    return f"stage {case['stage']}, {case['dtype']}, {', '.join(rest)}"


def several(system: str, dtype: str) -> tuple[float, float]:
    """Bytes per rank at the peak of two ranks, predicted and measured by a memory cgroup: WORK's above TINY's."""
    _, stage, *how = system.split(":")
    predicted, measured = [], []
    for work in (TINY, WORK):
        raw = systems._config(DTYPES[dtype], work.batch, int(stage)) | {"slipstream": {"transport": how[0] if how else "shared"}}
        plan = resolve(raw, world=DataWorld(data_parallel=2), facts=ModelFacts(device_type="cpu", supports_bf16=True))
        with torch.device("meta"):
            model = build_model(work)
        forecast = explain.Forecast(
            parts=explain.parts_of(model, plan, 2),
            setting=explain.setting_of(plan, 2, "cpu"),
            profile=dry_run(model, plan, build_batch(work, 0), {}, micro_batch_size=work.batch),
            rates=None,
        )
        assert forecast.peak is not None
        predicted.append(forecast.peak.memory)
        found, _ = memory.peak_of(system, work, dtype, 2, Peers(python=None))
        measured.append(max(found.sampled, found.marked or 0) / 2)
    return predicted[1] - predicted[0], measured[1] - measured[0]


Judged = list[tuple[float, str]]  # how far prediction and measurement are apart, and where


def apart(predicted: float, measured: float) -> float:
    """The larger over the smaller."""
    return max(predicted / measured, measured / predicted)


def targets(memory: Judged, traffic: Judged) -> str:
    rows = []
    for kind, target, judged in (("memory", MEMORY, memory), ("disk traffic", TRAFFIC, traffic)):
        if judged:
            worst, where = max(judged)
            rows.append(verdict(f"{kind}, prediction and measurement apart, worst ({where})", worst, target, digits=3))
    return verdicts(rows)


def measure_apart(case: Case, malloc: dict[str, str]) -> dict[str, float]:
    """`measure` in a process of its own."""
    env = {**os.environ, **malloc, "OMP_NUM_THREADS": str(os.cpu_count())}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.plan", json.dumps(case)], env=env, cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{name_of(case)} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def one_process(cases: Sequence[Case], *, quick: bool) -> str:
    rows, in_memory, on_disk = [], [], []
    for case in cases[-1:] if quick else cases:
        name, found, kept = name_of(case), measure_apart(case, MALLOC), measure_apart(case, {})
        in_memory.append((apart(found["memory"], found["memory measured"]), name))
        row = [name, *(f"{found[key] / 1e6:.1f}" for key in ("memory", "memory measured"))]
        row += [f"{each['memory'] / each['memory measured']:.3f}" for each in (found, kept)]
        for key in ("read", "written"):
            if found[key]:
                on_disk.append((apart(found[key], found[f"{key} measured"]), name))
            row.append(f"{found[key] / 1e6:.2f} / {found[f'{key} measured'] / 1e6:.2f}" if found[key] else "")
        row.append(f"{kept['seconds']:.2f} / {kept['seconds measured']:.2f}")
        print(f"  plan {' | '.join(row)}", flush=True)
        rows.append(row)
    head = [
        "case",
        "peak predicted, MB",
        "measured, MB",
        "predicted over measured",
        "with glibc's own settings",
        "read a step, predicted / measured, MB",
        "written",
        "step, predicted / measured, s",
    ]
    text = (
        f"{WORK.describe()}, AdamW, clipping, one process with all cores. The peak is VmHWM over {STEPS} steps, above the same "
        f"process after a model of the same width and one block; freed blocks of 128 KiB and more go back at once "
        f"({', '.join(MALLOC)}), so that what is counted is what is alive. Beside it the ratio with glibc's own settings, which "
        f"keep freed blocks of up to 32 MiB; the seconds are with those, from rates measured in the same process for half a "
        f"second, on a machine that others use."
    )
    return "\n\n".join((host("torch alone"), text, table(head, rows), targets(in_memory, on_disk)))


def two_ranks(*, quick: bool) -> str:
    rows, judged = [], []
    for system, dtype in RANKS[:1] if quick else RANKS:
        predicted, measured = several(system, dtype)
        name = f"{systems.label(system)}, {dtype}"
        judged.append((apart(predicted, measured), name))
        rows.append([name, f"{predicted / 1e6:.1f}", f"{measured / 1e6:.1f}", f"{predicted / measured:.3f}"])
        print(f"  plan {' | '.join(rows[-1])}", flush=True)
    text = (
        f"{WORK.describe()}, 2 ranks of one thread. What the memory cgroup of all ranks counts at the peak, per rank, above that "
        f"of the same run with a model of {TINY.num_params / 1e6:.1f}M parameters; glibc gives freed blocks back at once."
    )
    head = ["contender", "peak predicted, MB", "measured, MB", "predicted over measured"]
    return "\n\n".join((host("torch alone"), text, table(head, rows), targets(judged, [])))


if __name__ == "__main__":
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as made:
        print(json.dumps(measure(json.loads(sys.argv[1]), made)))
