"""Libraries that know DeepSpeed only, unmodified, on two CPU processes: `make test-clients` installs them and Slipstream's names.

A test names what it needs, and is skipped where that is missing; with SLIPSTREAM_TEST_CLIENTS=1 it fails instead.
"""

import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import SpawnRanks

Run = Callable[..., None]


def missing(*distributions: str) -> str:
    """What of it is not installed, with Slipstream's deepspeed; the empty string: nothing."""
    for name in ("deepspeed", *distributions):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed: make test-clients"
        if name == "deepspeed" and "+slipstream" not in version:
            return f"deepspeed {version} is the real one: make test-clients has an environment with Slipstream's names"
    return ""


def needs(*distributions: str) -> pytest.MarkDecorator:
    why = missing(*distributions)
    if why and os.environ.get("SLIPSTREAM_TEST_CLIENTS") == "1":
        pytest.fail(why)
    return pytest.mark.skipif(bool(why), reason=why)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them are slow: `make test` leaves them out, `make test-clients` and its smoke test name their own marks."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def run_clients(spawn_ranks: SpawnRanks, tmp_path: Path) -> Run:
    """`run_clients("module", "function", argument)`: a function of tests/clients on two ranks, in a folder of their own."""

    def run(module: str, function: str, *arguments: object, timeout: float = 200.0) -> None:
        script = f"from tests.clients.{module} import {function}\n{function}({', '.join(map(repr, arguments))})\n"
        ranks = spawn_ranks(script, 2, {"CLIENT_FOLDER": str(tmp_path), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
        codes = ranks.wait(timeout=timeout)
        if codes != [0, 0]:
            story = "\n".join(f"rank {rank} ({code}):\n{ranks.stderr(rank)[-4000:]}" for rank, code in enumerate(codes))
            pytest.fail(story, pytrace=False)

    return run
