"""A model whose products several processes cut: the bits of one process, its memory divided."""

import copy
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import slipstream
from slipstream.compat import inference as compat_inference
from slipstream.compat import mii
from slipstream.compat.inference import init_inference as compat_init_inference
from slipstream.compat.ragged import InferenceEngineV2, RaggedInferenceEngineConfig, SchedulingError
from slipstream.inference import ranks
from slipstream.inference.config import ModelPart
from slipstream.inference.load import load
from slipstream.inference.native import NativeDecoder
from slipstream.inference.weights import leaves
from slipstream.ops import build
from slipstream.quantized import PackedLinear
from slipstream.world.peers import meet
from tests import tiny_chat
from tests.dist.test_serving_experts import answers
from tests.inference import test_embedding, test_families, test_long_rope
from tests.inference.twins import SIZES, tiny
from tests.pool import distributed, single_threaded

pytestmark = pytest.mark.skipif(build.load().kernels is None, reason="no native kernels")

_OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "max_context": 64, "token_budget": 64, "max_running": 8}
_GPT = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": SIZES,  # biases of queries, keys and values
    "Gemma2": {**SIZES, "head_dim": 16},  # norms of outputs, soft caps
    "GPT2": _GPT,  # transposed, learnt positions, tied
    "GPTJ": {**_GPT, "rotary_dim": 8},  # parallel, one norm; a bias of the head
    "GPTNeoX": SIZES,  # parallel, grouped queries, keys and values
    "Bloom": {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4},  # ALiBi
    "Falcon": {**SIZES, "alibi": False, "multi_query": True},  # one key and value, which all processes have
    "Phi3": SIZES,  # one matrix of queries, keys and values
    "Olmo2": SIZES,  # a norm over all heads
    "Qwen2Moe": {
        **SIZES,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
    },
}


def cache_nbytes(runner: NativeDecoder) -> int:
    return runner.keys.nbytes + runner.values.nbytes


def check(
    family: str, dtype: str, sizes: dict[str, Any] | None = None, *, moe: dict[str, int] | None = None, **options: Any
) -> None:
    """`family`: of `tiny`, or without sizes a case of test_families."""
    model, size = test_families.model_of(family) if sizes is None else tiny(family, **sizes), dist.get_world_size()
    options = {**_OPTIONS, **options}
    with slipstream.init_inference(model, dtype=dtype, **options) as whole:
        expected = answers(whole)
    with slipstream.init_inference(model, dtype=dtype, tensor_parallel={"tp_size": size}, moe=moe, **options) as engine:
        if engine.leads:
            assert answers(engine) == expected, (family, dtype)
            assert answers(engine) == expected, (family, dtype)


@distributed(world_size=2)
def test_two_processes_have_the_bits_of_one() -> None:
    for family, dtype in {"Llama": "int4", "Gemma2": "fp32", "GPTNeoX": "int8", "Qwen2Moe": "bf16", "Olmo2": "int8"}.items():
        check(family, dtype, _FAMILIES.get(family, SIZES))
    check("Llama", "int4", {**SIZES, "intermediate_size": 128})  # whole groups of codes: each process quantizes its own
    check("GPTJ", "int8", _FAMILIES["GPTJ"])
    for case, dtype in {"opt-350m": "int8", "stablelm-norms": "bf16", "cohere-norms": "fp32", "phi-norms": "int4"}.items():
        check(case, dtype)
    check("Phi3", "int8", SIZES | {"original_max_position_embeddings": 16, "rope_parameters": test_long_rope.ROPE})


@distributed(world_size=2)
def test_models_outside_the_table() -> None:
    """Transformers' code computes shares, by the model's own plan or one that is found: the answers of one process."""
    for family, sizes in (("Nemotron", SIZES), ("GPTBigCode", {**_GPT, "multi_query": False})):
        model = tiny(family, **sizes)
        with slipstream.init_inference(model, dtype="fp32", **_OPTIONS) as whole:
            assert "transformers' forward" in whole.description
            expected = answers(whole)
        with slipstream.init_inference(model, dtype="fp32", tp_size=2, **_OPTIONS) as engine:
            assert "transformers' forward in 2 processes" in engine.description
            if engine.leads:
                for _ in range(2):
                    assert [tokens for tokens, _ in answers(engine)] == [tokens for tokens, _ in expected], family
            own = engine.engine.runner.own.model.base_model
            assert sum(one.numel() for one in own.parameters()) < 0.9 * sum(one.numel() for one in model.base_model.parameters())


