"""Quantized bases under adapters: quantized_script.py, the same bits at stages 0, 2 and 3 and on disk. QAT: qat_script.py."""

import pytest

from tests.clients.conftest import Run, needs


@needs("transformers", "peft")
def test_the_page_s_snippet_runs(run_clients: Run) -> None:
    run_clients("quantized_script", "the_page")


@needs("transformers", "peft")
def test_peft_on_slipstream_s(run_clients: Run) -> None:
    run_clients("quantized_script", "train", "slipstream")


@needs("transformers", "peft", "bitsandbytes")
@pytest.mark.parametrize("bits", [4, 8])
def test_peft_on_bitsandbytes(run_clients: Run, bits: int) -> None:
    run_clients("quantized_script", "train", f"bitsandbytes{bits}")


@needs("transformers", "peft", "bitsandbytes", "torchao")
@pytest.mark.parametrize("kind", ["slipstream", "bitsandbytes4", "bitsandbytes8", "torchao"])
def test_peft_added_by_surgery(run_clients: Run, kind: str) -> None:
    run_clients("quantized_script", "by_surgery", kind)


@needs("transformers", "peft", "torchao")
def test_peft_on_torchao(run_clients: Run) -> None:
    run_clients("quantized_script", "train", "torchao")


@needs("torchao")
def test_models_that_torchao_prepared_train_as_in_plain_torch(run_clients: Run) -> None:
    run_clients("qat_script", "trains")
