"""Models that this package has no code for, through transformers and the paged cache, against `generate` in fp32."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import slipstream
from slipstream.compat.moe import MoE as DeepSpeedMoE
from slipstream.inference.families import UnsupportedModel
from slipstream.inference.generic import (
    GenericDecoder,
    PackedExperts,
    cache_shapes,
    check_context,
    open_model,
    quantize_model,
    shared_copy,
)
from slipstream.inference.kv_cache import KVCache
from slipstream.moe import MoE
from slipstream.ops import products
from slipstream.ops.matrices import dequantize, to_int4, to_int8
from slipstream.quantized import PackedLinear, PackedMatrix
from tests.cases import every_other
from tests.inference.twins import NEW, PROMPTS, SIZES, VOCAB, check_against_generate, tiny

ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, **ENDS}
FALCON = {**SIZES, "num_kv_heads": 2}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
LONG = {"max_position_embeddings": 128, "original_max_position_embeddings": 48}  # Phi3's configuration has it outside
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 128 / 48}
LONGROPE |= {"original_max_position_embeddings": 48}
PHIMOE = {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LLAMA4 = {**SIZES, **MOE, "head_dim": 16, "intermediate_size_mlp": 96, "attention_chunk_size": 8, "no_rope_layers": [1, 0]}
LLAMA4 |= {"floor_scale": 16, "attn_temperature_tuning": False}
MLA = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {  # the class, its sizes, whether all requests share a forward
    "gpt2": ("GPT2", GPT2, True),
    "gpt-neox": ("GPTNeoX", SIZES, True),
    "opt": ("OPT", {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64}, True),
    "bloom": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4, **ENDS}, False),
    "falcon": ("Falcon", FALCON, False),
    "falcon-alibi": ("Falcon", {**FALCON, "alibi": True, "new_decoder_architecture": False}, False),
    "phi": ("Phi", SIZES, True),
    "phi3-window": ("Phi3", {**SIZES, "sliding_window": 8}, True),
    "stablelm": ("StableLm", SIZES, True),
    "olmo2": ("Olmo2", SIZES, True),
    "cohere": ("Cohere", SIZES, True),
    "granite": ("Granite", {**SIZES, "attention_multiplier": 0.3, "residual_multiplier": 0.5}, True),
    "gemma2": ("Gemma2", {**SIZES, "head_dim": 32, "sliding_window": 8, "attn_logit_softcapping": 2.0}, True),
    "gptj": ("GPTJ", {**GPT2, "rotary_dim": 8}, False),
    "phi3-longrope": ("Phi3", {**SIZES, **LONG, "rope_parameters": LONGROPE}, True),
    "phimoe-longrope": ("Phimoe", {**SIZES, **LONG, **MOE, "rope_parameters": PHIMOE}, True),
    "gpt-neox-dynamic": ("GPTNeoX", {**SIZES, "rope_parameters": DYNAMIC}, True),
    "llama4": ("Llama4Text", LLAMA4, True),
    "llama4-temperature": ("Llama4Text", {**LLAMA4, "attn_temperature_tuning": True}, False),
    "deepseek-v2": ("DeepseekV2", {**MLA, "topk_method": "group_limited_greedy"}, False),
    "deepseek-v3": ("DeepseekV3", {**MLA, "q_lora_rank": 24}, False),
    "mpt": ("Mpt", {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, **ENDS}, False),
}
STACKS = {"DeepseekV2": CASES["deepseek-v2"][1], "DeepseekV3": CASES["deepseek-v3"][1], "GptOss": {**SIZES, **MOE, "head_dim": 16}}


def generic(model: Any) -> GenericDecoder:
    return GenericDecoder(model, KVCache(cache_shapes(model), num_blocks=64, block_size=4, dtype=torch.float32))


@pytest.mark.parametrize("case", CASES)
def test_greedy_as_transformers(case: str) -> None:
    family, sizes, fused = CASES[case]
    model = tiny(family, **sizes)
    runner = generic(model)
    assert runner._fused == fused
    check_against_generate(model, runner)


@pytest.mark.parametrize(
    ("family", "rope", "limit"),
    [
        ("Phi3", LONGROPE, 48),
        ("Phimoe", PHIMOE, 48),
        ("Gemma3Text", {"sliding_attention": {"rope_type": "default"}, "full_attention": LONGROPE}, 48),
        ("GPTNeoX", DYNAMIC, 128),
        ("GPTNeoX", {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, 128),
    ],
)
def test_the_context_ends_where_rotations_follow_the_length(
    family: str, rope: dict[str, Any], limit: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"layer_types": list(rope)} if "full_attention" in rope else {}
    model = tiny(family, **SIZES | LONG | kinds, head_dim=16, rope_parameters=rope)
    runner = generic(model)
    assert (runner.max_context, runner._fused) == (limit, True)
    check_context(model, limit)
    check_context(model, None)
    if limit == 128:
        assert not caplog.messages
        return
    assert f"is served with {limit} of its 128 positions: beyond that its rotary embedding (longrope) depends on" in caplog.text
    with pytest.raises(ValueError, match=f"max_context is {limit + 1}, but .*ForCausalLM is served up to {limit} positions: "):
        check_context(model, limit + 1)
    monkeypatch.setattr("slipstream.inference.generic._rope_limits", lambda model: iter(()))
    assert not generic(model)._fused  # what is not known by its name is found by trying


def test_rounding_does_not_part_requests() -> None:
    """In bf16 deep models' logits differ by some percent for the order of sums alone."""
    model = tiny("StableLm", **SIZES | {"num_hidden_layers": 16}).to(torch.bfloat16)
    assert GenericDecoder(model, KVCache(cache_shapes(model), num_blocks=8, block_size=4, dtype=torch.bfloat16))._fused


