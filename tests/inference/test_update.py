"""An engine opened from a configuration and then given a model's weights is the engine of that model, whichever forward runs it."""

from typing import Any

import pytest
import torch

import slipstream
from slipstream.inference import ServedForward
from tests.inference.twins import PROMPTS, SIZES, tiny

SERVING: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_cache_bytes": "1M"}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {  # what each has of its own; which forward says
    "Llama": ({"mlp_bias": True, "attention_bias": True}, "native"),
    "Qwen3": ({"head_dim": 16}, "native"),
    "Qwen2Moe": ({**MOE, "shared_expert_intermediate_size": 48}, "native"),
    "Gemma3Text": ({"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 6}, "native"),
    "Mistral": ({"head_dim": 8, "tie_word_embeddings": True}, "torch"),
    "GPT2": ({"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}, "native"),
    "Glm": ({"head_dim": 16, "partial_rotary_factor": 0.5}, "native"),
    "GPTBigCode": ({"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}, "transformers"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_forward_takes_new_weights(family: str) -> None:
    changes, forward = FAMILIES[family]
    model = tiny(family, **(({} if family.startswith("GPT") else SIZES) | changes))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for dtype in ("fp32", "int8") if forward != "transformers" else ("fp32",):
        with (
            slipstream.init_inference(model.config, dtype=dtype, **SERVING) as blank,
            slipstream.init_inference(model, dtype=dtype, **SERVING) as live,
        ):
            assert forward in blank.description
            blank.update_weights(model.state_dict().items())
            expected = [one.token_ids for one in live.generate(PROMPTS, max_new_tokens=6)]
            assert [one.token_ids for one in blank.generate(PROMPTS, max_new_tokens=6)] == expected
            # Another model's, into an engine of a live one: that keeps its own.
            zeros = [(name, torch.zeros_like(parameter)) for name, parameter in model.named_parameters()]
            live.update_weights(zeros)
            assert live.generate(PROMPTS[0], max_new_tokens=3).token_ids == [0, 0, 0]
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())


def test_what_has_no_place_for_new_weights_says_why() -> None:
    model = tiny("GPTBigCode", **FAMILIES["GPTBigCode"][0])
    with slipstream.init_inference(model, dtype="int8", **SERVING) as served, pytest.raises(ValueError, match="float dtype"):
        served.update_weights(model.named_parameters())
    gemma = tiny("Gemma2", **SIZES, head_dim=16)
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM cannot run with .*: its logits are capped"):
        ServedForward(gemma)


def test_served_values_are_refused_where_they_would_be_others() -> None:
    model = tiny("Llama", **SIZES)
    served, ids = ServedForward(model, threads=1), torch.tensor([[3, 4, 5, 6]])
    plain = model(ids).logits
    with served:
        assert not model(ids).logits.equal(plain)
        with pytest.raises(ValueError, match="padded on the right"):
            model(ids, attention_mask=torch.tensor([[0, 1, 1, 1]]))
        with pytest.raises(ValueError, match="leave position_ids out"):
            model(ids, position_ids=torch.tensor([[0, 1, 0, 1]]))
        cache = model(ids).past_key_values
        with pytest.raises(ValueError, match="leave past_key_values out"):
            model(ids, past_key_values=cache)
    assert model(ids).logits.equal(plain), "as it was"
    with served, pytest.raises(ValueError, match="need fp32 on a CPU"):
        model.bfloat16()(ids)
