"""The native forward: against transformers as the torch decoder is, and the same bits in every batch."""

import errno
import os
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import slipstream
from slipstream.inference.config import NORMS
from slipstream.inference.core import Batch, Chunk, Request, SamplingParams
from slipstream.inference.decoder import Decoder, head_shapes
from slipstream.inference.kv_cache import KVCache
from slipstream.inference.models import from_hf, from_state
from slipstream.inference.native import NativeDecoder, why_not
from slipstream.inference.on_disk import ExpertStore
from slipstream.inference.weights import DecoderWeights, leaves, put, quantize
from slipstream.ops import build, cpu
from slipstream.ops.matrices import Int8, to_int4, to_int8, unpack
from tests.cases import every_other
from tests.inference.test_models import CASES, model_of
from tests.inference.twins import SIZES, VOCAB, check_against_generate, tiny

# Where there is a compiler and the build failed, these fail.
pytestmark = pytest.mark.skipif(
    build.load().kernels is None and "not built" not in build.load().reason, reason=f"no native kernels: {build.load().reason}"
)


def native_of(model: Any, **options: Any) -> NativeDecoder:
    config = from_hf(model.config.to_dict())
    options = {"num_blocks": 64, "cache_dtype": torch.float32, "threads": 2} | options
    return NativeDecoder(config, from_state(config, model.state_dict()), **options)


@pytest.mark.parametrize("case", CASES)
def test_greedy_as_transformers(case: str) -> None:
    model = model_of(case)
    runner = native_of(model)
    check_against_generate(model, runner)
    runner.close()


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512vnni", "avx512bf16"])
def test_every_instruction_set(isa: str) -> None:
    used = cpu.isa()
    if not cpu.use_isa(isa):
        pytest.skip(f"this processor lacks {isa}")
    try:
        model = model_of("gemma2")
        runner = native_of(model, threads=1)
        check_against_generate(model, runner)
        runner.close()
    finally:
        assert cpu.use_isa(used)


def in_groups(w: torch.Tensor) -> Int8:
    """A scale per 32 inputs, in fp16, as blocks of Q8_0."""
    groups = w.float().unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1) / 127).half().float()
    return Int8((groups / scale[..., None]).round().clamp(-128, 127).to(torch.int8).flatten(1), scale)


def weights_of(kind: str, family: str = "Llama", group: int = 32, **more: Any) -> tuple[Any, DecoderWeights]:
    """A model whose shapes are no multiples of a tile: 3 heads for each key-value head, 96 features, odd vocabulary, and an
    odd number of inner features where no group has to divide it. What `group` does not divide is int8."""
    sizes = {**SIZES, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 113}
    inner = 160 if kind in ("int8", "int4", "q4_0", "q8_0") else 161
    model = tiny(family, **sizes | {"intermediate_size": inner, "max_position_embeddings": 256} | more)
    config = from_hf(model.config.to_dict())
    dtype = {"float32": torch.float32, "float16": torch.float16}.get(kind, torch.bfloat16)
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    weights = from_state(config, state)
    if kind in ("int8", "int4", "q4_0"):
        weights = quantize(weights, kind if kind == "int8" else "int4", group)
    if kind == "q8_0":
        for role, m in list(leaves(weights)):
            if role.rpartition(".")[2] in ("q", "k", "v", "out", "gate", "up", "down", "head") and m.shape[1] % 32 == 0:  # type: ignore[union-attr]
                put(weights, role, in_groups(m))  # type: ignore[arg-type]
    if kind == "q4_0":  # as in GGUF files: no offsets of their own, which are not stored then
        matrices = [(layer, name) for layer in weights.layers for name in ("q", "k", "v", "out")]
        matrices += [(layer.mlp, name) for layer in weights.layers for name in ("gate", "up", "down")]
        for part, name in matrices:
            matrix = getattr(part, name)
            setattr(part, name, matrix._replace(low=matrix.scale * -8))
    return config, weights


