"""DeepSpeed's interpreter, which `make bench` builds, and its compiled ops.

DeepSpeed compiles its CPU ops on first use, for minutes. `prepare` does that before anything is measured, into the environment.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.worker import Failed, run

_PREPARE = """
import json, deepspeed, torch
from deepspeed.ops.op_builder.cpu import AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder, PinMemoryBuilder, ShareMemCommBuilder
for builder in (AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder, PinMemoryBuilder, ShareMemCommBuilder):
    if builder is not AsyncIOBuilder or builder().is_compatible(verbose=False):  # it needs libaio's headers
        builder().load(verbose=False)
print("\\n" + json.dumps({"torch": torch.__version__, "deepspeed": deepspeed.__version__}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """An interpreter with DeepSpeed and the same torch, or None and the reason in `missing`."""

    python: Path | None
    missing: str = ""
    deepspeed: str = ""

    def env(self) -> dict[str, str]:
        """Variables of DeepSpeed's processes."""
        return {} if self.python is None else _env(self.python)

    def __str__(self) -> str:
        return f"DeepSpeed {self.deepspeed}" if self.python else f"without DeepSpeed: {self.missing}"


def _env(python: Path) -> dict[str, str]:
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"TORCH_EXTENSIONS_DIR": str(python.parent.parent / "torch_extensions"), "PATH": path, "DS_ACCELERATOR": "cpu"}


@functools.cache
def prepare(python: Path) -> Peers:
    """Check the interpreter and compile DeepSpeed's ops. Never raises: a leg without DeepSpeed has a row that says why."""
    if not python.exists():
        return Peers(python=None, missing=f"there is no {python} (`make bench` builds it)")
    python = Path(os.path.abspath(python))
    print("loading DeepSpeed's CPU ops, which are compiled on first use, for minutes ...", flush=True)
    try:
        report = json.loads(run([python, "-c", _PREPARE], env=_env(python)).strip().splitlines()[-1])
    except Failed as error:
        return Peers(python=None, missing=f"DeepSpeed does not run here: {error.reason}")
    if report["torch"].split("+")[0] != torch.__version__.split("+")[0]:
        return Peers(python=None, missing=f"its torch is {report['torch']} and ours {torch.__version__}: not comparable")
    return Peers(python=python, deepspeed=report["deepspeed"])
