"""Forwards that add the terms of several processes: what plain torch computes, of any family, on CPUs here."""

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import slipstream
from slipstream.inference import assembly, native, ranks, runner
from slipstream.inference.config import ModelPart
from slipstream.inference.generate import InferenceEngine
from slipstream.inference.load import load
from slipstream.inference.weights import leaves
from slipstream.ops.matrices import Matrix
from slipstream.parallel.exchange import connect_activations
from slipstream.world.mesh import Axis
from slipstream.world.peers import meet
from slipstream.world.watch import PeerLostError, Watch
from tests.inference import test_embedding, test_families, test_long_rope
from tests.inference.twins import PROMPTS, SIZES, check_against_generate, decoder_of, serve, tiny
from tests.pool import distributed

_OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
_FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "Qwen2": SIZES,  # biases of queries, keys and values
    "Gemma2": {**SIZES, "head_dim": 16},  # norms of outputs, soft caps
    "Qwen2Moe": {**SIZES, **_MOE},
}


@contextmanager
def opened(model: Any, **options: Any) -> Iterator[InferenceEngine]:
    """An engine whose forward is plain torch's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "why_not", lambda config: "as asked")
        with slipstream.init_inference(model, **_OPTIONS, **options) as engine:
            where = "" if options.keys().isdisjoint(("tp_size", "mp_size", "moe")) else f" in {dist.get_world_size()} processes"
            assert f"torch (as asked){where}" in engine.description
            yield engine


def check(case: str, **options: Any) -> None:
    """As transformers generates, in random chunks and with drafts."""
    model = tiny(case, **_FAMILIES[case]) if case in _FAMILIES else test_families.model_of(case)
    with opened(model, dtype="fp32", **(options or {"tp_size": dist.get_world_size()})) as engine:
        if engine.leads:
            check_against_generate(model, engine.engine.runner)


@distributed(world_size=2)
def test_two_processes_compute_what_one_does() -> None:
    for case in ("Qwen2", "Gemma2", "Qwen2Moe", "olmo2", "gptj", "opt-350m", "bloom"):
        check(case)
    check("deepseek-v3", tp_size=2, moe={"ep_size": 2})
    check("Qwen2Moe", moe={"ep_size": 2})
    check("Qwen2Moe", moe={"ep_size": 1, "tp_size": 2})


@distributed(world_size=2)
def test_between_hosts() -> None:
    """Without shared memory: terms arrive by gloo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "meet", lambda axis: [peer._replace(host=str(peer.rank)) for peer in meet(axis)])
        for case in ("Gemma2", "olmo2", "Qwen2Moe"):
            check(case)


@pytest.mark.slow
@distributed(world_size=4)
def test_more_processes_than_keys_and_values() -> None:
    for case in test_families.CASES:
        check(case, **({"tp_size": 4, "moe": {"ep_size": 4}} if case.startswith("deepseek") else {"tp_size": 4}))
    for moe in ({"ep_size": 4}, {"ep_size": 2, "tp_size": 2}):
        check("Qwen2Moe", moe=moe)


@distributed(world_size=2)
def test_quantized_weights_are_cut_as_those_of_the_whole() -> None:
    model = tiny("Llama", **{**SIZES, "intermediate_size": 128})
    for dtype in ("int8", "int4"):
        with opened(model, dtype=dtype) as whole:
            _, wanted = serve(whole.engine.runner, [[]] * len(PROMPTS), 0)
        with opened(model, dtype=dtype, tp_size=2) as engine:
            if engine.leads:
                _, logits = serve(engine.engine.runner, [[]] * len(PROMPTS), 0)
                for own, other in zip(logits, wanted, strict=True):
                    assert (own[0] - other[0]).norm() < 0.05 * other[0].norm(), dtype  # sums of bf16 terms
    with (
        pytest.raises(ValueError, match=r"down_proj.weight: inputs \d+ to \d+ are no whole groups of 32, of a scale each"),
        opened(tiny("Llama", **SIZES), dtype="int4", tp_size=2),
    ):
        pass