def test_a_prefix_is_cached_below_the_limit() -> None:
    model = tiny("Phimoe", **CASES["phimoe-longrope"][1])
    outputs = [model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0].tolist() for prompt in PROMPTS]
    expected = [ids[len(prompt) :] for ids, prompt in zip(outputs, PROMPTS, strict=True)]
    with slipstream.init_inference(model, device="cpu", token_budget=24, max_running=8) as engine:
        for _ in range(2):
            assert [one.token_ids for one in engine.generate(PROMPTS, max_new_tokens=NEW)] == expected
        assert engine.engine.stats().cached_tokens > 0
        assert len(engine.generate([1] * 40, max_new_tokens=20).token_ids) == 8  # there the context ends


def test_refused_in_one_sentence(tmp_path: Any) -> None:
    mamba = tiny("Mamba", vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=1, **ENDS)
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM is not a decoder with a cache of keys and values"):
        cache_shapes(mamba)
    both_ways = tiny("Gemma3Text", **SIZES, head_dim=16, use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModel, match="Gemma3ForCausalLM attends in both directions"):
        slipstream.init_inference(both_ways, device="cpu")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(UnsupportedModel, match="transformers cannot open"):
        open_model(tmp_path)


# -- Quantized


def rounded(model: Any, kind: str) -> tuple[Any, int]:
    """The twin: `model` in fp32 with what its quantized weights say, and the bytes that these take."""
    twin, nbytes = copy.deepcopy(model), 0
    head = twin.get_output_embeddings()
    for module in twin.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            m = to_int4(weight.detach()) if kind == "int4" and module is not head else to_int8(weight.detach())
            back = dequantize(m)
            module.weight = nn.Parameter(back.T if isinstance(module, Conv1D) else back)
            nbytes += weight.numel() * 5 // 8 if len(m) == 3 else weight.numel() + 4 * len(weight)  # int4: 16 bits twice for 32
    return twin, nbytes


@pytest.fixture
def float_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of quantized weights with inputs that are not rounded, by torch, so that a twin's logits are as near as in fp32."""
    monkeypatch.setattr(PackedMatrix, "is_native", False)
    monkeypatch.setattr(products, "round_activations", lambda x: x)