@distributed(world_size=2)
def test_quantized_models_outside_the_table() -> None:
    """Each process quantizes its shares: the scores of a prompt are those of one process, but for the scales."""

    def scores(engine: Any) -> Tensor:
        entries = engine.generate(list(range(1, 30)), max_new_tokens=1, prompt_logprobs=0).prompt_logprobs[1:]
        return torch.tensor([entry.logprob for entry in entries])

    def nbytes(engine: Any) -> int:
        runner = engine.engine.runner
        layers = [module for module in getattr(runner, "own", runner).model.modules() if isinstance(module, PackedLinear)]
        assert {layer.matrix.bits for layer in layers} <= {8, bits}
        return sum(part.nbytes for layer in layers for part in layer.matrix.buffers())

    mixture = {"num_local_experts": 4, "num_experts_per_tok": 2}
    for family, sizes, bits in (
        ("Nemotron", SIZES, 8),
        ("Phimoe", SIZES | mixture, 8),
        ("GPTBigCode", {**_GPT, "multi_query": False}, 4),
    ):
        model = tiny(family, **sizes)
        with torch.no_grad():
            floats = model(torch.arange(1, 30)[None]).logits[0].log_softmax(-1)[torch.arange(28), torch.arange(2, 30)]
        with slipstream.init_inference(model, dtype=f"int{bits}", **_OPTIONS) as whole:
            expected, all_nbytes = scores(whole), nbytes(whole)
        with slipstream.init_inference(model, dtype=f"int{bits}", tp_size=2, **_OPTIONS) as engine:
            assert nbytes(engine) < 0.8 * all_nbytes, family
            if engine.leads:
                assert (scores(engine) - floats).norm() < 1.5 * (expected - floats).norm(), family


@distributed(world_size=2)
def test_latents() -> None:
    """Heads are cut, and each process has all latents."""
    check("deepseek-v2", "int8")
    check("deepseek-v3", "fp32")
    check("DeepseekV3", "bf16", test_families.CASES["deepseek-v3"][1] | {"v_head_dim": 32}, moe={"ep_size": 2})  # whole groups


def check_vectors(case: str, dtype: str, **options: Any) -> None:
    model, size = test_embedding.model_of(case), dist.get_world_size()
    texts = test_embedding.TEXTS
    with slipstream.init_inference(model, dtype=dtype, device="cpu", threads=1, **options) as whole:
        expected = whole.embed(texts)
    with slipstream.init_inference(model, dtype=dtype, device="cpu", threads=1, mp_size=size, **options) as engine:
        if not engine.leads:
            with pytest.raises(RuntimeError, match=r"computes for rank 0, which answers: .*engine\.leads"):
                engine.embed(texts)
            return
        assert engine.embed(texts).equal(expected), (case, dtype)
        assert engine.embed(texts[2]).equal(expected[2]), (case, dtype)
        types = [[int(i > 2) for i in range(len(text))] for text in texts]
        if case == "bert":
            runner: Any = engine.engine.runner
            assert not runner.hidden(texts, types).equal(runner.hidden(texts))
            assert runner.hidden(texts[:2], types).equal(runner.hidden(texts, types)[: len(texts[0]) + len(texts[1])])


@distributed(world_size=2)
def test_vectors_of_two_processes_have_the_bits_of_one() -> None:
    for case, dtype in {"bert": "fp32", "modernbert": "int8", "distilbert": "bf16", "electra-small": "int8"}.items():
        check_vectors(case, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "meet", lambda axis: [peer._replace(host=str(peer.rank)) for peer in meet(axis)])
        check_vectors("bert", "int8")
        check("deepseek-v3", "int8")
        check("opt-350m", "fp32")


@pytest.mark.slow
@distributed(world_size=4)
def test_four_processes_of_encoders_and_latents() -> None:
    for case in test_embedding.CASES:
        check_vectors(case, "fp32")
        check_vectors(case, "int8")
    for case in ("deepseek-v2", "deepseek-v2-groups", "deepseek-v3", "deepseek-v3-yarn"):
        check(case, "fp32", moe={"ep_size": 2, "tp_size": 2})
        check(case, "int4", moe={"ep_size": 4})


