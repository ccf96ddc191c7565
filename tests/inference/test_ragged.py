"""`deepspeed.inference.v2`: the caller's own scheduler over our forward, against transformers in fp32."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.ops import build
from tests.inference.twins import PROMPTS, SIZES, VOCAB, tiny
from tests.unit.test_compat import deepspeed  # noqa: F401 (fixture)
from tests.unit.test_docs import RAGGED

TEXTS = [torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in (50, 37, 18, 64, 3, 41)]


def opened(deepspeed: Any, model: Any, blocks: int = 64, **limits: Any) -> Any:  # noqa: F811
    from deepspeed.inference.v2 import InferenceEngineV2, RaggedInferenceEngineConfig

    memory = {"mode": "allocate", "size": blocks}
    return InferenceEngineV2(model, RaggedInferenceEngineConfig(manager={"memory_config": memory, **limits}))


def parts(ids: torch.Tensor, rng: random.Random) -> list[torch.Tensor]:
    cuts = sorted({0, len(ids), *(rng.randint(1, len(ids) - 1) for _ in range(4))})
    return [ids[a:b] for a, b in itertools.pairwise(cuts)]


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[None]).logits[0]


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", "Nemotron"])  # the last by transformers' code
def test_any_schedule_gives_the_logits_of_each_sequence_alone(family: str, deepspeed: Any) -> None:  # noqa: F811
    """Random parts of six sequences, mixed with single tokens: transformers' logits, and natively the bits of one whole put."""
    model, rng = tiny(family, **SIZES), random.Random(3)
    engine, alone = opened(deepspeed, model), opened(deepspeed, model)
    exact = family != "Nemotron" and build.load().kernels is not None
    whole = [logits(model, ids) for ids in TEXTS]
    waiting = {uid: parts(ids, rng) for uid, ids in enumerate(TEXTS)}
    seen = dict.fromkeys(waiting, 0)
    while waiting:
        uids = rng.sample(sorted(waiting), rng.randint(1, len(waiting)))
        given = [waiting[uid].pop(0) for uid in uids]
        found = engine.put(uids, given)
        for uid, tokens, row in zip(uids, given, found, strict=True):
            seen[uid] += len(tokens)
            torch.testing.assert_close(row, whole[uid][seen[uid] - 1], rtol=3e-4, atol=3e-4)
            if exact:
                assert row.equal(alone.put([uid], [TEXTS[uid][: seen[uid]]])[0])
                alone.flush(uid)
        waiting = {uid: left for uid, left in waiting.items() if left}
    assert engine.free_blocks.item() == 64 - sum(-(-len(ids) // 16) for ids in TEXTS)
    for uid in range(len(TEXTS)):
        engine.flush(uid)
    assert engine.free_blocks.item() == alone.free_blocks.item() == 64


def test_a_folder_generates_by_a_loop_of_ones_own(deepspeed: Any, tmp_path: Path) -> None:  # noqa: F811
    """Greedy text as `generate`, from a saved folder, as DeepSpeed's users write it, and the page's example."""
    from deepspeed.inference.v2 import RaggedInferenceEngineConfig, build_hf_engine

    model = tiny("Llama", **SIZES)
    model.save_pretrained(tmp_path)
    exec(RAGGED.replace('"model"', repr(str(tmp_path))), {})
    engine = build_hf_engine(str(tmp_path), RaggedInferenceEngineConfig(manager={"memory_config": {"size": 1 << 30}}))
    sequences = {uid: list(prompt) for uid, prompt in enumerate(PROMPTS)}
    new = {uid: torch.tensor(prompt) for uid, prompt in enumerate(PROMPTS)}
    for _ in range(10):
        chosen = engine.put([*new], [*new.values()]).argmax(-1)
        new = dict(zip(new, chosen[:, None], strict=True))
        for uid, token in new.items():
            sequences[uid].append(int(token))
    for uid, prompt in enumerate(PROMPTS):
        assert sequences[uid] == model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0].tolist()
    with pytest.raises(ValueError, match="packed when they are loaded"):
        engine.serialize("there")
    (tmp_path / "ds_model_config.pkl").touch()
    with pytest.raises(ValueError, match=r"a pickle \(ds_model_config.pkl\)"):
        build_hf_engine(str(tmp_path))


def test_what_fits_is_told_before(deepspeed: Any) -> None:  # noqa: F811
    from deepspeed.inference.v2.scheduling_utils import SchedulingError, SchedulingResult

    limits = {"max_tracked_sequences": 3, "max_ragged_sequence_count": 2, "max_ragged_batch_size": 40, "max_context": 60}
    engine = opened(deepspeed, tiny("Llama", **SIZES), blocks=5, **limits)
    ask = engine.can_schedule
    assert ask([1, 2], [20, 20]) is SchedulingResult.Success
    assert ask([1, 2, 3], [1, 1, 1]) is SchedulingResult.BatchSequenceLimitExceeded
    assert ask([1], [41]) is SchedulingResult.BatchTokenLimitExceeded
    assert ask([1], [61]) is SchedulingResult.SequenceTokenLimitExceeded
    assert ask([1, 2], [33, 33]) is SchedulingResult.KVCacheLimitExceeded
    engine.put([1, 2], [TEXTS[0][:20], TEXTS[1][:20]])
    assert engine.free_blocks.tolist() == [1] and engine.get_remaining_block_capacity(1) == 12
    assert (
        engine.query(1, 12, 0) == (12, 0)
        and engine.query(1, 100, 1) == (28, 1)
        and engine.query(1, 100, torch.tensor(9)) == (40, 2)
    )
    assert engine.query(7, 100, 2) == (32, 2) and engine.get_remaining_block_capacity(7) == 0
    assert ask([1, 2], [12, 12]) is SchedulingResult.Success
    assert ask([1, 2], [13, 13]) is SchedulingResult.KVCacheLimitExceeded
    assert ask([3, 4], [1, 1]) is SchedulingResult.KVCacheLimitExceeded
    with pytest.raises(SchedulingError, match="KVCacheLimitExceeded") as refused:
        engine.put([3, 4], [[1], [2]], do_checks=False)
    assert refused.value.result is SchedulingResult.KVCacheLimitExceeded
    engine.put([3], [TEXTS[2][:16]])
    assert engine.query(4, 1, 1) == (0, 0) and engine.get_remaining_block_capacity(3) == 0
    assert ask([3], [1]) is SchedulingResult.KVCacheLimitExceeded
    engine.flush(2)
    assert ask([3], [1]) is SchedulingResult.Success
    assert ask([4, 5], [1, 1]) is SchedulingResult.EngineSequenceLimitExceeded
    engine.put([4, 5], [[1], [2]], do_checks=False)  # the limits of the config alone


def test_wrong_calls_and_failed_forwards_change_nothing(deepspeed: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    engine, other = (opened(deepspeed, tiny("Llama", **SIZES)) for _ in range(2))
    first = engine.put([1], [TEXTS[0][:20]])
    for uids, tokens, why in (
        ([1, 1], [[1], [2]], "is given once"),
        ([1, 2], [[1], []], "with at least one token"),
        ([1], [[1], [2]], "one list for each uid"),
        ([1], [[VOCAB]], f"token {VOCAB} is not in the vocabulary"),
        ([1], [torch.tensor([-1])], "token -1 is not"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.put(uids, tokens)

    def fails(batch: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine._runner, "forward", fails)
        engine.put([1, 2], [TEXTS[0][20:30], TEXTS[1]])
    assert engine.query(2, 1, 1) == (1, 1)
    assert engine.put([1, 2], [TEXTS[0][20:], TEXTS[1]]).equal(other.put([4, 5], [TEXTS[0], TEXTS[1]]))
    assert first.equal(other.put([6], [TEXTS[0][:20]]))


def test_prompts_that_begin_alike_share_their_blocks(deepspeed: Any) -> None:  # noqa: F811
    engine = opened(deepspeed, tiny("Llama", **SIZES))
    rows = [engine.put([uid], [TEXTS[3][:50]]) for uid in range(3)]
    assert rows[0].equal(rows[1]) and rows[0].equal(rows[2])
    assert engine.free_blocks.item() == 64 - 3 - 3  # three whole blocks of all, and the last of each
    engine.flush(0)
    assert engine.put([1, 2], [TEXTS[3][50:]] * 2).unique(dim=0).shape[0] == 1


def test_refused_settings(deepspeed: Any) -> None:  # noqa: F811
    from deepspeed.inference import RaggedInferenceEngineConfig, build_hf_engine  # noqa: F401
    from deepspeed.inference.v2.ragged import DSStateManagerConfig

    for make, settings, why in (
        (DSStateManagerConfig, {"offload": True}, "set it to False"),
        (DSStateManagerConfig, {"max_tracked_sequences": 5}, r"\(512\) is above max_tracked_sequences \(5\)"),
        (RaggedInferenceEngineConfig, {"quantization": {"quantization_mode": "wf6af16"}}, "must be None or one of int8, int4"),
    ):
        with pytest.raises(ValueError, match=why):
            make(**settings)
    with pytest.raises(ImportError, match="flattened weights; build_hf_engine loads a Hugging Face folder"):
        from deepspeed.inference.v2 import build_engine_from_ds_checkpoint  # noqa: F401
    quantized = RaggedInferenceEngineConfig(quantization={"quantization_mode": "int8"})
    model = tiny("Llama", **SIZES)
    with pytest.raises(ValueError, match="give one of them"):
        deepspeed.inference.v2.InferenceEngineV2(model, quantized, dtype="int4")
    with pytest.raises(ValueError, match=r"tp_size \(2\) need 2 processes, and 1 run this"):
        deepspeed.inference.v2.InferenceEngineV2(model, RaggedInferenceEngineConfig(tp={"tp_size": 2}))
    everything = RaggedInferenceEngineConfig(manager={"memory_config": {"size": 1 << 50}})
    with pytest.raises(ValueError, match="0 bytes for keys and values hold 0 blocks"):
        deepspeed.inference.v2.InferenceEngineV2(model, everything)
    with pytest.raises(ValueError, match="LlamaConfig has no weights"):
        opened(deepspeed, model.config)