def nbytes_of(model: Any) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize(("case", "kind"), every_other(("gpt2", "opt", "phi", "falcon", "bloom", "gptj"), ("int8", "int4")))
def test_quantized_as_its_twin(case: str, kind: str, float_inputs: None) -> None:
    family, sizes, fused = CASES[case]
    model = tiny(family, **sizes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin, nbytes = rounded(model, kind)
    quantized = quantize_model(shared_copy(model), kind, torch.float32)
    matrices = [module for module in quantized.modules() if isinstance(module, PackedLinear)]
    assert matrices and not any(isinstance(module, (nn.Linear, Conv1D)) for module in quantized.modules())
    replaced = sum(module.weight.nbytes for module in twin.modules() if isinstance(module, (nn.Linear, Conv1D)))
    assert nbytes_of(quantized) == nbytes_of(twin) - replaced + nbytes
    runner = generic(quantized)
    assert runner._fused == fused
    check_against_generate(twin, runner)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())  # the user's is as it was


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_by_dtype(kind: str, tmp_path: Any) -> None:
    """A folder and a live model: bf16 but for what is quantized, whose scales stay fp32."""
    model = tiny("GPT2", **GPT2, scale_attn_by_inverse_layer_idx=True)
    model.save_pretrained(tmp_path)
    answers = []
    for source in (model, tmp_path):
        with slipstream.init_inference(source, dtype=kind, device="cpu", max_context=32) as engine:
            answers.append(engine.generate([3, 1, 4, 1, 5], max_new_tokens=6).token_ids)
            served: Any = engine.engine.runner.model  # type: ignore[attr-defined]
            assert {parameter.dtype for parameter in served.parameters()} == {torch.bfloat16}
            assert served.lm_head.matrix.bits == 8 and served.transformer.h[0].mlp.c_fc.matrix.bits == int(kind[3:])
            assert served.lm_head.matrix.matrix.scale.dtype == torch.float32 and served.lm_head.weight.dtype == torch.bfloat16
    assert len(answers[0]) == 6 and model.dtype == torch.float32


def test_rotary_frequencies_stay_exact(tmp_path: Any) -> None:
    """In bf16 the angles of late positions would be others."""
    model = tiny("Nemotron", **SIZES, rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5})
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.save_pretrained(tmp_path)
    for source, dtype in ((model, "bf16"), (tmp_path, "bf16"), (model, "int8"), (tmp_path, "fp32")):
        with slipstream.init_inference(source, dtype=dtype, device="cpu", max_context=32) as engine:
            served: Any = engine.engine.runner.model  # type: ignore[attr-defined]
            assert served.model.rotary_emb.inv_freq.equal(frequencies)
            assert {one.dtype for one in served.parameters()} == {torch.float32 if dtype == "fp32" else torch.bfloat16}
    assert {one.dtype for one in (*model.parameters(), *model.buffers())} == {torch.float32}


def test_a_live_model_of_several_dtypes_is_served_in_one() -> None:
    model = tiny("Nemotron", **SIZES).to(torch.bfloat16)
    model.lm_head.float()
    with slipstream.init_inference(model, dtype="bf16", device="cpu", max_context=32) as engine:
        assert len(engine.generate([3, 1, 4], max_new_tokens=4).token_ids) == 4


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", STACKS)
def test_stacked_experts_are_quantized(name: str, kind: str, float_inputs: None) -> None:
    """An expert's matrices are those of its rows; a model with the rounded weights computes the same."""
    model = tiny(name, **STACKS[name])
    twin, packed = copy.deepcopy(model), quantize_model(copy.deepcopy(model), kind, torch.float32)
    plain = {path: module for path, module in twin.named_modules() if hasattr(module, "is_transposed")}
    stacks = {path: module for path, module in packed.named_modules() if isinstance(module, PackedExperts)}
    assert stacks and stacks.keys() == {f"{path}" for path in plain}
    with torch.no_grad():
        for path, module in packed.named_modules():
            if isinstance(module, PackedLinear) and ".experts." not in path:
                twin.get_submodule(path).weight.copy_(module.weight)
        for path, stack in stacks.items():
            assert not any(parameter.numel() for name, parameter in stack.named_parameters() if "bias" not in name)
            for part, weights in ((stack.first, plain[path].gate_up_proj), (stack.down, plain[path].down_proj)):
                for expert, weight in zip(part, weights, strict=True):
                    assert expert.matrix.bits == int(kind[3:])
                    weight.copy_(expert.weight.T if plain[path].is_transposed else expert.weight)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(packed(ids).logits, twin(ids).logits, rtol=1e-3, atol=1e-3)
    with slipstream.init_inference(model, dtype=kind, device="cpu", max_context=32) as engine:
        assert len(engine.generate([3, 1, 4, 1, 5], max_new_tokens=4, ignore_eos=True).token_ids) == 4


