"""Unmodified Hugging Face models, from their configs with random weights, against plain data parallelism."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import toy
from tests.pool import distributed

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'slipstream[hf]'")

SIZES = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
SGD = {"lr": 0.1, "momentum": 0.9}
CLIP = 0.5


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def bert() -> nn.Module:
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
    config = transformers.T5Config(**sizes, dropout_rate=0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **experts))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "bert": bert, "t5": t5, "mixtral": mixtral}
Checkpointing = bool | None  # use_reentrant, or no activation checkpointing


def build(name: str, checkpointing: Checkpointing) -> Any:
    model = toy.seeded(MODELS[name])
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    model.train()
    return model


def tokens(rank: int, i: int) -> Tensor:
    return torch.randint(1, 128, (2, 12), generator=torch.Generator().manual_seed(100 * rank + i))


def backward(model: Any, rank: int, i: int) -> None:
    ids = tokens(rank, i)
    model(input_ids=ids, labels=ids).loss.backward()


def plain_torch(name: str, steps: int) -> tuple[dict[str, Tensor], float]:
    model = build(name, None)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, **SGD)
    for i in range(steps):
        backward(model, dist.get_rank(), i)
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        norm = nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norm.item()


@distributed(world_size=2, transports=("shared", "gloo"), timeout=120)
@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_torch(name: str, transport: str) -> None:
    """Training with generation in between, of different lengths by rank if the transport allows it."""
    import warnings

    warnings.simplefilter("ignore")  # transformers' own
    steps = 2
    expected, norm = plain_torch(name, steps)
    for stage, checkpointing in ((0, None), (3, None), (3, False), (3, True)):
        engine = toy.make(
            build(name, checkpointing), stage, transport, gradient_clipping=CLIP, optimizer={"type": "SGD", "params": SGD}
        )
        for i in range(steps):
            backward(engine, engine.rank, i)
            engine.step()
            if i == 0 and name != "bert" and checkpointing is None:
                engine.eval()
                length = 3 + (engine.rank if transport == "shared" else 0)
                with torch.no_grad():
                    out = engine.module.generate(tokens(0, i)[:1], max_new_tokens=length, do_sample=False)
                assert out.shape[0] == 1
                engine.train()
        for key, value in engine.state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(
                    value, expected[key], rtol=0, atol=3e-6, msg=lambda m, s=stage, k=key: f"stage {s}: {k}: {m}"
                )
        assert engine.global_grad_norm == pytest.approx(norm, rel=1e-5)
        engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("name", MODELS)
def test_trains_in_bf16(name: str) -> None:
    import warnings

    warnings.simplefilter("ignore")
    engine = toy.make(build(name, None), 3, dtype="bf16")
    for i in range(2):
        backward(engine, engine.rank, i)
        engine.step()
    assert engine.global_grad_norm > 0
    assert all(torch.isfinite(v).all() for v in engine.state_dict().values() if v.is_floating_point())
    engine.destroy()


@distributed(world_size=2)
def test_a_llama_on_meta_is_initialized_as_it_would_be() -> None:
    import warnings

    warnings.simplefilter("ignore")
    plain = toy.seeded(llama)
    for stage in (0, 3):
        with torch.device("meta"):
            model = llama()
        engine = toy.make(model, stage)
        state = engine.state_dict()
        for name, value in plain.state_dict().items():
            assert state[name].std().item() == pytest.approx(value.std().item(), rel=0.2), name
            assert state[name].mean().item() == pytest.approx(value.mean().item(), abs=0.01), name
        buffers = dict(model.named_buffers())
        for name, buffer in plain.named_buffers():  # rotary frequencies are not in the state dict
            torch.testing.assert_close(buffers[name], buffer, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert model.model.rotary_emb.original_inv_freq.device.type == "cpu"
        for i in range(2):
            backward(engine, engine.rank, i)
            engine.step()
        assert engine.global_grad_norm > 0
        assert torch.equal(engine.module.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
        engine.destroy()
