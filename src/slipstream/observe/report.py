"""`slipstream report`: the environment, and the backends and kernels that Slipstream uses in it, for bug reports.

`collect` returns sections of rows; `as_text` and `as_json` render them. A row says what is present, or why it is missing.
Collecting starts no process group and allocates nothing on a device. It compiles the kernels if they are not built yet.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream.world.host import memory_total, processor, read_pressure

_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")
_PACKAGES = ("numpy", "pydantic", "safetensors", "triton", "transformers", "accelerate", "deepspeed")


class ReportRow(NamedTuple):
    name: str
    value: str
    note: str = ""


Sections = Mapping[str, Sequence[ReportRow]]  # title -> rows


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 2**30:.1f} GiB"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> list[ReportRow]:
    import torch

    import slipstream

    rows = [
        ReportRow("slipstream", slipstream.__version__),
        ReportRow("python", platform.python_version(), sys.executable),
        ReportRow("torch", torch.__version__),
        ReportRow("system", f"{platform.system()} {platform.release()}", platform.machine()),
    ]
    rows += [ReportRow(package, version) for package in _PACKAGES if (version := _installed(package))]
    rows.append(ReportRow("CUDA of torch", torch.version.cuda or "none"))
    if torch.version.hip:
        rows.append(ReportRow("HIP of torch", torch.version.hip))
    return rows


def _devices() -> list[ReportRow]:
    import torch

    known, cores = processor(), f"{len(os.sched_getaffinity(0))} cores for this process, of {os.cpu_count()}"
    flags = (known.get("flags") or known.get("Features", "")).split()
    rows = [
        ReportRow("CPU", known.get("model name", platform.machine()), cores),
        ReportRow("CPU flags", " ".join(flag for flag in _FLAGS if flag in flags) or "none of those that matter here"),
    ]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = f"compute capability {device.major}.{device.minor}"
        rows.append(ReportRow(f"CUDA {index}", device.name, f"{_size(device.total_memory)}, {capability}"))
    if torch.cuda.device_count() == 0:
        rows.append(ReportRow("CUDA", "no device", _why_no_cuda(torch.version.cuda)))
    return rows


def _why_no_cuda(built_with: str | None) -> str:
    if built_with is None:
        return "this torch was built without CUDA"
    if "CUDA_VISIBLE_DEVICES" in os.environ and not os.environ["CUDA_VISIBLE_DEVICES"].strip():
        return "CUDA_VISIBLE_DEVICES is empty"
    return "the driver shows none" if Path("/proc/driver/nvidia").exists() else "no NVIDIA driver"


def _backends() -> list[ReportRow]:
    import torch
    import torch.distributed as dist

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    mpi = dist.is_mpi_available()
    return [
        ReportRow("gloo", _yes(dist.is_gloo_available()), "CPU ranks, and GPU ranks that share a device"),
        ReportRow("nccl", _yes(dist.is_nccl_available()), nccl or "GPU ranks; needs a CUDA build of torch"),
        ReportRow("mpi", _yes(mpi), "" if mpi else "not needed: mpirun works with gloo and nccl"),
        _shared_memory(),
    ]


def _yes(present: bool) -> str:
    return "yes" if present else "no"


def _shared_memory() -> ReportRow:
    """Whether ranks of this host can open each other's memory; a child process serves as the peer."""
    name = "shared memory"
    descriptor = os.memfd_create("slipstream-report")
    try:
        os.write(descriptor, b"seen")
        peer = f"print(open('/proc/{os.getpid()}/fd/{descriptor}').read())"
        probe = subprocess.run([sys.executable, "-S", "-c", peer], capture_output=True, text=True, timeout=30)
    finally:
        os.close(descriptor)
    if probe.stdout.strip() == "seen":
        return ReportRow(name, "yes", "memfd, opened by another process through /proc/PID/fd")
    error = (probe.stderr.strip().splitlines() or ["no answer"])[-1]
    return ReportRow(name, "no", f"another process cannot open it ({error}); ranks of one host talk over gloo")


def _kernels() -> list[ReportRow]:
    from slipstream import ops

    return [ReportRow(op.name, op.implementation, op.reason) for op in ops.report()]


def _memory() -> list[ReportRow]:
    pressure = read_pressure()
    shm, kills = pressure.shm, pressure.cgroup_kills
    free = f"{_size(shm[2])} free; data loader workers and checkpoints in memory use it" if shm else "data loader workers need it"
    return [
        ReportRow("memory", _size(memory_total()), "of the control group" if pressure.limit else "of the host"),
        ReportRow("/dev/shm", _size(shm[0]) if shm else "none", free),
        ReportRow("out-of-memory kills", "unknown" if kills is None else str(kills), "in this control group"),
    ]


def _limits() -> list[ReportRow]:
    import resource

    def shown(value: int, nbytes: bool) -> str:
        if value == resource.RLIM_INFINITY:
            return "unlimited"
        return f"{value / 2**20:g} MiB" if nbytes else str(value)

    kinds = (
        ("open files", resource.RLIMIT_NOFILE, False, "each rank needs some hundreds"),
        ("locked memory", resource.RLIMIT_MEMLOCK, True, "RDMA networks want it unlimited"),
        ("processes", resource.RLIMIT_NPROC, False, ""),
    )
    rows = []
    for name, kind, nbytes, note in kinds:
        soft, hard = resource.getrlimit(kind)
        raised = f"may be raised to {shown(hard, nbytes)}" if soft != hard else ""
        rows.append(ReportRow(name, shown(soft, nbytes), "; ".join(filter(None, (raised, note)))))
    return rows


def collect() -> Sections:
    sections = (_versions, _devices, _backends, _kernels, _memory, _limits)
    return {section.__name__.removeprefix("_"): section() for section in sections}


def as_text(sections: Sections) -> str:
    width = max(len(row.name) for rows in sections.values() for row in rows)
    lines: list[str] = []
    for title, rows in sections.items():
        lines += ["", title] if lines else [title]
        lines += [f"  {row.name:<{width}}  {row.value:<17}  {row.note}".rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def as_json(sections: Sections) -> str:
    document = {title: {row.name: {"value": row.value, "note": row.note} for row in rows} for title, rows in sections.items()}
    return json.dumps(document, indent=2) + "\n"


def execute(*, machine: bool) -> int:
    """Print the report: JSON for a machine, else text."""
    sections = collect()
    sys.stdout.write(as_json(sections) if machine else as_text(sections))
    return 0
