"""A token whose embedding is NaN, in each forward: what was computed before it is as it would be without it, so that others may
find it as their prefix; what comes after it is NaN."""

from typing import Any

import pytest
import torch

from slipstream.inference.core import Batch, Chunk, Request, Runner, SamplingParams
from tests.inference.test_generic import FALCON, GPT2, generic
from tests.inference.test_native import native_of
from tests.inference.twins import SIZES, VOCAB, decoder_of, tiny

BROKEN = VOCAB - 1
RUNNERS: dict[str, Any] = {  # the forward, a model
    "native": (lambda model: native_of(model, num_blocks=6), "Llama", {**SIZES, "num_key_value_heads": 1}),
    "native, bf16": (
        lambda model: native_of(model, num_blocks=6, cache_dtype=torch.bfloat16),
        "Llama",
        {**SIZES, "num_key_value_heads": 1},
    ),
    "torch": (decoder_of, "Llama", SIZES),
    "fused": (generic, "GPT2", {**GPT2, "tie_word_embeddings": False}),
    "one by one": (generic, "Falcon", {**FALCON, "tie_word_embeddings": False}),
}


def request(runner: Runner, tokens: list[int], blocks: list[int]) -> Request:
    return Request(id="x", tokens=tokens, params=SamplingParams(), blocks=blocks)


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_broken_token_leaves_the_prefix_before_it_whole(kind: str) -> None:
    make, family, sizes = RUNNERS[kind]
    model = tiny(family, **sizes)
    embedding = model.get_input_embeddings().weight.data
    embedding[BROKEN] = torch.nan
    runner = make(model)
    size = runner.block_size
    prefix = [3 + i * 5 % 100 for i in range(size)]

    def logits(tokens: list[int], blocks: list[int], start: int) -> torch.Tensor:
        return torch.as_tensor(runner.forward(Batch((Chunk(request(runner, tokens, blocks), start, len(tokens)),), ()))).clone()

    expected = logits([*prefix, 8], [0, 1], 0)
    assert logits([*prefix, BROKEN, 9, 10], [2, 3], 0).isnan().all()
    torch.testing.assert_close(logits([*prefix, 8], [2, 4], size), expected, rtol=1e-4, atol=1e-4)
    assert logits([*prefix, BROKEN, 9, 10, 11], [2, 3], size + 3).isnan().all()
    if hasattr(runner, "close"):
        runner.close()
