"""`engine.generate` between steps: the answers of transformers with the weights of that moment, and who waits for whom."""

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.compat import engine as deepspeed
from slipstream.compat.rollout import (
    DeepSpeedHybridEngine,
    HybridEngineRollout,
    ResponseTokenBatch,
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
    generalized_jsd_loss,
)
from tests import toy
from tests.pool import distributed, run

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'slipstream[hf]'")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 5,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
ON: dict[str, Any] = {"enabled": True, "max_out_tokens": 48}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def prompts(rank: int) -> tuple[Tensor, Tensor]:
    """Three prompts of different lengths, padded on the left."""
    ids, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for row, length in enumerate((9, 4 + rank, 2)):
        ids[row, -length:] = torch.randint(6, 96, (length,), generator=torch.Generator().manual_seed(10 * rank + row))
        mask[row, -length:] = 1
    return ids, mask


def train(engine: Any, step: int) -> None:
    ids = torch.randint(6, 96, (2, 12), generator=torch.Generator().manual_seed(100 * engine.rank + step))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def twin(engine: Any, model: nn.Module) -> Any:
    """A whole model with the engine's weights of this moment. Collective."""
    model.load_state_dict(engine.state_dict())
    return model.to(engine.device).eval()


@distributed(world_size=2, transports=("shared", "gloo"), timeout=120)
def test_hybrid_engine_enabled(transport: str) -> None:
    """Each rank's own prompts, greedy, in either form of the call: token for token transformers', before and after steps."""
    for stage in (0, 3):
        engine = toy.make(toy.seeded(llama), stage, transport, hybrid_engine=ON)
        ids, mask = prompts(engine.rank)
        said = []
        for step in range(3):
            expected = twin(engine, llama())
            config = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=5, pad_token_id=0)
            wanted = expected.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
            assert engine.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False).equal(wanted), (stage, step)
            assert engine.module.generate(input_ids=ids, generation_config=config).equal(wanted)  # it finds the padding
            assert engine.generate(ids, attention_mask=mask, max_length=21, synced_gpus=True).equal(wanted)
            said.append(wanted)
            train(engine, step)
        assert not said[0].equal(said[1]), "a step changes the answers"
        engine.destroy()
        assert "generate" not in vars(engine.module)


@distributed(world_size=2, timeout=120)
def test_limits_of_rollouts() -> None:
    """Of tokens, raised on the rank that exceeds them, while the others are answered; and of settings that are no engine's."""
    engine = toy.make(toy.seeded(llama), 3, "gloo", hybrid_engine=ON)
    ids, mask = prompts(engine.rank)
    settings: dict[str, Any] = {"attention_mask": mask, "do_sample": False}
    most = 48 - 9 if engine.rank == 0 else 4
    assert engine.generate(ids, max_new_tokens=most, **settings).shape[1] <= 48
    if engine.rank == 0:  # with the same weights no rank waits for another
        with pytest.raises(ValueError, match=r"a prompt of 9 tokens and 40 new ones are more than 48: raise .*max_out_tokens"):
            engine.generate(ids, max_new_tokens=40, **settings)
        with pytest.raises(ValueError, match="row 1 of the prompts has no token"):
            engine.generate(ids, attention_mask=mask * torch.tensor([[1], [0], [1]]), max_new_tokens=2)
        with pytest.raises(ValueError, match=r"attention_mask is \[3, 8\] and the prompts are \[3, 9\]"):
            engine.generate(ids, attention_mask=mask[:, 1:], max_new_tokens=2)
        with pytest.raises(ValueError, match="max_length leaves -1 tokens"):
            engine.generate(ids, max_length=8)
        with pytest.raises(ValueError, match="needs prompts"):
            engine.generate(max_new_tokens=2)
    train(engine, 0)
    expected = twin(engine, llama())
    beams: dict[str, Any] = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    assert engine.generate(ids, **beams).equal(expected.generate(ids, **beams)), "transformers' own code"
    engine.destroy()
    with pytest.raises(RuntimeError, match="this engine was destroyed"):
        engine.generate(ids, max_new_tokens=2)


