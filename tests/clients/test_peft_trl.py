"""LoRA on a frozen base, and TRL's SFT and DPO: peft_script.py."""

import pytest

from tests.clients.conftest import Run, needs


@pytest.mark.smoke
@needs("accelerate", "transformers", "peft")
def test_lora_trains_saves_and_resumes(run_clients: Run) -> None:
    run_clients("peft_script", "peft")


@needs("accelerate", "transformers", "peft", "trl", "datasets")
def test_sft_and_dpo(run_clients: Run) -> None:
    run_clients("peft_script", "trl_trainers")


@needs("transformers", "peft")
def test_lora_on_a_model_on_meta(run_clients: Run) -> None:
    run_clients("peft_script", "on_meta")
