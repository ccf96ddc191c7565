"""The peers' own environment, which `make bench` builds: where it is, what is in it, and its compiled ops.

DeepSpeed compiles its CPU ops on first use, for minutes; `Peers.prepare` does that once, before anything is measured, into
the environment's own folder.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

_PREPARE = """
import json, deepspeed, torch
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder
for builder in (CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder):
    builder().load(verbose=False)
print("\\n" + json.dumps({"torch": torch.__version__, "deepspeed": deepspeed.__version__}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """An interpreter with DeepSpeed and the same torch, or None where `missing` says why."""

    python: Path | None
    missing: str = ""
    deepspeed: str = ""

    def environment(self) -> dict[str, str]:
        if self.python is None:
            return {}
        return _environment(self.python)


def _environment(python: Path) -> dict[str, str]:
    home = python.parent.parent
    return {
        "TORCH_EXTENSIONS_DIR": str(home / "torch_extensions"),
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def prepare(python: Path) -> Peers:
    """Look at the peers' interpreter and compile DeepSpeed's ops. Never raises: a leg without DeepSpeed says so."""
    if not python.exists():
        return Peers(python=None, missing=f"no peers' environment ({python} is not there; `make bench` builds it)")
    python = Path(os.path.abspath(python))
    print("loading DeepSpeed's CPU ops (compiled on first use, for minutes) ...", flush=True)
    done = subprocess.run(
        [str(python), "-c", _PREPARE],
        capture_output=True,
        text=True,
        env={**os.environ, **_environment(python), "DS_ACCELERATOR": "cpu"},
    )
    if done.returncode:
        return Peers(python=None, missing="DeepSpeed does not work here: " + done.stderr.strip().splitlines()[-1])
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if found["torch"].split("+")[0] != torch.__version__.split("+")[0]:
        return Peers(python=None, missing=f"the peers' torch is {found['torch']}, ours {torch.__version__}: not comparable")
    return Peers(python=python, deepspeed=found["deepspeed"])
