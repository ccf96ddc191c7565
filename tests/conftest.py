"""What all tests share: the pool's life, seeds, folders, budgets, and ranks as plain processes for crash tests."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.budget import Budget
from tests.cases import EVERYTHING
from tests.pool import pool
from tests.ranks import SpawnRanks
from tests.skips import Skips

MEMORY = Path("/dev/shm")
MEMORY_NBYTES = 2 << 30  # that tests' folders may take there

# Read when triton is first imported, which torch does, too.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
settings.register_profile("slipstream", max_examples=500 if EVERYTHING else 40, deadline=None, database=None, print_blob=True)
settings.load_profile("slipstream")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Sets the seed, which hypothesis reads from this option: 0, or a random one in `make test-all`, or the command line's."""
    option = config.option
    if option.hypothesis_seed is None:
        option.hypothesis_seed = "random" if EVERYTHING else "0"
    if option.hypothesis_seed == "random":
        option.hypothesis_seed = str(random.SystemRandom().randrange(1 << 32))
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_NBYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # where tmp_path lies
    pool.filters = list(config.getini("filterwarnings"))
    config.pluginmanager.register(Budget())
    config.pluginmanager.register(Skips())


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.hypothesis_seed} (hypothesis, fuzz; another: --hypothesis-seed=N or =random)"


def pytest_unconfigure() -> None:
    pool.close()


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """For tests that draw their own random choices; printed in the header of the run."""
    return int(pytestconfig.option.hypothesis_seed)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """In memory, where fsync is free; tests marked `disk` get a folder of a disk, as direct I/O and io_uring want one."""
    if request.node.get_closest_marker("disk") is None:
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(prefix="slipstream-test-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)


@pytest.fixture
def spawn_ranks(tmp_path: Path) -> Iterator[SpawnRanks]:
    """`spawn_ranks(script, nproc, env)` starts plain processes, which do not outlive the test."""
    spawn = SpawnRanks(tmp_path)
    yield spawn
    spawn.close()
