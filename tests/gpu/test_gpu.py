"""CUDA, where there is one: world 1 over NCCL, world 2 through gloo on one device. The cases are in `cases.py`."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.gpu.cases import ALONE, CASES, TOGETHER

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WORLDS = (1, 2)
TIMEOUT_S = 400  # Triton compiles some sixty kernels in it


def start(world: int, names: list[str], devices: int = 1) -> tuple[dict[str, dict[str, Any]], str]:
    """Run the named cases on `world` ranks that share the first devices; what each said, and everything that was printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": ",".join(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:devices]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path])),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.cases", *names],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    printed = []
    for rank in ranks:
        try:
            printed.append(rank.communicate(timeout=TIMEOUT_S)[0])
        except subprocess.TimeoutExpired:
            for each in ranks:
                each.kill()
            printed.append("(killed: no end)\n" + rank.communicate()[0])
    lines = [json.loads(line) for line in printed[0].splitlines() if line.startswith("{")]
    return {line.get("case", "end"): line for line in lines}, "\n".join(printed)


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", WORLDS, ids=lambda n: f"world{n}")
def test_on_cuda(world: int, name: str) -> None:
    """Fresh processes for each, so that a case that fails takes no other with it; `pytest -n 8` runs eight at once."""
    if name in (ALONE if world > 1 else TOGETHER):
        pytest.skip("a case of another number of processes")
    done, printed = start(world, [name])
    assert name in done, f"the processes ended in it:\n{printed[-6000:]}"
    assert not done[name]["trouble"], done[name]["trouble"]
    assert ("nccl" if world == 1 else "gloo") in done["end"]["backend"]


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_on_two_devices() -> None:
    name = "served_over_processes_as_by_one"
    done, printed = start(2, [name], devices=2)
    assert name in done, f"the processes ended in it:\n{printed[-6000:]}"
    assert not done[name]["trouble"], done[name]["trouble"]
    assert "nccl" in done["end"]["backend"]
