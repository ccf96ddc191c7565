"""Rotary frequencies that follow the length of a text (LongRoPE): as transformers' forward of the whole text, in every batch."""

from typing import Any

import pytest
import torch

import slipstream
from slipstream.inference.core import Batch, Chunk
from slipstream.inference.families import UnsupportedModel
from slipstream.inference.models import from_hf
from slipstream.ops import build
from tests.inference.test_native import Requests, native_of
from tests.inference.twins import NEW, SIZES, decoder_of, tiny

LIMIT = 24  # tokens, up to which the short frequencies are used
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [4.0] * 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {"rope_parameters": ROPE}),
    "phi3-windows": ("Phi3", {"rope_parameters": {**ROPE, "attention_factor": 1.3}, "sliding_window": 16}),
    "phi3-partial": (
        "Phi3",
        {"rope_parameters": {**ROPE, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "partial_rotary_factor": 0.5}},
    ),
    "llama": ("Llama", {"rope_parameters": {**ROPE, "original_max_position_embeddings": LIMIT, "factor": 4.0}}),
}
TEXTS = [[(7 * i + length) % 126 + 1 for i in range(length)] for length in (5, LIMIT - 1, LIMIT, LIMIT + 1, 40)]

native = pytest.mark.skipif(
    build.load().kernels is None and "not built" not in build.load().reason, reason=f"no native kernels: {build.load().reason}"
)


def model_of(case: str) -> Any:
    family, more = CASES[case]
    original = {"original_max_position_embeddings": LIMIT} if family == "Phi3" else {}
    return tiny(family, **SIZES | {"max_position_embeddings": 96} | original | more)


def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, -1]
    return logits


@native
@pytest.mark.parametrize("case", CASES)
def test_logits_on_both_sides_of_the_limit(case: str) -> None:
    """Of both forwards; the kernels' bits are those of a text alone, whether others beside it are short or long, and in parts."""
    model = model_of(case)
    assert from_hf(model.config.to_dict()).short_context == LIMIT
    runner = native_of(model)
    for each in (runner, decoder_of(model, block_size=16)):
        requests = Requests(each, 1)
        found = requests.run([(requests.request(text), 0, len(text)) for text in TEXTS])
        for text, logits in zip(TEXTS, found, strict=True):
            torch.testing.assert_close(logits, reference(model, text), rtol=2e-4, atol=2e-4)
    alone, parts = Requests(runner, 2), Requests(runner, 3)
    expected = [alone.run([(alone.request(text), 0, len(text))])[0] for text in TEXTS]
    batched = [parts.request(text) for text in TEXTS]
    runner.forward(Batch(tuple(Chunk(one, 0, 3) for one in batched), ()))
    for logits, again in zip(expected, parts.run([(one, 3, len(one.tokens)) for one in batched]), strict=True):
        assert logits.equal(again)
    runner.close()


def greedy(model: Any, tokens: list[int], num: int) -> list[int]:
    """The likeliest token after the whole text, `num` times."""
    text = list(tokens)
    for _ in range(num):
        text.append(int(reference(model, text).argmax()))
    return text[len(tokens) :]


@native
@pytest.mark.parametrize(
    "options", [{}, {"num_draft": 4}, {"token_budget": 16, "max_running": 3}], ids=["steps", "drafts", "parts"]
)
def test_texts_that_cross_the_limit(options: dict[str, Any]) -> None:
    """A request that crosses it is computed anew: its text is that of transformers' `generate`, which does so too, together with
    others and alone, with prefixes from the cache, and from either side of the limit."""
    model = model_of("phi3")
    with torch.no_grad():
        texts = [model.generate(torch.tensor([text]), max_new_tokens=NEW, do_sample=False)[0].tolist() for text in TEXTS]
    expected = [text[len(prompt) :] for text, prompt in zip(texts, TEXTS, strict=True)]
    assert expected == [greedy(model, prompt, NEW) for prompt in TEXTS]
    with slipstream.init_inference(model, device="cpu", dtype="fp32", **options) as engine:
        for _ in range(2):
            assert [one.token_ids for one in engine.generate(TEXTS, max_tokens=NEW, temperature=0)] == expected
        for prompt, answer in zip(TEXTS, expected, strict=True):
            assert engine.generate(prompt, max_tokens=NEW, temperature=0).token_ids == answer
        stats = engine.engine.stats()
        assert stats.cached_tokens > 0
        # A prefix of a long text, which now is a short one, and a long text that begins with a short one.
        for prompt in (TEXTS[4][:20], [*TEXTS[2], *TEXTS[0] * 2]):
            assert engine.generate(prompt, max_tokens=3, temperature=0).token_ids == greedy(model, prompt, 3)


def test_below_the_limit_there_is_no_other_length() -> None:
    model = model_of("phi3")
    with slipstream.init_inference(model, device="cpu", dtype="fp32", max_context=LIMIT) as engine:
        prompt = TEXTS[2][: LIMIT - 4]
        answer = engine.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
        assert answer.token_ids == greedy(model, prompt, 4), "it ends at the limit"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"long_factor": None}, "longrope's long_factor is None; it must be 8 numbers"),
        ({"short_factor": [1.0] * 7}, r"longrope's short_factor is \[1.0, .*; it must be 8 numbers"),
        ({"short_factor": 2.0}, "longrope's short_factor is 2.0; it must be 8 numbers"),
        ({"long_factor": ["4"] * 8}, "longrope's long_factor is .*; it must be 8 numbers"),
        ({"original_max_position_embeddings": 1}, "longrope's original_max_position_embeddings is 1; it must be more than 1"),
    ],
)
def test_what_is_no_longrope(changes: dict[str, Any], message: str) -> None:
    config = {
        **model_of("llama").config.to_dict(),
        "rope_parameters": {**ROPE, "original_max_position_embeddings": LIMIT, **changes},
    }
    with pytest.raises(UnsupportedModel, match=message):
        from_hf(config)
    with pytest.raises(UnsupportedModel, match="it must be 8 numbers"):
        from_hf({**config, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}})
