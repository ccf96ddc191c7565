"""`init_inference`: what a person has and asks for, as an engine that answers."""

from typing import Any

import pytest
import torch

from slipstream.inference import init_inference
from tests.inference.twins import NEW, PROMPTS, SIZES, tiny


@pytest.mark.parametrize(
    ("model", "forward"),
    [
        (lambda: tiny("Llama", **SIZES), "native kernels, 3 threads"),
        (lambda: tiny("GPT2", vocab_size=128, n_embd=64, n_layer=2, n_head=4, eos_token_id=None), "transformers' forward"),
    ],
    ids=["native", "transformers"],
)
def test_threads(model: Any, forward: str) -> None:
    answers = []
    for threads in (1, 3):
        with init_inference(model(), device="cpu", threads=threads, max_context=64) as engine:
            answers.append([one.token_ids for one in engine.generate(PROMPTS, max_new_tokens=NEW)])
            assert torch.get_num_threads() == threads
    assert forward in engine.description
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("threads", "device", "words"),
    [
        (0, "cpu", "threads is 0; it has to be between 1 and 64"),
        (65, "cpu", "threads is 65; it has to be between 1 and 64"),
        (2, "cuda", "threads is 2, but the model runs on cuda"),
    ],
)
def test_threads_refused(threads: int, device: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        init_inference(tiny("Llama", **SIZES), device=device, threads=threads)