@distributed(world_size=2)
def test_texts_whose_frequencies_change() -> None:
    """Other processes know how long the text of a chunk is."""
    model = test_long_rope.model_of("phi3")
    prompts = [text[: test_long_rope.LIMIT - 3] for text in test_long_rope.TEXTS]
    with opened(model, dtype="fp32") as whole:
        expected = whole.generate(prompts, max_new_tokens=8, ignore_eos=True, temperature=0)
    with opened(model, dtype="fp32", tp_size=2) as engine:
        if engine.leads:
            found = engine.generate(prompts, max_new_tokens=8, ignore_eos=True, temperature=0)
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]


@distributed(world_size=2)
def test_encoders() -> None:
    for case in ("bert", "modernbert"):
        model, texts = test_embedding.model_of(case), test_embedding.TEXTS
        types = [[int(i > 2) for i in range(len(text))] for text in texts]
        with opened(model, mp_size=2) as engine:
            if engine.leads:
                for text, vector in zip(texts, engine.embed(texts), strict=True):
                    torch.testing.assert_close(vector, test_embedding.reference(model, text).mean(0), rtol=2e-4, atol=2e-4)
                if case == "bert":
                    runner: Any = engine.engine.runner
                    whole = decoder_of(model, block_size=16)
                    torch.testing.assert_close(runner.hidden(texts, types), whole.hidden(texts, types), rtol=2e-4, atol=2e-4)


def tensors(m: Matrix) -> list[torch.Tensor]:
    return [m] if isinstance(m, torch.Tensor) else list(m)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Qwen2Moe"])