def test_a_live_model_with_layers_of_the_callers_own_is_served() -> None:
    """PR-MoE: slipstream.moe.MoE and DeepSpeed's layer with a residual branch, in place of a Llama's MLPs."""

    class Mixture(torch.nn.Module):
        def __init__(self, moe: torch.nn.Module) -> None:
            super().__init__()
            self.moe = moe

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.moe(x)[0]
            return out

    model = tiny("Llama", **SIZES).eval()
    width = model.config.hidden_size
    mlp = torch.nn.Sequential(torch.nn.Linear(width, 16), torch.nn.GELU(), torch.nn.Linear(16, width))
    model.model.layers[0].mlp = Mixture(MoE(width, None, 4, k=1, expert_size=16, residual=torch.nn.Linear(width, width)))
    model.model.layers[1].mlp = Mixture(DeepSpeedMoE(width, mlp, 2, k=1, use_residual=True, eval_capacity_factor=4.0))
    model.eval()
    ids = [3, 1, 4, 1, 5]
    with slipstream.init_inference(model, dtype="fp32", device="cpu", max_context=32, moe={"type": "residual"}) as engine:
        assert "transformers' forward" in engine.description
        found = engine.generate(ids, max_new_tokens=6, temperature=0.0, ignore_eos=True).token_ids
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert list(found) == ids[5:]
    with pytest.raises(ValueError, match="need the native kernels: the LlamaForCausalLM has modules of its own"):
        slipstream.init_inference(model, device="cpu", expert_cache_bytes="1M")
    with pytest.raises(ValueError, match="the kinds are standard and residual"):
        slipstream.init_inference(model, device="cpu", moe={"type": "other"})


def test_what_is_not_quantized() -> None:
    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = torch.nn.Parameter(torch.ones(9, 96, 96))

    odd = tiny("Llama", **SIZES)
    odd.model.layers[0].mlp.more = Stack()
    with pytest.raises(UnsupportedModel, match=r"int8 would leave .* of LlamaForCausalLM .*mlp.more.stack: \[9, "):
        quantize_model(odd, "int8")
    model = tiny("OPT", **CASES["opt"][1])
    model.config.num_local_experts = 96  # as many as fc1 has outputs, which makes it a router

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    first = model.model.decoder.layers[0]
    first.fc2.__class__ = Doubled
    quantized = {name for name, module in quantize_model(model, "int8").named_modules() if isinstance(module, PackedLinear)}
    assert {name.rpartition(".")[2] for name in quantized} == {"q_proj", "k_proj", "v_proj", "out_proj", "fc2", "lm_head"}
    assert type(first.fc2) is Doubled  # its own code computes it


def test_weights_that_are_not_finite_are_not_quantized() -> None:
    model = tiny("GPT2", **GPT2, scale_attn_by_inverse_layer_idx=True)
    model.transformer.h[1].attn.c_proj.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"layer 'transformer\.h\.1\.attn\.c_proj' has non-finite weights; .*dtype \"auto\""):
        slipstream.init_inference(model, dtype="int8", device="cpu", max_context=32)
    slipstream.init_inference(model, dtype="auto", device="cpu", max_context=32).close()


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_live_model_stays_as_it_is(dtype: str) -> None:
    model = tiny("GPT2", **GPT2)
    before = {name: (tensor.dtype, tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    with slipstream.init_inference(model, dtype=dtype, device="cpu") as engine:
        assert len(engine.generate([[1, 2, 3]], max_new_tokens=2)[0].token_ids) == 2
    assert before == {name: (tensor.dtype, tensor.data_ptr()) for name, tensor in model.state_dict().items()}
