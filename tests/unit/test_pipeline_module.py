"""Pipeline modules: stages run one after the other are the whole model, bit for bit; names, partitions, laziness."""

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.parallel.layers import LayerSpec, TiedLayerSpec, partition, partition_balanced, partition_uniform
from slipstream.parallel.module import DualPipeVModule, PipelineModule
from slipstream.parallel.schedule import stages_of
from tests.unit.test_compat import deepspeed  # noqa: F401 (a fixture)

DIM, VOCAB = 8, 16


def gradients(module: Any, batch: Any, count: int) -> Tensor:
    """Forward and backward of chunks in order, each on leaves of its own; the loss."""
    x, calls = module.inputs(batch), []
    for i in range(count):
        if i and isinstance(x, Tensor):
            x = x.detach().requires_grad_()
        elif i:
            x = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in x)
        calls.append((x, module.chunk(i)(x, batch)))
        x = calls[-1][1]
    loss = module.loss(x, batch)
    loss.backward()
    for (inputs, _), (_, outputs) in zip(calls[:0:-1], calls[-2::-1], strict=True):
        pairs = [(o, i.grad) for o, i in zip(flat(outputs), flat(inputs), strict=True) if o.requires_grad and i.grad is not None]
        torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
    return loss.detach()


def flat(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def same_gradients(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("interval", [0, 2])
@pytest.mark.parametrize(("p", "v"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (1, 4)])
def test_a_sequential_in_stages_is_the_whole(p: int, v: int, interval: int) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(DIM, DIM), nn.Tanh())))
    reference, batch = copy.deepcopy(whole), (torch.randn(3, DIM), torch.randn(3, DIM))
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "num_chunks": v, "activation_checkpoint_interval": interval}
    module = PipelineModule(whole, num_stages=p, stages=range(p * v), **options)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in reference.named_parameters()]
    loss = F.mse_loss(reference(batch[0]), batch[1])
    loss.backward()
    assert torch.equal(gradients(module, batch, p * v), loss.detach())
    same_gradients(module, reference)
    names = [name for i in range(p * v) for name, _ in module.chunk(i).named_parameters()]
    assert sorted(names) == sorted(dict(reference.named_parameters()))
    for i, stage in enumerate(range(p * v)):
        assert module.chunk(i).is_first == (stage == 0) and module.chunk(i).is_last == (stage == p * v - 1)


def as_head(module: nn.Embedding, x: Tensor) -> Tensor:
    return F.linear(x, module.weight)


def tied_layers() -> list[Any]:
    embedding: Callable[..., TiedLayerSpec] = lambda **kwargs: TiedLayerSpec("embed", nn.Embedding, VOCAB, DIM, **kwargs)  # noqa: E731
    return [embedding(), *(LayerSpec(nn.Linear, DIM, DIM) for _ in range(4)), torch.tanh, embedding(forward_fn=as_head)]


@pytest.mark.parametrize("p", [1, 2, 4])
def test_tied_layers(p: int) -> None:
    """All stages here share one embedding, so its gradient is the sum of the stages'."""
    layers, ids = tied_layers(), torch.randint(VOCAB, (5,))
    make = lambda p: PipelineModule(  # noqa: E731
        layers, num_stages=p, stages=range(p), seed_layers=True, loss_fn=F.cross_entropy, partition_method="uniform"
    )
    one, module = make(1), make(p)
    assert torch.equal(gradients(module, (ids, ids), p), gradients(one, (ids, ids), 1))
    same_gradients(module, one)
    name = "tied_modules.embed.weight"
    assert name in dict(module.named_parameters()) and name in dict(module.chunk(p - 1).named_parameters())
    assert module.tied == ([] if p == 1 else [(name, ((0, name), (p - 1, name)))])


def test_a_stage_builds_its_own_layers_only() -> None:
    built: list[int] = []

    class Noted(nn.Linear):
        def __init__(self, i: int) -> None:
            super().__init__(DIM, DIM)
            if not self.weight.is_meta:
                built.append(i)

    module = PipelineModule([LayerSpec(Noted, i) for i in range(6)], num_stages=3, stages=[1])
    assert built == [2, 3] and module.parts == [0, 2, 4, 6]
    assert [name for name, _ in module.named_parameters()] == ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert module.stage_owner(5) == 2 and not module.chunk(0).is_first
    layers = [nn.Linear(DIM, DIM) for _ in range(3)]
    assert PipelineModule(layers, num_stages=3, stages=[1])._layer_specs == [None, layers[1], None]


def test_stages_of_a_v_and_a_loop(caplog: pytest.LogCaptureFixture) -> None:
    assert [stages_of(2, "interleaved", r, 3) for r in range(2)] == [(0, 2, 4), (1, 3, 5)]
    layers = tied_layers()
    module = DualPipeVModule(layers, num_stages=1, loss_fn=F.cross_entropy, partition_method="uniform")
    assert not caplog.records
    DualPipeVModule(layers, num_stages=1, loss_fn=F.cross_entropy, overlapped_forward_backward=lambda *each: None)
    assert "overlapped_forward_backward=...) has no effect" in caplog.text
    assert module.stages == (0, 1) and module.num_stages == 2 and module.num_pipeline_stages() == 1
    assert module.chunk(0).funcs[0] is module.tied_modules["embed"] and module.stage_owner(6) == 0


