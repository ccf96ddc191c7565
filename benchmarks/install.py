"""The leg `install`: seconds from the wheel to the first training step in a fresh environment without a C compiler.

torch and the other dependencies are those of this environment: what a user waits for after they are installed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from benchmarks.worker import ROOT

LIMIT = 60.0  # seconds
_FIRST_STEP = """
import torch
import slipstream
from slipstream.ops import build
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
engine, *_ = slipstream.initialize(model=torch.nn.Linear(8, 8), config=config)
engine.backward(engine(torch.ones(2, 8)).square().mean())
engine.step()
print(slipstream.__file__, engine.global_steps, build.load().reason, sep="|")
"""


class Installed(NamedTuple):
    wheel: str
    install: float  # seconds of pip
    step: float  # seconds of a process that makes one step
    package: Path
    steps: int
    kernels: str


def wheel_of(source: Path, folder: Path) -> Path:
    """The wheel of a source tree or archive, built without network."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    subprocess.run([*command, folder, source], check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Installed:
    """Install a wheel into a new environment at `folder`, whose other packages are this one's, and make a step there."""
    venv.create(folder, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    start = time.perf_counter()
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--ignore-installed", str(wheel)], check=True, timeout=300)
    install = time.perf_counter() - start
    home = folder / "home"
    home.mkdir()
    command = [python, "-c", _FIRST_STEP]
    environment = {"PATH": str(folder / "bin"), "HOME": str(home), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=True, timeout=300)
    step = time.perf_counter() - start - install
    package, steps, kernels = done.stdout.splitlines()[-1].split("|")
    return Installed(wheel.name, install, step, Path(package).parent, int(steps), kernels)


def run(options: Options) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        wheel = wheel_of(ROOT, Path(scratch))
        turns = [install(wheel, Path(scratch, f"environment{i}")) for i in range(options.num_rounds(3))]
        size = wheel.stat().st_size / 1e6
    worst = max(turns, key=lambda turn: turn.install + turn.step)
    rows = [[f"{turn.install:.1f}", f"{turn.step:.1f}", turn.kernels] for turn in turns]
    return "\n\n".join(
        (
            f"`{worst.wheel}`, {size:.1f} MB, in new environments without a compiler on the PATH:",
            table(["pip install, s", "first step, a new process, s", "kernels"], rows),
            verdicts([verdict("seconds of the slowest turn", worst.install + worst.step, LIMIT, digits=1)]),
        )
    )
