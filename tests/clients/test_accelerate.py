"""accelerate's DeepSpeed plugin over Slipstream: accelerate_script.py."""

import pytest

from tests.clients.conftest import Run, needs

pytestmark = needs("accelerate")


@pytest.mark.smoke
def test_accelerate_trains_as_plain_torch_saves_and_resumes(run_clients: Run) -> None:
    """Stages 1 to 3, from arguments and from a JSON file, accumulation and clipping; a teacher beside a student."""
    run_clients("accelerate_script", "everything")


def test_accelerate_finds_the_ranks_of_a_machine_without_gpus(run_clients: Run) -> None:
    """A contract: `deepspeed.comm` tells accelerate's state what that lacks while it asks. This fails first when that moves."""
    run_clients("accelerate_script", "told_the_backend")


@needs("transformers")
def test_sentences_are_classified_as_by_plain_torch(run_clients: Run) -> None:
    """Accuracy and F1 after each epoch, over what `gather_for_metrics` brings, and the rates of the schedule."""
    run_clients("classify_script", "everything")