@distributed(world_size=2, timeout=120)
def test_a_rank_without_prompts_does_not_stop_the_others() -> None:
    engine = toy.make(toy.seeded(llama), 3, "gloo", hybrid_engine=ON)
    ids, mask = prompts(0)
    for step in range(2):
        expected = twin(engine, llama()).generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        if engine.rank == 0:
            for _ in range(3):  # the weights are those of the first call
                assert engine.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False).equal(expected)
        else:
            assert engine.generate(ids[:0], attention_mask=mask[:0], max_new_tokens=5, do_sample=False).shape == (0, 9)
        train(engine, step)
    engine.destroy()


@distributed(world_size=2, timeout=120)
def test_whatever_changes_the_weights_changes_the_answers() -> None:
    """A surgery, values written by the script, a loaded state, averages; and not a step that is skipped."""
    engine = toy.make(toy.seeded(llama), 3, "gloo", hybrid_engine=ON)
    ids, mask = prompts(engine.rank)

    def check() -> Tensor:
        expected = transformers.LlamaForCausalLM(engine.module.config)
        answers = engine.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        assert answers.equal(twin(engine, expected).generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False))
        return answers

    first, state = check(), {name: value.clone() for name, value in engine.state_dict().items()}
    with torch.no_grad(), slipstream.zero.gathered(engine.module.model.norm.weight):
        engine.module.model.norm.weight.copy_(torch.linspace(-1, 1, 64))
    assert not check().equal(first)
    engine.load_state_dict(state)
    assert check().equal(first)
    with engine.surgery():
        engine.module.resize_token_embeddings(100)
    check()
    average = slipstream.ema.Ema(engine, decay=0.5)
    train(engine, 0)
    average.update()
    after = check()
    with average.applied():
        check()
    assert check().equal(after)
    engine.destroy()


@distributed(world_size=2, timeout=120)
def test_samples() -> None:
    """Seeds are torch's, prompts draw apart, and what settings forbid is never drawn."""
    engine = toy.make(toy.seeded(llama), 1, "gloo", hybrid_engine=ON)
    ids = torch.tensor([[7, 8, 9]] * 4)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 3, "eos_token_id": []}
    torch.manual_seed(3)
    one = engine.generate(ids, temperature=1.5, **settings)
    torch.manual_seed(3)
    again = engine.generate(ids, temperature=1.5, **settings)
    assert one.equal(again) and one.shape == (12, 11) and len({tuple(row) for row in one.tolist()}) == 12
    assert not engine.generate(ids, temperature=1.5, **settings).equal(one)
    greedy = engine.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=[])
    assert engine.generate(ids, top_k=1, **settings).equal(greedy.repeat_interleave(3, 0))
    logits = engine(input_ids=ids[:1]).logits[0, -1]
    first = engine.generate(ids[:1].repeat(250, 1), top_k=4, do_sample=True, max_new_tokens=1)[:, -1]
    likely = logits.topk(4)
    assert set(first.tolist()) <= set(likely.indices.tolist())
    shares = torch.tensor([(first == token).float().mean() for token in likely.indices])
    assert (shares - likely.values.softmax(0)).abs().max() < 0.12
    engine.destroy()


@distributed(world_size=2, timeout=120)
def test_memory_between_rollouts() -> None:
    """release_inference_cache: after a call no copy of the weights is left, and the next call is right."""
    engine = toy.make(toy.seeded(llama), 3, "gloo", hybrid_engine=ON | {"release_inference_cache": True})
    ids, mask = prompts(engine.rank)
    rollouts = engine.states.resources["rollouts"]
    for step in range(2):
        expected = twin(engine, llama()).generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        for _ in range(2):
            assert engine.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False).equal(expected)
            with pytest.raises(slipstream.inference.engine.ClosedError, match="sleeps"):
                rollouts._server.generate([1, 2], max_new_tokens=1)
        train(engine, step)
    engine.destroy()


@distributed(world_size=2, timeout=60)
def test_rollouts_that_are_refused() -> None:
    for model, settings, why in (
        (toy.Lm, ON, "Lm is no model of transformers that generates; set hybrid_engine.enabled to false"),
    ):
        with pytest.raises(ValueError, match=why):
            toy.make(model(), 0, "gloo", hybrid_engine=settings)
    with pytest.raises(ValueError, match="not supported with pipelines"):
        toy.make(llama(), 0, "gloo", hybrid_engine=ON, pipeline={"stages": 2})