@pytest.mark.parametrize("columns, features, parts", [(16, 32, 1), (70, 96, 1), (24, 160, 2)])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_panels(kind: str, columns: int, features: int, parts: int) -> None:
    """Packing in C against torch's own words for it (csrc/decoder.h says the layouts)."""
    runner = native_of(model_of("llama"))
    weights = [torch.randn(columns, features) for _ in range(parts)]
    quantized = {"int8": to_int8, "int4": to_int4}.get(kind, lambda w: w.to(getattr(torch, kind, None)))
    matrices = [quantized(w) for w in weights]

    def words(m: Any) -> torch.Tensor:
        """[columns, words, bytes]"""
        if kind == "int4":
            eights = unpack(m.q).view(columns, -1, 2, 4)
            return eights[:, :, 0] | (eights[:, :, 1] << 4)
        return (m.q if kind == "int8" else m).view(torch.uint8).view(columns, -1, 2 if kind == "float16" else 4)

    padded = [torch.nn.functional.pad(words(m), (0, 0, 0, 0, 0, -columns % (32 if parts == 1 else 16))) for m in matrices]
    panels = torch.stack([rows.unflatten(0, (-1, 16)).transpose(1, 2) for rows in padded], 1)
    before = len(runner._tensors)
    record = runner._packed({str(part): (matrix, None) for part, matrix in enumerate(matrices)})
    assert (record.num_columns, record.num_features) == (columns * parts, features)
    assert torch.equal(runner._tensors[before], panels.flatten())
    runner.close()


class Requests:
    """Hands out blocks in random order and runs chunks, one row of logits per token that is asked for."""

    def __init__(self, runner: Any, seed: int) -> None:
        self.runner, self.rng = runner, random.Random(seed)
        self.free = self.rng.sample(range(runner.num_blocks), runner.num_blocks)

    def request(self, tokens: list[int], blocks: list[int] | None = None) -> Request:
        request = Request(id="", tokens=list(tokens), params=SamplingParams())
        request.blocks = list(blocks or ())
        while len(request.blocks) * self.runner.block_size < len(tokens):
            request.blocks.append(self.free.pop())
        return request

    def run(self, chunks: list[tuple[Request, int, int]]) -> list[torch.Tensor]:
        """The last logits of each chunk: its tokens are cut there, so that it samples."""
        tokens_of = [request.tokens for request, _, _ in chunks]
        for request, _, stop in chunks:
            request.tokens = request.tokens[:stop]
        out: Any = self.runner.forward(Batch(tuple(Chunk(*chunk) for chunk in chunks), ()))
        for (request, _, _), tokens in zip(chunks, tokens_of, strict=True):
            request.tokens = tokens
        return list(torch.as_tensor(out).clone())  # the next forward writes over it


