"""Random-LTD: parity with layers that compute the same tokens, models of transformers, draws that resume, refusals."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import slipstream
from slipstream.compat import engine as compat
from slipstream.data.sampler import generator_of
from slipstream.train.random_ltd import (
    RandomLTDScheduler,
    convert_to_random_ltd,
    draw,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
)
from tests.pool import distributed, run

WIDTH, TOKENS, LAYERS = 8, 16, 4


class Layer(nn.Module):
    """Mixes tokens by a mask, [B, 1, S, S], and adds positions [1, S]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lengths = nn.Linear(WIDTH, WIDTH), list[int]()

    def forward(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        self.lengths.append(x.shape[1])
        mixed = self.inner(x if positions is None else x + positions[..., None])
        return x + (mixed if mask is None else mask[:, 0].softmax(-1) @ mixed)


class Pairs(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Any:
        return super().forward(x, mask, positions), None


class Stack(nn.Module):
    def __init__(self, kind: type[Layer] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        positions = torch.linspace(0, 1, x.shape[1])[None]
        for layer in self.layers:
            x = layer(x, mask, positions=positions)
            x = x[0] if isinstance(x, tuple) else x
        return x.square().mean()


class SequenceFirst(Stack):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def built(kind: type[Layer] = Layer, model: type[Stack] = Stack) -> Stack:
    torch.manual_seed(0)
    return model(kind)


def block(**more: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "total_layer_num": LAYERS,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [1, 2],
        "random_ltd_schedule": {"min_value": 4, "max_value": TOKENS, "schedule_config": {"require_steps": 3, "seq_per_step": 2}},
        **more,
    }


def config(stage: int = 0, routing: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "data_efficiency": {"enabled": True, "seed": 3, "data_routing": {"enabled": True, "random_ltd": routing or block()}},
        **more,
    }


def inputs(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, TOKENS, WIDTH, generator=generator), torch.randn(2, 1, TOKENS, TOKENS, generator=generator)


def kept(step: int) -> int:
    return min(TOKENS, (4 + step * 12 // 3) // 2 * 2)


def twin(model: Stack, x: Tensor, mask: Tensor, step: int, rank: int = 0, micro: int = 0) -> Tensor:
    """The layers on the drawn tokens, sequence by sequence."""
    positions = torch.linspace(0, 1, TOKENS)
    for number, layer in enumerate(model.layers):
        tokens = [torch.arange(TOKENS)] * 2
        if number in (1, 2):
            tokens = list(draw(2, TOKENS, kept(step), generator_of(3, step, micro, number, rank), x.device))
        parts = []
        for i, own in enumerate(tokens):
            new = layer(x[i : i + 1, own], mask[i : i + 1, :, own][..., own], positions[None, own])
            parts.append(x[i].index_copy(0, own, new[0]))
        x = torch.stack(parts)
    return x.square().mean()


def train(engine: Any, steps: range, rank: int = 0) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(*inputs(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_twin(steps: int, ranks: int = 1) -> list[list[float]]:
    model = built()
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(steps):
        model.zero_grad()
        for rank in range(ranks):
            loss = twin(model, *inputs(step, rank), step, rank)
            (loss / ranks).backward()
            losses[rank].append(loss.item())
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
    return losses


def test_layers_compute_a_part_of_the_tokens(tmp_path: Path) -> None:
    engine, *_ = compat.initialize(model=built(Pairs), config=config())
    assert train(engine, range(2)) == pytest.approx(train_twin(2)[0], rel=1e-6)
    engine.save_checkpoint(str(tmp_path))
    assert train(engine, range(2, 5)) == pytest.approx(train_twin(5)[0][2:], rel=1e-6)
    expected = [kept(step) for step in range(5)]
    assert expected == [4, 8, 12, 16, 16]
    lengths = [layer.lengths for layer in engine.module.layers]
    assert lengths == [[TOKENS] * 5, expected, expected, [TOKENS] * 5]
    assert engine.random_ltd_scheduler.get_current_seq() == 16 and engine.random_ltd_enabled()
    again, *_ = compat.initialize(model=built(Pairs), config=config())
    again.load_checkpoint(str(tmp_path))
    assert train(again, range(2, 3)) == pytest.approx(train_twin(3)[0][2:], rel=1e-6)
    again.eval()
    with torch.no_grad():
        again(*inputs(0))
    assert again.module.layers[1].lengths[-1] == TOKENS
    own = type(built(Pairs).layers[1])
    again.destroy()
    assert {type(layer) for layer in again.module.layers} == {own}
    engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_every_stage(transport: str) -> None:
    rank = dist.get_rank()
    for stage, way in ((0, "recompute"), (1, "keep"), (2, "recompute"), (3, "keep"), (3, "recompute")):
        more = {"slipstream": {"transport": transport, "activations": way}}
        engine, *_ = slipstream.initialize(model=built(), config=config(stage, **more))
        assert train(engine, range(3), rank) == pytest.approx(train_twin(3, 2)[rank], rel=1e-5)
        engine.destroy()


def test_micro_batches_draw_anew() -> None:
    engine, *_ = slipstream.initialize(model=built(), config=config(gradient_accumulation_steps=2))
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            loss = engine(*inputs(step, 5 * micro))
            engine.backward(loss)
            engine.step()
            expected = twin(model, *inputs(step, 5 * micro), step, micro=micro)
            (expected / 2).backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        optimizer.step()
    engine.destroy()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own check
def test_compiled_layers_drop_tokens() -> None:
    compiled = {"compile": {"enabled": True, "backend": "aot_eager"}}
    engine, *_ = slipstream.initialize(model=built(), config=config(**compiled))
    assert train(engine, range(4)) == pytest.approx(train_twin(4)[0], rel=1e-5)
    engine.destroy()


def llama_losses(own: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SIZES))
    engine, *_ = slipstream.initialize(model=model, config=config(1, slipstream=own, gradient_accumulation_steps=2))
    found = []
    for step in range(4):
        ids = torch.randint(32, (2, TOKENS), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found


def test_slices_of_a_layer_draw_the_same() -> None:
    whole = run(1, llama_losses, {})[0]
    for part in run(2, llama_losses, {"mesh": {"tp": 2}}):
        assert part == pytest.approx(whole, rel=1e-4)


def test_all_tokens_have_the_bits_of_no_drop() -> None:
    routing = block(random_ltd_schedule={**block()["random_ltd_schedule"], "min_value": TOKENS})
    dropping, *_ = slipstream.initialize(model=built(), config=config(routing=routing))
    plain, *_ = slipstream.initialize(model=built(), config={**config(), "data_efficiency": {}})
    assert train(dropping, range(3)) == train(plain, range(3))
    dropping.destroy()
    plain.destroy()


def test_sequence_first() -> None:
    engine, *_ = slipstream.initialize(
        model=built(model=SequenceFirst), config=config(routing=block(hidden_state_order="seq_batch_dim"))
    )
    x, _ = inputs(0)
    loss, model = engine(x), built()
    for number, layer in enumerate(model.layers):
        whole = torch.arange(TOKENS).expand(2, -1)
        tokens = draw(2, TOKENS, 4, generator_of(3, 0, 0, number, 0), x.device) if number in (1, 2) else whole
        x = torch.stack([row.index_copy(0, own, layer(row[None, own])[0]) for row, own in zip(x, tokens, strict=True)])
    assert loss.item() == pytest.approx(x.square().mean().item(), rel=1e-6)
    engine.destroy()


class Rotated(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        assert positions is not None and positions.shape == (x.shape[1], 2)
        return super().forward(x, mask, positions.sum(1)[None])


class SharedPositions(Stack):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        angles = torch.linspace(0, 1, x.shape[1])
        for layer in self.layers:
            x = layer(x, mask, torch.stack([angles, 3 * angles], 1))
        return x.square().mean()


def test_positions_without_sequences() -> None:
    """All sequences then draw the same tokens."""
    engine, *_ = slipstream.initialize(model=built(Rotated, SharedPositions), config=config())
    x, mask = inputs(0)
    loss, model = engine(x, mask), built()
    angles = 4 * torch.linspace(0, 1, TOKENS)
    for number, layer in enumerate(model.layers):
        own = draw(1, TOKENS, 4, generator_of(3, 0, 0, number, 0), x.device)[0] if number in (1, 2) else torch.arange(TOKENS)
        x = x.index_copy(1, own, layer(x[:, own], mask[:, :, own][..., own], angles[None, own]))
    assert loss.item() == pytest.approx(x.square().mean().item(), rel=1e-6)
    engine.destroy()


def test_dropped_layers_and_dropped_tokens() -> None:
    """With progressive layer dropping a layer is called or not, on its tokens."""
    more = {"progressive_layer_drop": {"enabled": True, "theta": 0.1, "gamma": 10.0}}
    engine, *_ = slipstream.initialize(model=built(), config=config(**more))
    train(engine, range(3))
    counts = [len(layer.lengths) for layer in engine.module.layers]
    assert sum(counts) < 3 * LAYERS and set(engine.module.layers[1].lengths) <= {4, 8, 12}
    engine.destroy()


SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 32,
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_unmodified_models_of_transformers(kind: str, attention: str) -> None:
    """Drawn tokens of a padded batch get what the layer computes for them alone, at their own positions."""
    torch.manual_seed(0)
    if kind == "llama":
        settings: Any = transformers.LlamaConfig(num_key_value_heads=2, attn_implementation=attention, **SIZES)
        model: Any = transformers.LlamaForCausalLM(settings)
        layers, rotary = model.model.layers, model.model.rotary_emb
    else:
        settings = transformers.BertConfig(attn_implementation=attention, **SIZES)
        settings.hidden_dropout_prob = settings.attention_probs_dropout_prob = 0.0
        model = transformers.BertForMaskedLM(settings)
        layers = model.bert.encoder.layer
    alone = copy.deepcopy(layers[1])
    ids, mask = torch.randint(32, (2, TOKENS)), torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, 10:] = 0
    engine, *_ = slipstream.initialize(model=model, config=config(routing=block(random_ltd_layer_id=[1], random_ltd_layer_num=1)))
    outputs: list[Tensor] = []
    for layer in layers[:2]:
        layer.register_forward_hook(lambda module, args, output: outputs.append(output[0] if isinstance(output, tuple) else output))
    engine.backward(engine(input_ids=ids, attention_mask=mask, labels=ids).loss)
    engine.step()
    before, after = outputs
    assert after.shape == (2, 4, 16)
    tokens = draw(2, TOKENS, 4, generator_of(3, 0, 0, 1, 0), ids.device)
    for i, own in enumerate(tokens):
        allowed = mask[i, own].bool().expand(1, 1, 4, 4)
        hidden, more = before[i : i + 1, own].detach(), {}
        if kind == "llama":
            allowed = allowed.tril()
            more["position_embeddings"] = rotary(hidden, position_ids=own[None])
        scores = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
        with torch.no_grad():
            expected = alone(hidden, attention_mask=scores, **more)
        expected = expected[0] if isinstance(expected, tuple) else expected
        real = mask[i, own].bool()
        assert real.any()
        torch.testing.assert_close(after[i][real], expected[0][real], rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("first", [1, 0])
def test_a_position_bias_of_all_layers(first: int) -> None:
    """T5's first layer makes it; layers that compute other tokens hand on that of all."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 4, "vocab_size": 32}
    model = transformers.T5EncoderModel(transformers.T5Config(dropout_rate=0.0, **sizes))
    alone, ids = copy.deepcopy(model), torch.randint(32, (2, TOKENS))
    routing = block(random_ltd_layer_id=[first, 2])
    engine, *_ = slipstream.initialize(model=model, config=config(routing=routing))
    if not first:
        with pytest.raises(TypeError, match=r"output 1 of layer 0, T5Block, is of the drawn tokens only .* leave the layer out"):
            engine(input_ids=ids)
        engine.destroy()
        return
    found = engine(input_ids=ids).last_hidden_state
    x, bias = alone.shared(ids), None
    for number, layer in enumerate(alone.encoder.block):
        if number in (1, 2):
            rows = []
            for i, own in enumerate(draw(2, TOKENS, 4, generator_of(3, 0, 0, number, 0), x.device)):
                new = layer(x[i : i + 1, own], None, bias[:, :, own][..., own])[0]
                rows.append(x[i].index_copy(0, own, new[0]))
            x = torch.stack(rows)
        else:
            x, bias, *_ = layer(x, None, bias)
    torch.testing.assert_close(found, alone.encoder.final_layer_norm(x), rtol=1e-4, atol=1e-5)
    engine.destroy()


def test_layers_that_attend_to_another_sequence_are_refused() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2, "vocab_size": 32}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0, **sizes))
    ids = torch.randint(32, (2, TOKENS))
    for layers, problem in (([1], ""), ([3], "layer 3, T5Block, attends to another sequence")):
        routing = block(random_ltd_layer_id=layers, random_ltd_layer_num=1)
        engine, *_ = slipstream.initialize(model=copy.deepcopy(model), config=config(routing=routing))
        with pytest.raises(TypeError, match=problem) if problem else nullcontext():
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        engine.destroy()


def test_the_number_of_tokens() -> None:
    scheduler = RandomLTDScheduler(
        {
            **block(),
            "random_ltd_schedule": {
                "min_value": 128,
                "max_value": 2048,
                "schedule_type": "fixed_linear",
                "schedule_config": {"require_steps": 200, "seq_per_step": 16},
            },
            "global_batch_size": 8,
        }
    )
    for step in (0, 1, 7, 100, 199, 200, 10_000):
        exact = 128 + int(step / 200 * 1920)
        assert scheduler.get_value(step) == min(2048, exact - exact % 16)
    assert scheduler.get_total_layer_tokens(2) == 8 * (2 * (128 + 128) + 2 * 2 * 2048)
    steps = {"require_steps": 100, "seq_per_step": 16}
    low = {"min_value": 8, "max_value": 64, "schedule_type": "fixed_linear", "schedule_config": steps}
    below = RandomLTDScheduler({"total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_schedule": low})
    assert [below.get_value(step) for step in (0, 40, 60, 100)] == [16, 16, 32, 64]  # never below min_value, and never 0
    scheduler.update_seq(100)
    state = scheduler.state_dict()
    assert state["current_value"] == scheduler.get_current_seq() == 1088 and state["current_steps"] == 100
    other = RandomLTDScheduler(block(random_ltd_schedule={**block()["random_ltd_schedule"], "schedule_type": "fixed_linear"}))
    other.load_state_dict(state)
    assert other.get_current_seq() == 1088 and other.get_random_ltd_layer_num() == 2


def test_deepspeeds_calls() -> None:
    """A class names the layers, where repeated blocks are others."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.more = built(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.first(x, mask)

    engine, *_ = compat.initialize(model=Two(), config=config())
    with pytest.raises(ValueError, match=r"total_layer_num is 4, and Two has 7 repeated blocks; set it .* convert_to_random_ltd"):
        engine(*inputs(0))
    with pytest.raises(ValueError, match="Two has 7 of class Linear"):
        convert_to_random_ltd(engine, nn.Linear)
    assert convert_to_random_ltd(engine, Layer) is engine
    engine(*inputs(0))
    assert [layer.lengths for layer in engine.module.first.layers] == [[16], [4], [4], [16]]
    names = set(save_without_random_ltd(engine))
    assert names == set(Two().state_dict())
    assert set(remove_random_ltd_state_dict({"first.layers.1.random_ltd_layer.inner.weight": 0})) <= names
    engine.destroy()
    with pytest.raises(TypeError, match="takes the engine that initialize"):
        convert_to_random_ltd(built(), Layer)
    engine, *_ = compat.initialize(model=built(), config={**config(), "data_efficiency": {}})
    with pytest.raises(ValueError, match="random-LTD is off"):
        convert_to_random_ltd(engine, Layer)
    engine.destroy()


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"total_layer_num": None}, "random_ltd needs total_layer_num"),
        ({"random_ltd_layer_id": [1, 1]}, r"random_ltd_layer_id \(\[1, 1\]\) must name random_ltd_layer_num \(2\)"),
        ({"random_ltd_layer_id": [1, 4]}, r"each below total_layer_num \(4\)"),
        ({"random_ltd_layer_num": 3}, r"must name random_ltd_layer_num \(3\)"),
        (
            {"random_ltd_schedule": {"min_value": 9, "max_value": 8, "schedule_config": {"require_steps": 3, "seq_per_step": 2}}},
            r"min_value \(9\) is above max_value \(8\)",
        ),
        (
            {"random_ltd_schedule": {"min_value": 4, "max_value": 8, "schedule_config": {"seq_per_step": 2}}},
            "schedule_config.require_steps",
        ),
        ({"layer_token_lr_schedule": {"enabled": True}}, "a learning rate by tokens of layers"),
        ({"hidden_state_order": "dim_seq_batch"}, "hidden_state_order"),
    ],
)
def test_bad_blocks(more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        slipstream.initialize(model=built(), config=config(routing=block(**more)))


def test_layers_that_do_not_fit() -> None:
    engine, *_ = slipstream.initialize(model=built(), config=config(routing=block(model_mask_name="attention_mask")))
    with pytest.raises(ValueError, match="model_mask_name is 'attention_mask', but Layer is called with x, mask, positions"):
        engine(*inputs(0))
    engine.destroy()
    engine, *_ = slipstream.initialize(model=built(), config=config(routing=block(model_mask_name="mask")))
    engine(*inputs(0))
    engine.destroy()

    class Summing(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
            return super().forward(x, mask, positions).sum(1, keepdim=True)

    class Flat(Stack):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.layers[1](x.flatten(0, 1)).mean()

    engine, *_ = slipstream.initialize(
        model=built(Summing), config=config(routing=block(random_ltd_layer_id=[0], random_ltd_layer_num=1))
    )
    with pytest.raises(TypeError, match=r"of an input of shape \[2, 4, 8\] it returns \(2, 1, 8\)"):
        engine(*inputs(0))
    engine.destroy()
    engine, *_ = slipstream.initialize(model=built(model=Flat), config=config())
    with pytest.raises(TypeError, match="must be hidden states of three dimensions"):
        engine(*inputs(0))
    engine.destroy()