def test_parts_are_the_whole_and_divide_its_memory(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_not", lambda config: "as asked")
    wide = {**SIZES, "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384}
    gpt = {"vocab_size": 1024, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 16}
    model = tiny(family, **(gpt if family == "GPT2" else {**wide, **(_MOE if family == "Qwen2Moe" else {})}))
    for dtype in ("fp32", "int8"):
        whole = dict(leaves(load(model, dtype=dtype).weights))
        parts = [dict(leaves(load(model, dtype=dtype, part=ModelPart(index=i, tp_size=2)).weights)) for i in range(2)]
        for role, weight in whole.items():
            pieces: Any = [part[role] for part in parts if role in part]
            by_inputs = role.endswith((".out", ".down"))
            assert len(pieces) == (1 if role.endswith((".out_bias", ".down_bias")) else 2), role
            for tensor, *own in zip(*map(tensors, (weight, *pieces)), strict=True):
                cut = own[0].shape != tensor.shape
                assert torch.equal(torch.cat(own, 1 if by_inputs else 0) if cut else own[-1], tensor), role
                assert cut or tensor.dim() == 1 or role.endswith(("positions", "router", "shared_gate")), role
        sizes = [sum(sum(one.nbytes for one in tensors(m)) for m in each.values()) for each in (whole, *parts)]
        assert max(sizes[1:]) < 0.55 * sizes[0], sizes


@distributed(world_size=2)
def test_torchs_threads_are_divided() -> None:
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        with slipstream.init_inference(tiny("Llama", **SIZES), device="cpu", tp_size=2):
            assert torch.get_num_threads() == max(1, cores // 2)
    finally:
        torch.set_num_threads(threads)


@distributed(world_size=(2, 3), transports=("shared", "gloo"))
def test_sums_are_in_rank_order_whatever_the_batch(world_size: int, transport: str) -> None:
    """The bits of a row are those of its terms in rank order, alone, and in batches that are sent in other ways."""
    axis = Axis("tp", dist.group.WORLD, tuple(range(world_size)), dist.get_rank(), world_size)
    exchange = connect_activations(axis, torch.device("cpu"), transport, Watch(60.0), in_rank_order=True)
    for dtype in (torch.float32, torch.bfloat16):
        terms = [torch.randn(300, 96, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(world_size)]
        total = terms[0].float()
        for term in terms[1:]:
            total = total + term.float()
        for rows in (slice(0, 300), slice(7, 8), slice(5, 64)):
            assert exchange.sum(terms[dist.get_rank()][rows]).equal(total[rows].to(dtype)), (dtype, rows)
    exchange.close()


class Group:
    """An NCCL group, as far as it ends: its destruction, and its abort, wait until no graph has its operations."""

    def __init__(self) -> None:
        self.has_no_graph, self.is_aborted = threading.Event(), threading.Event()

    def abort(self) -> None:
        self.has_no_graph.wait()
        self.is_aborted.set()


@distributed(world_size=2)
def test_graphs_end_before_their_group() -> None:
    """In an orderly end, and in one by a failure, of which the other process hears while the abort waits."""
    for failing in (None, 0, 1):
        serving, group, heard = ranks.ServingRanks(ModelPart(tp_size=2), max_rows=8), Group(), queue.Queue[str]()
        serving._nccl = cast("Any", group)
        serving.release = group.has_no_graph.set
        serving.share({}, threads=1, message_nbytes=64)
        serving.gather("ready")
        serving.start(lambda numbers: None, heard.put)
        destroyed: list[Any] = []
        if serving.index == failing:
            serving.fail("it has no memory")
        if failing is not None:
            assert heard.get(timeout=20) == "it has no memory"
            assert not group.is_aborted.is_set()

        def destroy(one: Any, group: Group = group, destroyed: list[Any] = destroyed) -> None:
            assert group.has_no_graph.is_set()
            destroyed.append(one)

        with patch.object(dist, "destroy_process_group", destroy):
            with pytest.raises(PeerLostError, match="no memory") if serving.index and failing is not None else nullcontext():
                serving.close()
        assert (group in destroyed) == (failing is None) and group.is_aborted.is_set() == (failing is not None)
        dist.barrier()


@distributed(world_size=2)
def test_an_opening_that_fails_on_one_process_is_known_to_the_other() -> None:
    """Which may wait for it on its GPU."""

    def compute(*args: Any, **options: Any) -> Any:
        raise args[-1].ranks.error()

    bad, name = dist.get_rank() == 1, "rank 1 cannot open the model: MemoryError: no room"
    with patch.object(runner, "_on_cache", side_effect=MemoryError("no room") if bad else compute):
        with (
            pytest.raises(MemoryError if bad else PeerLostError, match="no room" if bad else name),
            opened(tiny("Llama", **SIZES), tp_size=2),
        ):
            pass


@distributed(world_size=2)
def test_which_gpu_a_process_has() -> None:
    """By its place on the host, or the only one that its launcher shows it. GPUs are those of a table here."""
    serving = ranks.ServingRanks(ModelPart(tp_size=2), max_rows=8)
    for seen, asked, own, sharing in (
        (("ab", "ab"), "cuda", (0, 1), 1),
        (("a", "b"), "cuda", (0, 0), 1),
        (("ab", "ab"), "cuda:0", (0, 0), 2),
        (("a", "a"), "cuda", None, 2),
    ):
        mine = seen[serving.index]

        def properties(device: torch.device, mine: str = mine) -> SimpleNamespace:
            return SimpleNamespace(uuid=mine[device.index or 0])

        shown = patch.multiple(torch.cuda, device_count=lambda mine=mine: len(mine), get_device_properties=properties)
        with shown, nullcontext() if own else pytest.raises(ValueError, match="2 processes of this host need a GPU each"):
            assert assembly._place(asked, None, serving)[0] == torch.device("cuda", own[serving.index] if own else 0)
        assert (serving.sharing, serving.have_a_device_each) == (sharing, sharing == 1)
    serving.close()