@distributed(world_size=2)
def test_more_processes_than_cores() -> None:
    """Processes that wait for each other sleep at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks.os, "sched_getaffinity", lambda pid: {0})
        check("Llama", "int8", SIZES)


@distributed(world_size=2)
def test_idle_processes_sleep() -> None:
    with slipstream.init_inference(tiny("Llama", **SIZES), tp_size=2, **_OPTIONS) as engine:
        if engine.leads:
            answers(engine)
        dist.barrier()
        time.sleep(0.1)
        used = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - used < 0.1
        dist.barrier()


@pytest.mark.slow
@distributed(world_size=2)
def test_every_kind_has_the_bits_of_one_process() -> None:
    for dtype in ("fp32", "bf16", "int8"):
        check("Llama", dtype, SIZES)
    for family, sizes in _FAMILIES.items():
        check(family, "int8" if family == "Qwen2" else "fp32", sizes)
    threads = torch.get_num_threads()
    check("GPTNeoX", "bf16", SIZES, threads=2)
    torch.set_num_threads(threads)
    check("Llama", "fp32", {**SIZES, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3})  # 1 and 2 of 3
    check("Qwen2Moe", "bf16", _FAMILIES["Qwen2Moe"], moe={"ep_size": 2})  # whole experts


@pytest.mark.slow
@distributed(world_size=4)
def test_more_processes_than_keys_and_values() -> None:
    check("Llama", "int4", SIZES)
    check("Olmo2", "bf16", SIZES)
    check("Qwen2Moe", "fp32", _FAMILIES["Qwen2Moe"], moe={"ep_size": 2, "tp_size": 2})


@distributed(world_size=2)
def test_between_hosts() -> None:
    """Without shared memory: the other ranks' columns arrive by gloo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "meet", lambda axis: [peer._replace(host=str(peer.rank)) for peer in meet(axis)])
        check("Llama", "int8", SIZES)
        check("GPTNeoX", "fp32", SIZES)
        check("Gemma2", "fp32", _FAMILIES["Gemma2"])
        check("Olmo2", "fp32", SIZES)
        check("Qwen2Moe", "bf16", _FAMILIES["Qwen2Moe"])