def test_tuples_and_seeds() -> None:
    seeds: list[int] = []

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return self.linear(pair[0]), pair[1]

    options: dict[str, Any] = {"seed_layers": True, "seed_fn": seeds.append, "activation_checkpoint_interval": 2}
    module = PipelineModule([LayerSpec(Pair) for _ in range(3)], num_stages=1, base_seed=100, **options)
    assert seeds == [100, 101, 102]
    out, count = module((torch.randn(2, DIM), torch.arange(2)))
    assert seeds[3:] == [200, 201, 202] and torch.equal(count, torch.arange(2))
    out.sum().backward()
    module((torch.randn(2, DIM), torch.arange(2)))
    assert seeds[-3:] == [300, 301, 302] and module.micro_offset == 2 and module.curr_layer == 2


def test_which_blocks_are_recomputed() -> None:
    layers = [*(nn.ReLU() for _ in range(4)), *(nn.Linear(DIM, DIM) for _ in range(4))]
    module = PipelineModule(layers, num_stages=1, activation_checkpoint_interval=4)
    assert module.is_checkpointable_results == [False, True]
    module.set_checkpoint_interval(2)
    assert module.is_checkpointable_results == [False, False, True, True]
    module.checkpointable_layers = ["ReLU"]
    assert module.is_checkpointable_results == [True, True, False, False]


def test_partitions() -> None:
    assert partition_uniform(10, 4) == [0, 3, 6, 8, 10] and partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert partition_balanced([1, 1, 1, 1, 10], 2) == [0, 4, 5]
    layers: list[Any] = [LayerSpec(nn.Linear, DIM, DIM), nn.ReLU(), torch.relu, LayerSpec(nn.Linear, DIM, DIM), nn.ReLU()]
    assert partition(layers, 2, "type:linear") == partition_balanced([1, 0, 0, 1, 0], 2)
    assert partition(layers, 2, "parameters") == partition_balanced([72, 0, 0, 72, 0], 2)
    bounds = partition([LayerSpec(nn.Linear, DIM, DIM) for _ in range(4)], 2, "profile", torch.randn(2, DIM))
    assert bounds[0] == 0 and bounds[-1] == 4
    with pytest.raises(RuntimeError, match="matches none"):
        partition(layers, 2, "type:conv")
    with pytest.raises(ValueError, match="example="):
        partition(layers, 2, "profile")
    with pytest.raises(NotImplementedError, match="'other'"):
        partition(layers, 2, "other")


def test_refusals() -> None:
    with pytest.raises(RuntimeError, match="must provide num_stages or topology"):
        PipelineModule([nn.ReLU()])
    with pytest.raises(RuntimeError, match=r"num_stages \(2\) must divide distributed world size"):
        PipelineModule([nn.ReLU(), nn.ReLU()], num_stages=2)
    with pytest.raises(RuntimeError, match=r"LayerSpec only supports torch\.nn\.Module types"):
        LayerSpec(torch.relu)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no bounds of 2 stages of 3 layers"):
        PipelineModule([nn.ReLU()] * 3, num_stages=2, stages=[0], parts=[0, 2])


def test_deepspeed_serves_them(deepspeed: Any) -> None:  # noqa: F811
    for name in ("PipelineModule", "LayerSpec", "TiedLayerSpec", "DualPipeVModule"):
        assert getattr(importlib.import_module("deepspeed.pipe"), name)
    assert deepspeed.PipelineModule is PipelineModule


# -- transformers --

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
MODELS = {
    "Llama": {"intermediate_size": 48, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "Qwen3": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "Gemma": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1},
}


@pytest.fixture(params=MODELS)
def decoder(request: pytest.FixtureRequest) -> Iterator[Any]:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = "LMHeadModel" if request.param == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{request.param}Config")(**SIZES, **MODELS[request.param])
    yield getattr(transformers, f"{request.param}{kind}")(config)


def test_a_decoder_in_stages_is_the_whole(decoder: Any) -> None:
    from slipstream.parallel.huggingface import PipelinedDecoder

    reference, ids = copy.deepcopy(decoder), torch.randint(2, 64, (2, 7))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill_(1, torch.tensor([0]), 0), "labels": ids}
    loss = reference(**batch, use_cache=False).loss
    loss.backward()
    whole_names = dict(reference.named_parameters(remove_duplicate=False))
    for count in (1, 2, 3, 4):
        decoder.zero_grad()
        module = PipelinedDecoder(decoder, count, range(count))
        assert torch.equal(gradients(module, batch, count), loss.detach())
        same_gradients(decoder, reference)
        for i in range(count):
            assert {name for name, _ in module.chunk(i).named_parameters()} <= set(whole_names)
        one = PipelinedDecoder(decoder, count, [count - 1])
        assert sum(p.numel() for p in one.parameters()) == sum(p.numel() for p in module.chunk(count - 1).parameters())
        tied = count > 1 and decoder.config.tie_word_embeddings
        assert [[stage for stage, _ in places] for _, places in module.tied] == ([[0, count - 1]] if tied else [])
    with pytest.raises(ValueError, match="computes no loss of a micro-batch with input_ids: add labels"):
        one.loss(decoder(ids), {"input_ids": ids})
    with pytest.raises(ValueError, match="4 layers, fewer than the 5 pipeline stages"):
        PipelinedDecoder(decoder, 5, [0])
