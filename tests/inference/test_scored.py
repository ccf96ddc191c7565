"""Log-probabilities of a prompt's tokens: those of plain torch, however the prompt is cut and whatever runs beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.inference import init_inference
from tests.inference.test_initialize import MODELS
from tests.inference.twins import PROMPTS, tiny


@pytest.mark.parametrize("family", ["Llama", "GPTBigCode"])
def test_scores_are_the_model_s(family: str) -> None:
    model = tiny(family, **MODELS[family])
    with init_inference(model, device="cpu", token_budget=8, max_running=4) as engine:
        settings: dict[str, Any] = {"max_new_tokens": 3, "prompt_logprobs": 2, "n": 2}
        engine.generate(PROMPTS, max_new_tokens=1)  # its blocks are in the prefix cache
        answers = engine.generate(PROMPTS, **settings)
        assert engine.generate(PROMPTS[0], max_new_tokens=3).prompt_logprobs is None
        assert engine.generate([5], prompt_logprobs=0, max_new_tokens=1).prompt_logprobs == [None]
    for prompt, answer in zip([prompt for prompt in PROMPTS for _ in range(2)], answers, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == len(prompt)
        for place, entry in enumerate(answer.prompt_logprobs[1:]):
            assert entry.token_id == prompt[place + 1]
            assert abs(entry.logprob - expected[place, entry.token_id]) < 1e-3
            assert (expected[place] > entry.logprob + 1e-3).sum() < entry.rank <= (expected[place] > entry.logprob - 1e-3).sum()
            best = expected[place].topk(2)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert torch.allclose(torch.tensor([value for _, value in entry.top]), best.values, atol=1e-3)


def test_scores_survive_a_preemption() -> None:
    model = tiny("Llama", **MODELS["Llama"])
    settings: dict[str, Any] = {"max_new_tokens": 30, "prompt_logprobs": 1, "ignore_eos": True}
    with init_inference(model, device="cpu", max_context=64) as engine:
        alone = [engine.generate(prompt, **settings) for prompt in PROMPTS]
    nbytes = 2 * 2 * 2 * 16 * 4 * 16 * 5  # five blocks of 16 tokens
    with init_inference(model, device="cpu", max_context=64, kv_cache_bytes=nbytes) as engine:
        together = engine.generate(PROMPTS * 4, **settings)  # so many that some run beside others, however late they come
        assert engine.engine.stats().preemptions
    assert [one.prompt_logprobs for one in together] == [one.prompt_logprobs for one in alone] * 4
    assert [one.token_ids for one in together] == [one.token_ids for one in alone] * 4
