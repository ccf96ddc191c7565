"""Cores of a host for each of its ranks, from text that a kernel writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.launch.cores import cores_of, parse_list, share


def system(folder: Path) -> Path:
    """Two nodes of two cores of two threads, numbered as on Intel: threads 0 to 3 first, nodes interleaved."""
    for cpu in range(8):
        topology = folder / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    for node, listed in enumerate(("0,2,4,6\n", "1,3,5,7\n", "\n")):
        (folder / f"node/node{node}").mkdir(parents=True)
        (folder / f"node/node{node}/cpulist").write_text(listed)
    return folder


def test_ranks_get_whole_cores_of_one_node(tmp_path: Path) -> None:
    cores = cores_of(range(8), system(tmp_path))
    assert cores == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert [share(cores, "all", 2, i) for i in range(2)] == [cores[:2], cores[2:]]
    assert [share(cores, "all", 3, i) for i in range(3)] == [((0, 4),), ((2, 6),), ((1, 5),)]
    assert cores_of([0, 1, 4], tmp_path) == ((0, 4), (1,))  # a job that may use some threads only
    assert cores_of([5, 0], tmp_path / "nothing") == ((0,), (5,))


def test_listed_cores_are_used_in_their_order(tmp_path: Path) -> None:
    cores = cores_of(range(8), system(tmp_path))
    assert [share(cores, "7,0-2", 2, i) for i in range(2)] == [((7,), (0,)), ((1,), (2,))]
    with pytest.raises(ValueError, match="use cores 0,1,2,3,4,5,6,7, not 9"):
        share(cores, "0,9", 1, 0)
    with pytest.raises(ValueError, match=r"5 ranks and 4 core\(s\)"):
        share(cores, "all", 5, 0)


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "0-2,1"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a list of cores|names a core twice"):
        parse_list(text)


def test_a_launcher_that_does_not_count_the_ranks_of_a_host() -> None:
    """Each rank would bind itself to all cores, which is what the option is to prevent."""
    env = {name: value for name, value in os.environ.items() if name != "LOCAL_WORLD_SIZE"}
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "slipstream.launch.worker", "--report", "--cores=all", "unread.py"]
    done = subprocess.run(command, env=env | place, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "does not tell how many ranks a host has" in done.stderr
