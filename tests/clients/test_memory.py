"""Host memory of models loaded and saved in shards: memory_script.py."""

import pytest
from benchmarks.memory import MALLOC

from tests.clients.conftest import Run, needs

pytestmark = needs("accelerate", "transformers")


@pytest.mark.disk  # pages of files in memory would count as the ranks' shared memory
def test_a_model_is_loaded_and_saved_by_the_unit(run_clients: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in MALLOC.items():
        monkeypatch.setenv(name, value)
    run_clients("memory_script", "peaks")
