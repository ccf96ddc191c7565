"""transformers' Trainer over Slipstream: transformers_script.py."""

import pytest

from tests.clients.conftest import Run, needs

pytestmark = needs("accelerate", "transformers")


@pytest.mark.smoke
def test_trainer_trains_evaluates_resumes_and_saves(run_clients: Run) -> None:
    """Stages 1 to 3, the config's optimizer and the Trainer's own; `from_pretrained` and a resize under stage 3."""
    run_clients("transformers_script", "everything")
