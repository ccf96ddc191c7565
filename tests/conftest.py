"""Setup shared by all tests: the pool's lifetime, seeds, folders, budgets, and ranks as plain processes for crash tests."""

import gc
import os
import random
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from slipstream.ops import matmul
from tests.budget import Budget
from tests.cases import EVERYTHING, alternate
from tests.on_gpu import tensors_of_tests
from tests.pool import pool
from tests.ranks import SpawnRanks
from tests.skips import Skips

MEMORY = Path("/dev/shm")
MEMORY_NBYTES = 2 << 30  # that the tests' folders may use there

# Set before triton is first imported, which torch also does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
settings.register_profile("slipstream", max_examples=500 if EVERYTHING else 40, deadline=None, database=None, print_blob=True)
settings.load_profile("slipstream")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Set the seed, which hypothesis reads from this option: the command line's, else random in `make test-all`, else 0."""
    option = config.option
    if option.hypothesis_seed is None:
        option.hypothesis_seed = "random" if EVERYTHING else "0"
    if option.hypothesis_seed == "random":
        option.hypothesis_seed = str(random.SystemRandom().randrange(1 << 32))
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_NBYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # the parent of tmp_path
    matmul.use(True)  # as the first engine does: products of a plain loop before it have the same bits
    pool.filters = list(config.getini("filterwarnings"))
    config.pluginmanager.register(Budget())
    config.pluginmanager.register(Skips())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The objects of imported modules stay: no collection looks at them, now or in a test, where it would take 0.4 s."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(tryfirst=True)  # before the marks are selected by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    alternate(items)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.hypothesis_seed} (hypothesis, fuzz; another: --hypothesis-seed=N or =random)"


def pytest_unconfigure() -> None:
    pool.close()


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """The seed for tests that make random choices themselves; the header of the run shows it."""
    return int(pytestconfig.option.hypothesis_seed)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where fsync is free; for tests marked `disk` a folder on disk, which direct I/O and io_uring need."""
    if request.node.get_closest_marker("disk") is None:
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(prefix="slipstream-test-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)


@pytest.fixture
def spawn_ranks(tmp_path: Path) -> Iterator[SpawnRanks]:
    """`spawn_ranks(script, nproc, env)` starts plain processes, which are killed at the end of the test."""
    spawn = SpawnRanks(tmp_path)
    yield spawn
    spawn.close()


@pytest.fixture(autouse=True)
def _tensors_on_gpu() -> Iterator[None]:
    with tensors_of_tests():
        yield