@distributed(world_size=2)
def test_the_cache_is_divided() -> None:
    options: dict[str, Any] = {**_OPTIONS, "kv_cache_bytes": "1M", "max_running": 64}
    with slipstream.init_inference(tiny("Llama", **SIZES), **options) as whole:
        blocks, nbytes = whole.engine.runner.num_blocks, cache_nbytes(whole.engine.runner)
    with slipstream.init_inference(tiny("Llama", **SIZES), mp_size=2, **options) as engine:
        runner: Any = engine.engine.runner
        num = min(2 * blocks, 256)
        assert (runner.num_blocks, cache_nbytes(runner.own)) == (num, nbytes * num // (2 * blocks))


@pytest.mark.parametrize("family", ["Llama", "tied Llama", "GPT2", "Bert", "DeepseekV3"])
def test_parts_are_the_whole_and_divide_its_memory(family: str, tmp_path: Path) -> None:
    gpt = {"vocab_size": 2048, "n_embd": 256, "n_layer": 2, "n_head": 8, "n_positions": 32}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    llama = {**SIZES, "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 640, **heads}
    if family == "Bert":
        model = transformers.BertModel(transformers.BertConfig(**llama))
    elif family == "DeepseekV3":
        latent = {"q_lora_rank": None, "kv_lora_rank": 24, "num_key_value_heads": 8, "moe_intermediate_size": 64}
        model = tiny(family, **{**llama, **test_families.CASES["deepseek-v3"][1], **llama, **latent})
    else:
        model = tiny(family.split()[-1], **(gpt if family == "GPT2" else llama), tie_word_embeddings=family != "Llama")
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    whole = dict(leaves(load(tmp_path).weights))
    nbytes = sum(one.nbytes for one in whole.values())
    for size, share in ((2, 0.55), (4, 0.30)):
        parts = [dict(leaves(load(tmp_path, part=ModelPart(index=i, tp_size=size)).weights)) for i in range(size)]
        for role, weight in whole.items():
            pieces: Any = [part[role] for part in parts]
            cut = pieces[0].shape != weight.shape
            assert torch.equal(torch.cat(pieces) if cut else pieces[-1], weight), role
            assert cut or role.split(".")[-1] not in ("q", "k", "v", "out", "gate", "up", "down", "embed"), role
        for part in parts:
            assert sum(one.nbytes for one in part.values()) <= share * nbytes
        kinds = [load(tmp_path, dtype="int4", part=ModelPart(index=i, tp_size=size)).weights.layers[0].out for i in range(size)]
        own: Any = load(tmp_path, dtype="int4").weights.layers[0].out
        assert all(torch.equal(torch.cat([kind[i] for kind in kinds]), own[i]) for i in range(3))


def test_heads_of_processes() -> None:
    def heads(size: int, num: int, kv: int) -> list[tuple[int, int, int, int]]:
        parts = [ModelPart(index=i, tp_size=size).heads(num, kv) for i in range(size)]
        return [(q.start, q.stop, k.start, k.stop) for q, k in parts]

    assert heads(2, 9, 3) == [(0, 3, 0, 1), (3, 9, 1, 3)]
    assert heads(4, 8, 2) == [(0, 2, 0, 1), (2, 4, 0, 1), (4, 6, 1, 2), (6, 8, 1, 2)]
    assert heads(1, 7, 7) == [(0, 7, 0, 7)]
    with pytest.raises(ValueError, match=r"tp_size is 5.*9 heads with 3 keys and values; it can be 2, 3, 9$"):
        heads(5, 9, 3)


@distributed(world_size=2)
def test_a_module_of_deepspeeds_engine() -> None:
    """All ranks call it with the same inputs, as in DeepSpeed: outputs and answers are the module's."""
    for family, sizes in (("Llama", SIZES), ("GPT2", _GPT)):
        model, ids = tiny(family, **sizes), torch.arange(1, 9)[None]
        numel = sum(one.numel() for one in model.parameters())
        with torch.no_grad():
            expected = model(ids).logits, model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        engine = compat_init_inference(model, tensor_parallel={"tp_size": 2})
        torch.testing.assert_close(engine(ids).logits, expected[0], rtol=1e-5, atol=1e-5)
        assert engine.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0).equal(expected[1])
        assert sum(one.numel() for one in engine.module.parameters()) < 0.8 * numel
    for case in ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "modernbert"):
        family, sizes = test_embedding.CASES[case]
        config = getattr(transformers, f"{family}Config")(**sizes)
        masked, ids = getattr(transformers, f"{family}ForMaskedLM")(config).eval(), torch.arange(1, 9)[None]
        with torch.no_grad():
            logits = masked(ids).logits
        whole = sum(one.numel() for one in masked.base_model.parameters())
        engine = compat_init_inference(masked, mp_size=2)
        torch.testing.assert_close(engine(ids).logits, logits, rtol=1e-6, atol=1e-6)
        assert sum(one.numel() for one in engine.module.base_model.parameters()) < 0.8 * whole, case
    model, ids = tiny("GPT2", **_GPT), torch.arange(1, 9)[None]
    whole = compat_init_inference(copy.deepcopy(model), dtype=torch.int8)(ids).logits
    engine = compat_init_inference(model, dtype=torch.int8, mp_size=2, replace_with_kernel_inject=True)
    assert torch.cosine_similarity(engine(ids).logits.float(), whole.float(), dim=-1).min() > 0.9995
    assert model.transformer.h[0].mlp.c_fc.packed.matrix.bits == 8 and model.transformer.h[0].mlp.c_fc.weight is None
    assert engine.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 11)
    with pytest.raises(ValueError, match=r"tensor_parallel is 4, and 2 ranks run this: .*--nproc 4"):
        compat_init_inference(tiny("Llama", **SIZES), mp_size=4)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            each.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)
        )
        return self.proj(nn.functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2))


