"""What all tests share: the pool's life, fixed seeds, and ranks as plain processes for crash tests."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.pool import pool
from tests.ranks import SpawnRanks

# Read when triton is first imported, which torch does, too.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
settings.register_profile("slipstream", max_examples=200, deadline=None, database=None, print_blob=True)
settings.load_profile("slipstream")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """The seed is fixed unless the command line says otherwise; hypothesis reads it from this option."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = "0"
    elif config.option.hypothesis_seed == "random":
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(1 << 32))
    pool.filters = list(config.getini("filterwarnings"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.hypothesis_seed} (hypothesis, fuzz; another: --hypothesis-seed=N or =random)"


def pytest_unconfigure() -> None:
    pool.close()


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """For tests that draw their own random choices; printed in the header of the run."""
    return int(pytestconfig.option.hypothesis_seed)


@pytest.fixture
def spawn_ranks(tmp_path: Path) -> Iterator[SpawnRanks]:
    """`spawn_ranks(script, nproc, env)` starts plain processes, which do not outlive the test."""
    spawn = SpawnRanks(tmp_path)
    yield spawn
    spawn.close()
