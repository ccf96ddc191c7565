"""Functions of a notebook on several ranks: what they return, how they fail and stop, and the notebooks of examples/."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cloudpickle")

from slipstream.integrations.notebook import RanksFailedError, launch

pytestmark = [pytest.mark.slow, pytest.mark.alone]
NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
# As a kernel runs cells: all in __main__, which no other process can import.
CELLS = """
import threading
from dataclasses import dataclass
from slipstream.integrations.notebook import launch

@dataclass
class Found:
    rank: int
    total: float

factor = 3

def helper(value):
    return factor * value

def job(start, more=0):
    import slipstream, torch, torch.distributed as dist
    slipstream.init_distributed()
    total = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} is here\\n", end="", flush=True)  # one write: both share the pipe
    return Found(dist.get_rank(), helper(total.item()) + more)

found = launch(job, 5, nproc=2, more=1)
assert found == [Found(0, 34.0), Found(1, 34.0)], found
lock = threading.Lock()

def bad():
    with lock:
        pass

try:
    launch(bad, nproc=2)
except TypeError as error:
    print(error)
"""
WAITS = """
import os, signal, time
from slipstream.integrations.notebook import launch

def job():
    print(f"pid {os.getpid()}\\n", end="", flush=True)
    time.sleep(600)

launch(job, nproc=2)
"""


def test_what_a_cell_refers_to_travels_with_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CELLS], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert {f"rank {rank} is here" for rank in range(2)} <= set(done.stdout.splitlines())
    assert "'bad' cannot be sent to other processes" in done.stdout and "made inside the function" in done.stdout


def test_a_rank_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def job(wrong: int) -> None:
        rank = int(os.environ["RANK"])
        if rank == wrong:
            raise LookupError(f"nothing for rank {rank}")
        time.sleep(600)

    with pytest.raises(RanksFailedError, match=r"(?s)exit code 1:.*rank 1.*in job.*LookupError: nothing for rank 1"):
        launch(job, 1, nproc=2)
    assert "LookupError: nothing for rank 1" in capsys.readouterr().err, "it appears in the cell, too"
    with pytest.raises(ValueError, match=r"nproc \(0\) must be at least 1"):
        launch(job, 0, nproc=0)


@pytest.mark.parametrize("stubborn", [False, True])
def test_interrupts_end_all_ranks(stubborn: bool, tmp_path: Path) -> None:
    """The second one ends those that will not listen."""
    script = WAITS.replace("    print(", "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    print(") if stubborn else WAITS
    variables = os.environ | {
        "SLURM_JOB_NUM_NODES": "2",
        "SM_HOSTS": '["a", "b"]',
        "SM_CURRENT_HOST": "b",
    }  # of the kernel's own job
    kernel = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=variables)
    assert kernel.stdout is not None
    pids = [int(kernel.stdout.readline().split()[1]) for _ in range(2)]
    kernel.send_signal(signal.SIGINT)
    if stubborn:
        time.sleep(1)
        kernel.send_signal(signal.SIGINT)
    assert kernel.wait(20) != 0
    kernel.stdout.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("name", ["train", "finetune", "serve"])
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook: Any = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    notebook.cells = [cell for cell in notebook.cells if not cell.source.startswith("%")]
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    results = [output["data"]["text/plain"] for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    if name == "train":
        number, last = (float(part) for part in results[-1].strip("()").split(", "))
        assert "step 40" in said and "step 60" in said and number == 40, "the second launch goes on from the first"
        assert last < 3.2
    elif name == "finetune":
        assert "step 15" in said and "stage 3" in results[-1], results
    else:
        assert "blue" in said.lower() and set(eval(results[-1])) == {"city", "country"}