class _Block(nn.Module):
    """Layers by names of its own."""

    def __init__(self, width: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.mix, self.norms = _Attention(width, heads), nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.wide, self.gate, self.back = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.mix(self.norms[0](x))
        y = self.norms[1](x)
        inside = self.wide(y)
        return x + self.back(inside * self.gate(y).sigmoid()), inside


class _Network(nn.Module):
    """leaks: it computes from what is inside of a block, too."""

    def __init__(self, leaks: bool = False) -> None:
        super().__init__()
        self.leaks, self.read = leaks, nn.Linear(5, 48)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        x, extra = self.read(x) * times, x.new_zeros(())
        for block in self.blocks:
            x, inside = block(x)
            extra = extra + inside.sum()
        return x + extra if self.leaks else x


class _Hidden(nn.Module):
    """Two blocks that add to their input in place, and tell the number of heads by a name of their own."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = 4
            self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            x += self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x += self.down(self.up(x).relu())
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(self.Block(), self.Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x + 0)


class _Copied:
    """A block's argument that counts its copies."""

    alive: ClassVar["weakref.WeakSet[_Copied]"] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Copied":
        self.alive.add(copied := _Copied())
        return copied


class _Deep(nn.Module):
    class Block(_Block):
        def forward(self, x: Tensor, given: _Copied) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.most = nn.ModuleList(self.Block() for _ in range(6)), 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, _Copied())
            self.most = max(self.most, len(_Copied.alive))
        return x


@distributed(world_size=2)
def test_a_trial_keeps_the_inputs_of_one_block() -> None:
    """And its forwards are not among those that the engine times."""
    network, x = _Deep().eval(), torch.randn(2, 7, 48)
    with torch.no_grad():
        expected = network(x)
    engine = compat_init_inference(network, mp_size=2)
    engine.profile_model_time()
    torch.testing.assert_close(engine(x), expected, rtol=1e-4, atol=1e-4)
    assert len(engine.model_times()) == 1
    assert network.most == 1
    assert network.blocks[5].mix.num_heads == 2 - dist.get_rank()
    time_first = nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64) for _ in range(2))).eval()
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat_inference.logger, "warning", lambda text, *values: told.append(text % values))
        compat_init_inference(time_first, mp_size=2)(torch.randn(6, 1, 32))
    assert len(told) == 1 and "one token, as in [6, 1, 32] if sequences come first; if time does, show it two sequences" in told[0]