@distributed(world_size=2, timeout=120)
def test_deepspeeds_names() -> None:
    """The loop of DeepSpeed-Chat's third step, its times, and rollouts by `HybridEngineRollout`."""
    config = toy.settings(3, "gloo", hybrid_engine=ON)
    engine, *_ = deepspeed.initialize(model=toy.seeded(llama), config=config)
    assert isinstance(engine, DeepSpeedHybridEngine)
    ids, mask = prompts(engine.rank)
    for step in range(2):
        engine.eval()
        assert not engine.module.training
        with torch.no_grad():
            whole = engine.module.generate(
                ids, attention_mask=mask, max_length=20, pad_token_id=0, synced_gpus=True, do_sample=False
            )
        assert whole.equal(twin(engine, llama()).generate(ids, attention_mask=mask, max_length=20, do_sample=False))
        engine.train()
        assert engine.module.training
        train(engine, step)
    engine.eval()
    assert engine._iters == 2 and engine._total_batch_size == 6 and engine._t_start is not None
    assert 0 < engine._gather_latency + engine._generate_latency < engine._total_latency

    tokenizer = types.SimpleNamespace(pad_token_id=0, eos_token_id=5)
    profiled = types.SimpleNamespace(engine="hybrid_engine", enable_profiling=True)  # any object, as in DeepSpeed
    rollout = build_rollout(profiled, student_engine=engine, tokenizer=tokenizer)
    assert isinstance(rollout, HybridEngineRollout)
    for temperature in (0.0, 1.0):
        batch = rollout.generate(RolloutRequest(ids, mask), SamplingConfig(8, temperature, n_samples_per_prompt=2))
        assert batch.batch_size == 6 and batch.response_start_idx.tolist() == [9] * 6
        assert batch.attention_mask[:, :9].equal(mask.repeat_interleave(2, 0))
        for row, kept in zip(batch.input_ids[:, 9:].tolist(), batch.attention_mask[:, 9:].tolist(), strict=True):
            length = row.index(5) + 1 if 5 in row else len(row)
            assert kept == [1] * length + [0] * (len(row) - length)
    targets = ResponseTokenBatch.from_rollout(batch)
    assert targets.target_ids[targets.response_mask].equal(batch.input_ids[:, 9:][batch.attention_mask[:, 9:] == 1])
    empty = rollout.generate(RolloutRequest(ids[:0], mask[:0]), SamplingConfig(4))
    assert empty.batch_size == 0
    assert build_rollout(RolloutConfig(), engine, tokenizer).get_last_profile() is None
    profile: Any = rollout.get_last_profile()
    assert profile["num_generated_tokens"] == profile["batch_size"] == profile["response_length"] == 0
    parts = [profile[f"{part}_ms"] for part in ("prompt_expansion", "handover", "generation", "post_processing")]
    assert min(parts) >= 0 and 0 < sum(parts) <= profile["total_ms"] and engine._generate is not None
    with pytest.raises(ValueError, match="needs student_engine and tokenizer"):
        build_rollout(RolloutConfig(), engine)
    with pytest.raises(ValueError, match="the rollout engine is 'vllm'"):
        build_rollout(RolloutConfig("vllm"), engine, tokenizer)
    rollout.shutdown()
    rollout.sync_weights(3)
    engine.destroy()


@distributed(world_size=2, transports=("gloo",), timeout=60)
def test_rollouts_without_hybrid_engine(transport: str) -> None:
    """Ranks whose answers end early go on gathering with the others."""
    engine = toy.make(toy.seeded(llama), 3, transport)
    ids, mask = prompts(engine.rank)
    expected = twin(engine, llama())
    rollout = HybridEngineRollout(engine, types.SimpleNamespace(pad_token_id=0, eos_token_id=5))
    ends = expected.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)[0, -1].item() if engine.rank else 5
    rollout.tokenizer.eos_token_id = ends
    rollout.sync_weights(0)
    batch = rollout.generate(RolloutRequest(ids, mask), SamplingConfig(8, 0.0))
    wanted = expected.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=ends, pad_token_id=0)
    assert batch.seq_len == 17 and batch.input_ids.equal(nn.functional.pad(wanted, (0, 17 - wanted.shape[1])))
    lengths = [row.index(ends) + 1 if ends in row else 8 for row in wanted[:, 9:].tolist()]
    assert batch.attention_mask[:, 9:].sum(1).tolist() == lengths
    rollout.shutdown()
    train(engine, 0)
    engine.destroy()


