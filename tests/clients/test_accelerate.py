"""accelerate's DeepSpeed plugin over Slipstream: accelerate_script.py."""

from tests.clients.conftest import Run, needs

pytestmark = needs("accelerate")


def test_accelerate_trains_as_plain_torch_saves_and_resumes(run_clients: Run) -> None:
    """Stages 1 to 3, from arguments and from a JSON file, accumulation and clipping; a teacher beside a student."""
    run_clients("accelerate_script", "everything")