@distributed(world_size=2)
def test_a_module_without_a_plan() -> None:
    """A plan is found in a forward: at once for a model that tells its inputs, else in the first call. Three heads on two ranks."""
    torch.manual_seed(0)
    x = torch.randn(2, 7, 5)
    for policy in (None, {_Block: ("mix.proj", "back")}):
        network = _Network().eval()
        expected, numel = network(x, times=2), sum(one.numel() for one in network.parameters())
        engine = compat_init_inference(network, mp_size=2, injection_policy=policy)
        for _ in range(2):
            torch.testing.assert_close(engine(x, times=2), expected, rtol=1e-5, atol=1e-5)
        assert engine.module.blocks[1].mix.num_heads == 2 - dist.get_rank()
        assert sum(one.numel() for one in network.parameters()) < 0.72 * numel

    gpt = {"n_embd": 48, "n_head": 3, "n_layer": 2, "rotary_dim": 8, "n_positions": 64, "vocab_size": 99}
    falcon = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 99}
    for family, sizes, cut in (
        ("GPTJ", gpt, ["h.0.attn.q_proj", "h.1.mlp.fc_out"]),
        ("CodeGen", gpt | {"n_head": 4, "n_ctx": 64}, ["h.1.mlp.fc_out"]),  # fused for four devices: no share has whole heads
        ("Falcon", falcon | {"new_decoder_architecture": True}, ["h.1.self_attention.query_key_value"]),
    ):
        model, ids = tiny(family, **sizes), torch.arange(1, 9)[None]
        shapes = {name: one.shape for name, one in model.transformer.named_parameters()}
        with torch.no_grad():
            expected = model(ids).logits
        engine = compat_init_inference(model, mp_size=2)
        torch.testing.assert_close(engine(ids).logits, expected, rtol=1e-5, atol=1e-5)
        now = {name for name, one in model.transformer.named_parameters() if one.shape != shapes[name]}
        assert {f"{name}.weight" for name in cut} <= now
        assert any("attn.qkv_proj" in name for name in shapes.keys() - now) == (family == "CodeGen")

    with pytest.raises(ValueError, match="injection_policy: _Block: the input of wide depends on no other linear layer"):
        compat_init_inference(_Network(), mp_size=2, injection_policy={_Block: ("mix.proj", "wide")})(x)
    one = _Network()
    one.blocks[0].mix.num_heads, one.blocks[0].mix.head_dim = 1, 48
    with pytest.raises(ValueError, match=r"injection_policy: _Block cannot be cut between mix.qkv and mix.proj over 2 ranks"):
        compat_init_inference(one, mp_size=2, injection_policy={_Block: ("mix.proj",)})(x)
    for layer in (_Hidden(), nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2)))):
        engine = compat_init_inference(layer.eval(), mp_size=2)
        one, same, more = torch.randn(2, 1, 32), torch.ones(2, 7, 32), torch.randn(3, 9, 32)
        twin = copy.deepcopy(layer)
        with torch.no_grad():
            wanted = [twin(each.clone()) for each in (one, same, more)]
        whole = sum(each.numel() for each in layer.parameters())
        torch.testing.assert_close(engine(one), wanted[0], rtol=1e-5, atol=1e-5)
        assert whole == sum(each.numel() for each in layer.parameters())
        torch.testing.assert_close(engine(same.clone()), wanted[1], rtol=1e-5, atol=1e-5)
        assert whole > sum(each.numel() for each in layer.parameters())
        torch.testing.assert_close(engine(more), wanted[2], rtol=1e-5, atol=1e-5)
    first = nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64) for _ in range(2))).eval()  # time first, two sequences
    wanted = [copy.deepcopy(first)(made := torch.randn(6, 2, 32, requires_grad=True) * 2)]
    engine, whole = compat_init_inference(first, mp_size=2), sum(each.numel() for each in first.parameters())
    torch.testing.assert_close(engine(made), wanted[0], rtol=1e-5, atol=1e-5)
    assert whole > sum(each.numel() for each in first.parameters())
    xlnet = {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}
    model = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**xlnet)).eval()
    whole = sum(each.numel() for each in model.parameters())
    compat_init_inference(model, mp_size=2)
    assert whole > sum(each.numel() for each in model.parameters())
    classifier = transformers.GPTJForSequenceClassification(transformers.GPTJConfig(**gpt)).eval()
    with torch.no_grad():
        expected = classifier(ids).logits
    torch.testing.assert_close(compat_init_inference(classifier, mp_size=2)(ids).logits, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"call engine\(...\) once on all ranks, with equal inputs, before engine.generate"):
        compat_init_inference(_Network(), mp_size=2).generate(x)

    with pytest.raises(ValueError, match=r"_Network that is cut by the plan .* does not give the outputs that it had"):
        (leaking := compat_init_inference(_Network(leaks=True), mp_size=2))(x)
    with pytest.raises(ValueError, match=r"does not give the outputs that it had .*: load it again"):
        leaking(x)
    with pytest.raises(ValueError, match="Sequential has no plan for tensor parallelism, and none was found"):
        compat_init_inference(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)), mp_size=2)(x)


@distributed(world_size=2)
def test_deepspeeds_other_engines(tmp_path: Path) -> None:
    """All ranks make the same calls: MII's pipeline answers on rank 0, unless asked, and the ragged engine on all, with the bits of
    one process; rank 0's errors are all ranks'."""
    folder = tmp_path / "model"
    transformers.utils.logging.disable_progress_bar()  # whose thread would stay
    if dist.get_rank() == 0:
        tiny_chat.write(folder)
    dist.barrier()
    settings, prompts = {"max_new_tokens": 6, "do_sample": False}, ["One river", "The first"]
    alone = mii.pipeline(str(folder), tensor_parallel=1, dtype="fp32")
    expected = alone(prompts, **settings)
    alone.destroy()
    for everywhere in (True, False):
        pipe = mii.pipeline(str(folder), tensor_parallel=2, all_rank_output=everywhere, dtype="fp32")
        assert pipe(prompts, **settings) == (expected if everywhere or dist.get_rank() == 0 else [])
        parts: list[mii.Response] = []
        pipe(prompts[0], streaming_fn=parts.extend, **settings)
        assert "".join(part.generated_text for part in parts) == (expected[0].generated_text if dist.get_rank() == 0 else "")
        with pytest.raises(mii.UnknownArgument, match="no option 'beams'"):
            pipe(prompts, beams=2)

        class Own(Exception):  # no other process can read it
            pass

        def fail(parts: list[mii.Response]) -> None:
            raise Own("no room")

        with pytest.raises(Own if dist.get_rank() == 0 else RuntimeError, match=r"no room"):
            pipe(prompts[0], streaming_fn=fail, **settings)
        pipe.destroy()

    def config(size: int) -> RaggedInferenceEngineConfig:
        memory = {"mode": "allocate", "size": 16}
        limits = {"memory_config": memory, "max_ragged_batch_size": 30, "max_ragged_sequence_count": 4}
        return RaggedInferenceEngineConfig(tp={"tp_size": size}, manager=limits)

    logits = []
    for size in (1, 2):
        engine = InferenceEngineV2(str(folder), config(size), dtype=torch.float32)
        first = engine.put([1, 2], [[5, 6, 7], list(range(3, 20))])
        logits.append(torch.cat([first, engine.put([2, 1], [[8], [9, 4]])]))
        with pytest.raises(SchedulingError, match="BatchTokenLimitExceeded"):
            engine.put([7, 8], [[1] * 16, [1] * 15], do_checks=size == 1)
        engine.flush(1)
        assert int(engine.free_blocks) == 14
        del engine
    assert logits[0].equal(logits[1])


