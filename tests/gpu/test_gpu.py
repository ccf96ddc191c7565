"""CUDA, where there is one: world 1 over NCCL, world 2 through gloo on one device. The cases are in `cases.py`."""

import functools
import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.gpu.cases import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WORLDS = (1, 2)
TIMEOUT_S = 400  # Triton compiles some sixty kernels in it


def start(world: int, names: list[str]) -> tuple[dict[str, dict[str, Any]], str]:
    """Run the named cases on `world` ranks that share device 0; what each said, and everything that was printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
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


@functools.cache
def outcomes(world: int) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Every case's outcome; after one that fails, fresh processes take the rest."""
    left, done, prints = list(CASES), {}, {}
    while left:
        results, printed = start(world, left)
        here = [name for name in left if name in results] or left[:1]
        done |= results
        prints |= dict.fromkeys(here, printed)
        left = [name for name in left if name not in here]
    return done, prints


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", WORLDS, ids=lambda n: f"world{n}")
def test_on_cuda(world: int, name: str) -> None:
    done, prints = outcomes(world)
    assert name in done, f"the processes ended in it:\n{prints[name][-6000:]}"
    assert not done[name]["trouble"], done[name]["trouble"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "backend"), [(1, "nccl"), (2, "gloo")])
def test_the_backend(world: int, backend: str) -> None:
    done, _ = outcomes(world)
    assert backend in done.get("end", {}).get("backend", "not reached: a case failed")