def logits_of(isa: str, config: Any, weights: Any, cache: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Of prompts together, one token alone, and a batch of single tokens, so that tiles of every height are there."""
    assert cpu.use_isa(isa) and cpu.isa() == isa
    runner = NativeDecoder(config, weights, num_blocks=64, cache_dtype=cache, threads=2)
    batch = Requests(runner, 0)
    prompts = [batch.request([(7 * i + length) % config.vocab_size for i in range(length)]) for length in (1, 2, 3, 5, 9, 40)]
    out = []
    for few in ([0], [1], [2], [3], [0, 3], [4], [0, 1, 2, 3, 4, 5]):
        out += batch.run([(prompts[i], 0, len(prompts[i].tokens)) for i in few])
    out += batch.run([(prompt, len(prompt.tokens) - 1, len(prompt.tokens)) for prompt in prompts])
    runner.close()
    return out


EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2Moe": EXPERTS,
    "Mistral": {"sliding_window": 24},
    "Olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "Gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
}


def check_against_avx2(isa: str, kind: str, family: str) -> None:
    """The same bits, but where bf16 is multiplied in pairs. There a cache of bf16 is left out with quantized matrices: as its own
    rounding does, that of pairs changes codes of activations, and the choice of experts; test_native_attention.py has bounds."""
    config, weights = weights_of(kind, family, **(EXPERTS if family == "Qwen2Moe" else {}))
    for cache in (torch.float32, torch.bfloat16)[: 1 if isa == "avx512bf16" and kind.startswith("int") else 2]:
        actual, expected = (logits_of(one, config, weights, cache) for one in (isa, "avx2"))
        if isa == "avx512bf16" and "bfloat16" in (kind, str(cache).removeprefix("torch.")):
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True)]
            assert 0 < max(errors) < 0.02, errors
        else:
            assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))


WIDER = ("avx512", "avx512vnni", "avx512bf16")
KINDS = ("float32", "float16", "bfloat16", "int8", "int4")


@pytest.mark.parametrize(("isa", "kind", "family"), every_other(WIDER, KINDS, ("Llama", "Qwen2Moe")))
def test_wider_registers_change_no_bits(isa: str, kind: str, family: str) -> None:
    """On a machine that has them; test_native_avx512.py is for the others."""
    used = cpu.isa()
    if not cpu.use_isa(isa):
        pytest.skip(f"this processor lacks {isa}")
    try:
        check_against_avx2(isa, kind, family)
    finally:
        assert cpu.use_isa(used)


CACHES = (
    ("float32", torch.float32),
    ("bfloat16", torch.bfloat16),
    ("float16", torch.bfloat16),
    ("int8", torch.bfloat16),
    ("int4", torch.float32),
    ("q8_0", torch.bfloat16),
)


@pytest.mark.parametrize(("kind", "cache", "family"), [(*cache, family) for cache, family in every_other(CACHES, tuple(FAMILIES))])
def test_the_same_bits_in_every_batch(kind: str, cache: torch.dtype, family: str) -> None:
    """Alone, in a batch of 16, with random splits of the prompt, from cached prefixes, on 1 and 3 threads."""
    config, weights = weights_of(kind, family, **FAMILIES[family])
    rng = random.Random(kind)
    prompts = [[rng.randrange(config.vocab_size) for _ in range(rng.randint(1, 70))] for _ in range(15)]
    prompts.append([rng.randrange(config.vocab_size) for _ in range(150)])
    alone, together = (NativeDecoder(config, weights, num_blocks=96, cache_dtype=cache, threads=n) for n in (1, 3))
    expected = []
    for prompt in prompts:
        fresh = Requests(alone, 0)
        expected.append(fresh.run([(fresh.request(prompt), 0, len(prompt))])[0])
    many = Requests(together, 1)
    requests = [many.request(prompt) for prompt in prompts]
    done = [0] * len(requests)
    while any(done[i] < len(prompt) for i, prompt in enumerate(prompts)):
        chosen = [i for i, prompt in enumerate(prompts) if done[i] < len(prompt) and rng.random() < 0.7]
        chunks = [(requests[i], done[i], rng.randint(done[i] + 1, len(prompts[i]))) for i in chosen]
        for i, chunk, logits in zip(chosen, chunks, many.run(chunks) if chunks else [], strict=True):
            done[i] = chunk[2]
            if done[i] == len(prompts[i]):
                assert logits.equal(expected[i]), f"request {i} of {len(prompts[i])} tokens"
    again = many.run([(request, len(request.tokens) - 1, len(request.tokens)) for request in requests])  # a batch of 16
    assert all(logits.equal(reference) for logits, reference in zip(again, expected, strict=True))
    shared = many.request(prompts[-1], requests[-1].blocks[:8])  # its first 128 positions are another request's
    assert many.run([(shared, 128, 150)])[0].equal(expected[-1])
    alone.close()
    together.close()


LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "two key-value heads": ("Llama", {}),
    "one": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),  # two tiles of queries for each row
    "window": ("Mistral", {"sliding_window": 300}),
    "windows of some layers": ("Gemma2", {"sliding_window": 300, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24}),
}


@pytest.mark.parametrize(("case", "isa"), every_other(tuple(LONG), ("portable", "avx2", "avx512", "avx512bf16")))
def test_ranges_of_a_long_context_change_no_bits(case: str, isa: str) -> None:
    """600 positions are three ranges, which one thread sums, or several do: as in plain torch, and the same bits in any chunks,
    beside other requests and on 1, 2 and 3 threads."""
    used, length = cpu.isa(), 600
    if not cpu.use_isa(isa):
        pytest.skip(f"this processor lacks {isa}")
    family, sizes = LONG[case]
    config, weights = weights_of("float32", family, max_position_embeddings=1024, **sizes)
    rng = random.Random(case)
    prompt = [rng.randrange(config.vocab_size) for _ in range(length)]
    cache = KVCache(head_shapes(config), num_blocks=38, block_size=16, dtype=torch.float32)
    plain = Requests(Decoder(config, weights, cache, torch.float32), 0)
    expected = []
    try:
        for threads in (1, 2, 3):
            runner = NativeDecoder(config, weights, num_blocks=80, cache_dtype=torch.float32, threads=threads)
            side = Requests(runner, threads)
            long, others = side.request(prompt), [side.request([token]) for token in range(30)]
            for start, stop in pairwise((0, 250, 511, 513, length - 1)):  # of 513: rows that see two and three ranges
                side.run([(long, start, stop)])
            expected += side.run([(long, length - 1, length)])
            expected += side.run([(long, length - 1, length), *((one, 0, 1) for one in others)])[:1]
            expected += side.run([(long, 0, length)])
            runner.close()
        torch.testing.assert_close(expected[0], plain.run([(plain.request(prompt), 0, length)])[0], rtol=1e-3, atol=1e-3)
        assert all(logits.equal(expected[0]) for logits in expected)
    finally:
        assert cpu.use_isa(used)


def test_a_broken_token_in_another_range_leaves_the_rows_before_it_whole() -> None:
    """Rows 255 and 256 are one tile, whose first does not see the range of the second."""
    config, weights = weights_of("float32", max_position_embeddings=512, num_attention_heads=2, num_key_value_heads=2)
    weights.embed = weights.embed.clone()
    weights.embed[5] = torch.nan
    prompt = [6 + i % 90 for i in range(256)]
    logits = []
    for token in (7, 5):
        runner = NativeDecoder(config, weights, num_blocks=20, cache_dtype=torch.float32, threads=2)
        side = Requests(runner, 0)
        one = side.request([*prompt, token])
        side.run([(one, 0, 255)])
        one.tokens = prompt
        logits.append(torch.as_tensor(runner.forward(Batch((Chunk(one, 255, 256, draft=(token,)),), ()))).clone())
        runner.close()
    assert logits[0].isfinite().all()
    assert logits[1][0].equal(logits[0][0]) and logits[1][1].isnan().all()


@pytest.mark.parametrize(
    ("kind", "group"),
    [("bfloat16", 32), ("float16", 32), ("int8", 32), ("int4", 32), ("int4", 64), ("int4", 128), ("q4_0", 32), ("q8_0", 32)],
)
def test_every_weight_type_as_the_torch_decoder(kind: str, group: int) -> None:
    """Token by token. Activations are rounded to 8 bits, or to bf16 by AVX-512's products: a tie changes all that follows."""
    wide = {"hidden_size": 3 * group, "intermediate_size": 5 * group} if group > 32 else {}
    config, weights = weights_of(kind, group=group, **wide)
    assert kind != "int4" or {m.q.shape[1] * 2 // m.scale.shape[1] for w in weights.layers for m in (w.q, w.mlp.down)} == {group}  # type: ignore[union-attr]
    native = NativeDecoder(config, weights, num_blocks=16, cache_dtype=torch.float32)
    cache = KVCache(head_shapes(config), num_blocks=16, block_size=16, dtype=torch.float32)
    actual, expected = Requests(native, 0), Requests(Decoder(config, weights, cache, torch.float32), 0)
    errors = []
    for token in range(24):
        pair = [side.run([(side.request([token]), 0, 1)])[0] for side in (actual, expected)]
        errors.append(float((pair[0] - pair[1]).abs().max()))
        actual.free, expected.free = list(range(16)), list(range(16))
    errors.sort()
    rounded = kind == "bfloat16" and cpu.isa() == "avx512bf16"
    assert errors[16] < (0.05 if rounded else 1e-4), errors
    assert errors[-1] < (0.1 if rounded else 1e-4 if kind.endswith("float16") else 0.3), errors
    native.close()


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(kind: str, value: float) -> None:
    """For the sampler to see: 8-bit codes of it would be ordinary numbers."""
    config, weights = weights_of(kind)
    weights.embed = weights.embed.clone()
    weights.embed[5, 3] = value
    runner = NativeDecoder(config, weights, num_blocks=4, threads=2)
    one = Requests(runner, 0)
    assert one.run([(one.request([5]), 0, 1)])[0].isnan().all()
    runner.close()


def test_more_experts_than_there_are_is_refused() -> None:
    config, weights = weights_of("bfloat16", "Qwen2Moe", **EXPERTS)
    layers = tuple(replace(layer, experts=layer.experts and replace(layer.experts, top_k=9)) for layer in config.layers)
    with pytest.raises(ValueError, match="9 experts per token of 5"):
        NativeDecoder(replace(config, layers=layers), weights, num_blocks=4)


def test_blocks_are_copied_before_the_forward() -> None:
    model = model_of("llama")
    runner = native_of(model)
    both = Requests(runner, 0)
    tokens = [i % VOCAB for i in range(20)]
    first = both.request(tokens)
    expected = both.run([(first, 0, 20)])[0]
    second = both.request(tokens, [first.blocks[0], both.free.pop()])
    chunk = Chunk(second, 19, 20)
    actual = runner.forward(Batch((chunk,), ((first.blocks[1], second.blocks[1]),)))
    assert torch.tensor(actual[0]).equal(expected)
    runner.close()


def test_what_it_cannot_run_is_said() -> None:
    config = from_hf(model_of("mixtral").config.to_dict())
    assert "routed experts whose outputs are normed" in str(why_not(replace(config, norms=NORMS)))
    narrow = tiny("Llama", **{**SIZES, "head_dim": 8})
    with pytest.raises(ValueError, match="heads of 8 features"):
        native_of(narrow)
    with pytest.raises(ValueError, match=r"cache_dtype is torch\.float16"):
        native_of(model_of("llama"), cache_dtype=torch.float16)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_experts_on_disk_change_no_bits(kind: str) -> None:
    """Of 10 experts in two layers, 5 to 9 are in memory."""
    config, weights = weights_of(kind, "Qwen2Moe", **EXPERTS)
    plain = NativeDecoder(config, weights, num_blocks=32, threads=2)
    expected = Requests(plain, 0)
    size = ExpertStore(1 << 30, num_experts=10, least=5, expert_nbytes=plain_bytes(plain)).expert_nbytes
    for slots in (5, 9):
        runner = NativeDecoder(config, weights, num_blocks=32, threads=2, expert_nbytes=slots * size)
        assert runner.store is not None and runner.store.num_slots == slots
        actual = Requests(runner, 0)
        rng = random.Random(slots)
        for length in (40, 1, 1, 3, 1):
            tokens = [rng.randrange(config.vocab_size) for _ in range(length)]
            pair = [side.run([(side.request(tokens), 0, length)])[0] for side in (actual, expected)]
            assert pair[0].equal(pair[1]), (slots, length)
            actual.free, expected.free = list(range(32)), list(range(32))
        use = runner.store.use()
        assert use.misses >= 10 and use.hits + use.misses >= 2 * (5 + 2 + 2 + 2 + 2)
        runner.close()
    plain.close()


def test_a_disk_too_full_for_experts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    says = r"the experts' 40,960 bytes cannot be stored in .*: No space left on device \(.* bytes are free\); make room there, or"
    with pytest.raises(ValueError, match=says):
        ExpertStore(1 << 20, num_experts=10, least=5, expert_nbytes=4096)


def plain_bytes(runner: NativeDecoder) -> int:
    """Of one expert's packed matrices, with room for the cache lines that they start at."""
    experts = runner._layers[0].experts.contents
    addresses = sorted(tensor.data_ptr() for tensor in runner._tensors)
    parts = [getattr(matrix, name) for matrix in (experts.gate_up[0], experts.down[0]) for name in ("data", "scale", "low")]
    nbytes = {tensor.data_ptr(): tensor.nbytes for tensor in runner._tensors}
    assert addresses
    return sum(-(-nbytes[part] // 64) * 64 for part in parts if part)


def test_the_expert_used_least_recently_makes_room() -> None:
    """One token at a time, so that each layer needs two experts: the counts are those of the policy in Python."""
    config, weights = weights_of("float32", "Qwen2Moe", **EXPERTS)
    plain = NativeDecoder(config, weights, num_blocks=8, threads=1)
    runner = NativeDecoder(config, weights, num_blocks=8, threads=2, expert_nbytes=6 * plain_bytes(plain))
    plain.close()
    assert runner.store is not None
    side, recent, hits, misses = Requests(runner, 0), dict[int, None](), 0, 0  # experts, the least recently used first
    for token in [3, 3, 70, 5, 3, 91, 12, 70, 3, 44, 5]:
        before = runner.store.use()
        side.run([(side.request([token]), 0, 1)])
        side.free = list(range(8))
        used = runner.store.use()
        assert used.hits + used.misses - before.hits - before.misses == 2 * 2  # two layers, top 2
        clocks = runner.store._tensors["last_used"].tolist()
        owner = runner.store._tensors["owner"].tolist()
        for layer in (1, 0):  # the two clocks of this forward
            needed = [owner[i] for i, clock in enumerate(clocks) if clock == runner.store.record.clock - layer]
            assert len(needed) == 2
            hits += sum(expert in recent for expert in needed)
            misses += sum(expert not in recent for expert in needed)
            for expert in needed:
                recent.pop(expert, None)
                recent[expert] = None
            while len(recent) > 6:
                del recent[next(iter(recent))]
        assert set(recent) == set(owner) - {-1}
        assert runner.store.use() == (hits, misses)
    assert hits and misses > 6  # some were read twice
    runner.close()


def test_experts_on_disk_that_cannot_be_read_are_an_error() -> None:
    config, weights = weights_of("float32", "Qwen2Moe", **EXPERTS)
    runner = NativeDecoder(config, weights, num_blocks=8, threads=2, expert_nbytes=1 << 30)
    assert runner.store is not None
    side = Requests(runner, 0)
    expected = side.run([(side.request([5, 6]), 0, 2)])[0]
    runner.store.check()
    runner.store._tensors["slot"].fill_(-1)
    runner.store._tensors["owner"].fill_(-1)
    file, runner.store.record.file = runner.store.record.file, 10**6
    with pytest.raises(OSError, match="cannot read experts from the temporary file: Bad file descriptor"):
        side.run([(side.request([5, 6]), 0, 2)])
    runner.store.record.file = file
    side.free = list(range(8))
    assert side.run([(side.request([5, 6]), 0, 2)])[0].equal(expected)
    with pytest.raises(ValueError, match="experts on disk have no new weights in place"):
        runner.put("layers.0.experts.1.down", torch.zeros(96, 40))
    runner.close()


def test_memory_for_less_than_a_layer_of_experts_is_refused() -> None:
    config, weights = weights_of("float32", "Qwen2Moe", **EXPERTS)
    with pytest.raises(
        ValueError, match=r"expert_cache_bytes \(100,000\) holds \d experts of [\d,]+ bytes; a batch can need a layer's 5"
    ):
        NativeDecoder(config, weights, num_blocks=4, expert_nbytes=100_000)
    config, weights = weights_of("float32")
    with pytest.raises(ValueError, match="expert_cache_bytes is 100,000, but the model has no experts"):
        NativeDecoder(config, weights, num_blocks=4, expert_nbytes=100_000)


def test_experts_on_disk_by_the_option() -> None:
    model = model_of("qwen2-moe")
    answers = []
    for options in ({}, {"expert_cache_bytes": "128K"}):
        with slipstream.init_inference(model, device="cpu", threads=2, kv_cache_bytes="1M", **options) as engine:
            answers.append(engine.generate([[5, 6, 7]], max_new_tokens=8, ignore_eos=True, temperature=0.0)[0].token_ids)
            stats = engine.engine.stats()
            assert bool(stats.expert_misses) == bool(options)
    assert answers[0] == answers[1]
    with pytest.raises(ValueError, match="expert_cache_bytes need the native kernels"):
        slipstream.init_inference(
            tiny("GPTBigCode", vocab_size=VOCAB, n_embd=64, n_layer=1, n_head=4), expert_cache_bytes="1M", device="cpu"
        )