class LinearWithLora(nn.Module):
    """As in DeepSpeed-Chat: a linear layer with two factors beside its weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.weight = linear.weight
        self.lora_right_weight = nn.Parameter(torch.randn(inputs, 4))
        self.lora_left_weight = nn.Parameter(0.1 * torch.randn(4, outputs))
        self.lora_scaling = 0.25

    def forward(self, x: Tensor) -> Tensor:
        is_fused = getattr(self, "fuse_lora", False)  # DeepSpeed-Chat's layer has it from the beginning
        added = 0.0 if is_fused else x @ self.lora_right_weight @ self.lora_left_weight * self.lora_scaling
        return x @ self.weight.t() + added


def adapted() -> nn.Module:
    model: Any = llama()
    for layer in model.model.layers:
        for part, name in ((layer.self_attn, "q_proj"), (layer.mlp, "down_proj")):
            setattr(part, name, LinearWithLora(getattr(part, name)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return model


@distributed(world_size=2, timeout=120)
def test_deepspeed_chats_adapters_are_fused() -> None:
    """For answers always, for forwards between `fuse_lora_weight` and `unfuse_lora_weight`."""
    config = toy.settings(3, "gloo", hybrid_engine=ON, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    engine, *_ = deepspeed.initialize(model=toy.seeded(adapted), config=config)
    check_fusion(engine, adapted)
    engine.destroy()


def check_fusion(engine: Any, model: Callable[[], nn.Module]) -> None:
    ids, mask = prompts(engine.rank)
    said = []
    for step in range(2):
        whole = twin(engine, toy.seeded(model))
        wanted = whole.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        for change in (lambda: None, engine.fuse_lora_weight, engine.unfuse_lora_weight):
            change()
            said.append(engine.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False))
            assert said[-1].equal(wanted), step
            with torch.no_grad():
                torch.testing.assert_close(engine(input_ids=ids).logits, whole(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
        train(engine, step)
    assert not said[0].equal(said[-1])


def fuse_adapters() -> None:
    warnings.simplefilter("ignore")  # from peft and the packages that it finds
    import peft

    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    config = toy.settings(3, "gloo", hybrid_engine=ON, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    engine, *_ = deepspeed.initialize(model=peft.get_peft_model(toy.seeded(llama), lora), config=config)
    check_fusion(engine, lambda: peft.get_peft_model(llama(), lora))
    engine.destroy()


def test_adapters_are_fused_for_rollouts() -> None:
    pytest.importorskip("peft", reason="peft is not installed: make test-clients does")
    run(2, fuse_adapters)


def test_the_divergence_of_two_models() -> None:
    student, teacher = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)), torch.randn(2, 3, 7)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    p, q = teacher.double().softmax(-1), student.double().softmax(-1)

    def mean(of: Tensor, to: Tensor) -> float:
        return float(((of * (of / to).log()).sum(-1) * mask).sum() / 4)

    mixed = 0.3 * p + 0.7 * q
    for beta, expected in ((0.0, mean(p, q)), (1.0, mean(q, p)), (0.3, 0.3 * mean(p, mixed) + 0.7 * mean(q, mixed))):
        loss, total, count = generalized_jsd_loss(student, teacher, mask, beta)
        assert int(count) == 4 and abs(float(loss) - expected) < 1e-5 and abs(float(total) - 4 * expected) < 1e-5
    assert float(generalized_jsd_loss(student, teacher, mask, teacher_top_k=1).loss) == 0
    assert float(generalized_jsd_loss(student, teacher, mask, 0.0, pointwise_clip=0.0).loss) < 0
    assert float(generalized_jsd_loss(student, teacher, 0 * mask).loss) == 0
    for settings, why in (
        ({"beta": 2}, "beta is 2"),
        ({"temperature": 0}, "temperature is 0"),
        ({"teacher_top_k": 8}, "from 1 to 7"),
    ):
        with pytest.raises(ValueError, match=why):
            generalized_jsd_loss(student, teacher, mask, **settings)
    with pytest.raises(ValueError, match="student, teacher and mask are"):
        generalized_jsd_loss(student, teacher, mask[:1])