@distributed(world_size=2)
def test_refusals(tmp_path: Path) -> None:
    def refused(text: str, source: Any = None, **options: Any) -> None:
        with pytest.raises(ValueError, match=text):
            slipstream.init_inference(source or tiny("Llama", **SIZES), **{**_OPTIONS, **options})

    refused(r"tp_size \(3\) need 3 processes, and 2 run this: start them by slipstream run --nproc 3", mp_size=3)
    refused(r"tp_size \(2\) != ep_size \(4\) x moe_tp_size \(1\): all processes cut the model", tp_size=2, ep_size=4)
    refused(
        "tp_size 2 do not split products of 16 features",
        source=tiny("Llama", **{**SIZES, "hidden_size": 16, "head_dim": 16}),
        tp_size=2,
    )
    refused("do not split a model without experts", tp_size=2, ep_size=2)
    foreign = tiny("GPTBigCode", vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)  # one key for all heads
    refused("GPTBigCodeForCausalLM has no plan for tensor parallelism, and none was found", source=foreign, tp_size=2)
    refused("the ranks differ", tp_size=2, dtype="int8" if dist.get_rank() else "bf16")
    refused("the ranks differ.*max_running 4.*max_running 5", tp_size=2, max_running=4 + dist.get_rank())


def test_keys_of_deepspeed() -> None:
    """Without processes: what asks for nothing is accepted, the rest is refused by name."""
    model = tiny("Llama", **SIZES)
    for options in ({"tp": {"enabled": False, "tp_size": 8}}, {"tensor_parallel": {"tp_size": 1}}, {"mp_size": 1}, {"tp": None}):
        slipstream.init_inference(model, **options, **_OPTIONS).close()
    for options, text in (
        ({"tensor_parallel": {"tp_size": 2}}, r"tp_size \(2\) need 2 processes, and 1 run this"),
        ({"mp_size": 2, "tp_size": 3}, "tp_size is given twice"),
        ({"tp": {"tp_size": 1, "mpu": object()}}, "mpu=.* is not served: the ranks are those of the job"),
    ):
        with pytest.raises(ValueError, match=text):
            slipstream.init_inference(model, **options, **_OPTIONS)
    with pytest.raises(TypeError, match="no option 'tp_sizes'; did you mean tp_size"):
        slipstream.init_inference(model, tp={"tp_sizes": 2})


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """`slipstream generate --tp 2`, and the end of a process that never opens the model."""
    folder, other = tiny_chat.write(tmp_path / "model"), tmp_path / "other"
    command = [sys.executable, "-m", "slipstream", "generate", str(folder), "One river", "--max-tokens", "8", "--dtype", "fp32"]
    environment = single_threaded(os.environ)

    def run(*more: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=120, env=environment | variables)

    alone, both = run(), run("--tp", "2")
    assert both.returncode == 0 and both.stdout == alone.stdout, both.stderr
    assert "in each of 2 processes" in both.stderr
    other.mkdir()
    (other / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1':\n    os._exit(3)\n")
    lost = run("--tp", "2", PYTHONPATH=os.pathsep.join([str(other), environment.get("PYTHONPATH", "")]))
    assert lost.returncode == 1 and "rank 1 ended with code 3 before the model was open" in lost.stderr, lost.stderr
