"""The forecast of `engine.explain` next to the kernel's counts: `run(case, folder)`, in a process that does nothing else.

Memory: the high-water mark of the process over two steps, above its memory after the same steps of a model of one block.
Traffic: `read_bytes` and `write_bytes` of /proc/self/io.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.workloads import Workload, build_batch, build_model

import slipstream
from slipstream.train.planning import explain

MODEL = Workload(name="forecast", width=512, depth=12, heads=8, vocab=8192, batch=2, length=128)
ONE_BLOCK = dataclasses.replace(MODEL, depth=1, vocab=64)  # the same width, so that the scratch memory of products is there
STEPS = 2


@dataclass(frozen=True)
class Case:
    stage: int
    dtype: Literal["fp32", "bf16"]
    disk: tuple[Literal["optimizer", "weights"], ...] = ()  # the states on disk
    ratio: float = 1.0  # the part of the optimizer's states on disk
    micro_batches: int = 1
    activations: Literal["keep", "recompute"] = "keep"
    ranks: int = 1

    def __str__(self) -> str:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        return ",".join(f"{name}={value}" for name, value in fields.items())

    def config(self, folder: str) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "sub_group_size": 1 << 20}
        if "optimizer" in self.disk:
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder, "ratio": self.ratio}
        if "weights" in self.disk:
            zero["offload_param"] = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
        return {
            "train_micro_batch_size_per_gpu": MODEL.batch,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": self.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": zero,
            "slipstream": {"activations": self.activations, "transport": "gloo" if self.ranks > 1 else "auto"},
        }


CASES = (
    Case(0, "fp32"),
    Case(1, "fp32", activations="recompute"),
    Case(3, "fp32"),
    Case(3, "bf16", micro_batches=2, activations="recompute"),
    Case(1, "fp32", disk=("optimizer",)),
    Case(2, "bf16", disk=("optimizer",), ratio=0.5),
    Case(3, "bf16", disk=("weights",)),
    Case(3, "bf16", disk=("optimizer", "weights"), micro_batches=2, activations="recompute"),
    Case(3, "fp32", disk=("optimizer", "weights"), activations="recompute"),
    Case(1, "fp32", ranks=2),
    Case(2, "bf16", ranks=2),
    Case(3, "bf16", ranks=2),
)


def run(case: Case, folder: str) -> None:
    """Print (predicted, measured) bytes a step of memory, reads and writes, as JSON."""
    small = _trained(case, folder, ONE_BLOCK)
    explain.of_states(small.states, *build_batch(ONE_BLOCK, 0))  # imports
    small.destroy()
    before = _resident("VmRSS")
    engine, batch = _trained(case, folder, MODEL), build_batch(MODEL, 0)
    forecast = explain.of_states(engine.states, *batch)
    assert forecast.peak is not None
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    start = _traffic(engine)
    _train(engine, case, batch)
    read, written = (now - then for now, then in zip(_traffic(engine), start, strict=True))
    peak = _resident("VmHWM") - before
    flow = forecast.flow
    print(
        json.dumps(
            {
                "memory": (forecast.peak.memory, peak),
                "read": (flow.disk_read, read / STEPS),
                "written": (flow.disk_written, written / STEPS),
            }
        )
    )
    engine.destroy()


def _trained(case: Case, folder: str, work: Workload) -> Any:
    """An engine after its first steps, which allocate all that it ever keeps."""
    engine, *_ = slipstream.initialize(model=build_model(work), config=case.config(folder))
    _train(engine, case, build_batch(work, 0))
    return engine


def _train(engine: Any, case: Case, batch: Any) -> None:
    for _ in range(STEPS * case.micro_batches):
        engine.backward(engine(*batch))
        engine.step()


def _resident(name: str) -> int:
    """A line of /proc/self/status in bytes, without memory that malloc keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    line = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert line is not None
    return int(line[1]) * 1024


def _traffic(engine: Any) -> tuple[int, int]:
    """Bytes that this process has read from and written to disks, after all pending transfers."""
    engine.states.settle()
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])
