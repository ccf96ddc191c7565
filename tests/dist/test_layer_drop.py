"""Progressive layer dropping: parity with a loop that drops the same blocks, bytes that fall, and resumed draws."""

import logging
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.compat import engine as compat
from slipstream.train.layer_drop import LayerDrop, ProgressiveLayerDrop
from tests.pool import distributed

BLOCKS, WIDTH = 4, 16


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Pairs(Residual):
    """As layers of transformers that return tuples."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), "kept"


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module] = Residual) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(8, WIDTH), nn.ModuleList(block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return x.square().mean()


def built(block: type[nn.Module] = Residual) -> Stack:
    torch.manual_seed(0)
    return Stack(block)


def config(stage: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        "progressive_layer_drop": {"enabled": True, "theta": 0.2, "gamma": 0.3},
        **more,
    }


def batch(step: int, micro: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 100 + micro * 10 + rank))


def train(engine: Any, steps: range, rank: int = 0) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(2):
            loss = engine(batch(step, micro, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def twin(steps: int, ranks: int = 1) -> tuple[list[list[float]], list[int], Stack]:
    """A plain loop: losses of each rank, the number of blocks that each forward keeps, the model."""
    model, drop = built(), LayerDrop(0.2, 0.3, 0)
    drop.blocks = {block: (i, i / BLOCKS) for i, block in enumerate(model.blocks, 1)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    kept = []
    for step in range(steps):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        for micro in range(2):
            dropped = drop.draw(step, micro)
            kept.append(BLOCKS - len(dropped))
            for rank in range(ranks):
                x = model.enter(batch(step, micro, rank))
                for block in model.blocks:
                    if block not in dropped:
                        x = x + (block(x) - x) / drop.keep_probability(block)
                loss = x.square().mean()
                (loss / 2 / ranks).backward()
                losses[rank].append(loss.item())
        optimizer.step()
    return losses, kept, model


def test_the_schedule() -> None:
    for theta in (0.0, 0.1, 0.9, 1.0):
        drop = ProgressiveLayerDrop(theta, 0.001)
        assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
        for step in (0, 1, 10, 999, 10_000):
            drop.update_state(step)
            assert drop.get_theta() == (1.0 - theta) * numpy.exp(-0.001 * step) + theta
    drop = LayerDrop(0.5, 1.0, 0)
    drop.current_theta = 0.5
    drop.blocks = {nn.Identity(): (i, i / 12) for i in range(1, 13)}
    assert sum(map(drop.keep_probability, drop.blocks)) / 12 == pytest.approx(1 - 0.5 * 13 / 24)


def test_the_engine_of_deepspeed_tells_theta() -> None:
    engine, *_ = compat.initialize(model=built(), config=config() | {"gradient_accumulation_steps": 1})
    for step in range(1, 4):
        loss = engine(batch(step, 0))
        engine.backward(loss)
        engine.step()
        assert engine.get_pld_theta() == 0.8 * float(numpy.exp(-0.3 * step)) + 0.2
    assert engine.pld_enabled() and not engine.curriculum_enabled_legacy()
    assert isinstance(engine.progressive_layer_drop, ProgressiveLayerDrop)
    engine.destroy()
    engine, *_ = compat.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})
    assert engine.get_pld_theta() is None and not engine.pld_enabled()
    engine.destroy()


def test_draws_have_their_probability() -> None:
    drop = LayerDrop(0.5, 100.0, seed=3)
    drop.blocks = {nn.Identity(): (i, i / 10) for i in range(1, 11)}
    dropped = [drop.draw(step, 0) for step in range(1, 2001)]
    for i, block in enumerate(drop.blocks, 1):
        assert abs(sum(block in each for each in dropped) / 2000 - i / 20) < 0.04


@pytest.mark.parametrize("block", [Residual, Pairs])
@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_are_dropped(block: type[nn.Module], recompute: bool) -> None:
    losses, kept, model = twin(5)
    assert min(kept) < BLOCKS
    more: dict[str, Any] = {"slipstream": {"activations": "recompute"}} if recompute else {}
    engine, *_ = slipstream.initialize(model=built(block), config=config(**more))
    assert train(engine, range(5)) == pytest.approx(losses[0], rel=1e-5)
    for mine, other in zip(engine.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)
    engine.eval()
    with torch.no_grad():
        assert engine(batch(9, 9)).item() == pytest.approx(model(batch(9, 9)).item(), rel=1e-5)
    own = engine.module.blocks[0]
    engine.destroy()
    assert type(own) is block


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_as_one_process(stage: int, transport: str) -> None:
    rank = dist.get_rank()
    losses, _, model = twin(5, ranks=2)
    engine, *_ = slipstream.initialize(model=built(), config=config(stage, slipstream={"transport": transport}))
    assert train(engine, range(5), rank) == pytest.approx(losses[rank], rel=1e-5)
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], atol=1e-6, rtol=1e-5)
    engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_dropped_blocks_are_neither_gathered_nor_reduced(stage: int) -> None:
    _, kept, _ = twin(6)
    engine, *_ = slipstream.initialize(model=built(), config=config(stage, slipstream={"transport": "gloo"}))
    calls = {"_start_gather": 0, "reduce": 0}

    def counted(name: str, function: Any) -> Any:
        def run(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for unit, name in ((unit, name) for unit in engine.units if unit.block is not None for name in calls):
            patch.setattr(unit, name, counted(name, getattr(unit, name)))
        train(engine, range(6), dist.get_rank())
    assert sum(kept) < 12 * BLOCKS
    assert calls == {"_start_gather": 2 * sum(kept) if stage == 3 else 0, "reduce": sum(kept)}
    engine.destroy()


@distributed(world_size=2)
def test_a_resumed_run_draws_the_same(tmp_path: Path) -> None:
    rank = dist.get_rank()
    engine, *_ = slipstream.initialize(model=built(), config=config(3))
    train(engine, range(2), rank)
    engine.save_checkpoint(str(tmp_path))
    losses = train(engine, range(2, 5), rank)
    engine.destroy()
    engine, *_ = slipstream.initialize(model=built(), config=config(3))
    engine.load_checkpoint(str(tmp_path))
    assert train(engine, range(2, 5), rank) == losses
    engine.destroy()


def test_a_forward_that_takes_the_keywords_drops_by_itself() -> None:
    seen: list[float] = []

    class Own(Stack):
        def forward(self, x: Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0) -> Tensor:
            assert progressive_layer_drop == self.training
            seen.append(pld_theta)
            return super().forward(x)

    engine, *_ = slipstream.initialize(model=Own(), config=config())
    train(engine, range(2))
    assert seen == [1.0, 1.0, *[0.8 * float(numpy.exp(-0.3)) + 0.2] * 2]
    assert type(engine.module.blocks[0]) is Residual
    engine.destroy()


def test_models_that_cannot_drop_are_refused() -> None:
    with pytest.raises(TypeError, match="no repeated residual blocks"):
        slipstream.initialize(model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config=config())

    class Wider(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, :8]

    class Plain(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner(self.norm(x)) + self.inner(x))

    for block in (Wider, Plain):
        engine, *_ = slipstream.initialize(model=built(block), config=config())
        with pytest.raises(TypeError, match=f"{block.__name__} is no residual block"):
            engine(batch(0, 0))
        engine.destroy()
    with pytest.raises(ValueError, match="ignore_unused_parameters"):
        slipstream.initialize(model=built(), config=config(zero_optimization={"stage": 0, "ignore_unused_parameters": False}))


def test_transformers_decoders_drop_their_layers(tmp_path: Path) -> None:
    import copy

    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, **sizes))
    engine, *_ = slipstream.initialize(model=model, config=config() | {"gradient_accumulation_steps": 1})
    calls = [0]
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    ids = torch.randint(64, (4, 12))
    for _ in range(6):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    assert 6 <= calls[0] < 18
    other = copy.deepcopy(model.model.layers[0])
    assert type(other) is transformers.models.llama.modeling_llama.LlamaDecoderLayer
    engine.destroy()


class Post(Residual):
    """The norm comes after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + torch.tanh(self.inner(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("block", [Residual, Post])
def test_blocks_with_norms_after_their_sums_are_named(block: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    engine, *_ = slipstream.initialize(model=built(block), config=config())
    for _ in range(2):
        engine.backward(engine(batch(0, 0)))
    assert [record.getMessage().count("Post normalizes after") for record in caplog.records if "post-LN" in record.message] == (
        [1] if block is Post else []
    )
    engine.destroy()


def tiny_t5() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 4, "vocab_size": 32}
    return transformers.T5EncoderModel(transformers.T5Config(dropout_rate=0.0, **sizes))


T5_IDS = torch.arange(24).view(2, 12) % 32


def t5_losses(engine: Any, steps: range) -> list[float]:
    losses = []
    for _ in range(2 * len(steps)):
        loss = engine(input_ids=T5_IDS).last_hidden_state[..., 0].square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def t5_twin(steps: int) -> list[float]:
    """A plain loop in which dropped blocks hand the position bias on; the first one, which makes it, is never dropped."""
    model, drop = tiny_t5(), LayerDrop(0.2, 3.0, 0)
    drop.blocks = {block: (i, i / 4 if i > 1 else 0.0) for i, block in enumerate(model.encoder.block, 1)}
    optimizer, losses, counts = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), [], []

    def around(block: nn.Module, own: Any) -> Any:
        def forward(x: Tensor, mask: Any, bias: Any, *args: Any, **kwargs: Any) -> Any:
            if block in drop.dropped:
                return x, bias, None
            output = own(x, mask, bias, *args, **kwargs)
            return x + (output[0] - x) / drop.keep_probability(block), *output[1:]

        return forward

    for block in drop.blocks:
        block.forward = around(block, block.forward)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(2):
            counts.append(len(drop.draw(step, micro)))
            loss = model(input_ids=T5_IDS).last_hidden_state[..., 0].square().mean()
            (loss / 2).backward()
            losses.append(loss.item())
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        optimizer.step()
    assert max(counts[4:]) > 1
    return losses


T5_DROP: dict[str, Any] = {"progressive_layer_drop": {"enabled": True, "theta": 0.2, "gamma": 3.0}}


def test_later_blocks_keep_what_a_first_one_makes(tmp_path: Path) -> None:
    """The position bias of T5's first block reaches all that are called, whichever are dropped, also after a resumption."""
    expected = t5_twin(5)
    for start in range(1, 5):
        engine, *_ = slipstream.initialize(model=tiny_t5(), config=config(**T5_DROP))
        assert t5_losses(engine, range(start)) == pytest.approx(expected[: 2 * start], rel=1e-4)
        engine.save_checkpoint(str(tmp_path), tag=str(start))
        engine.destroy()
        engine, *_ = slipstream.initialize(model=tiny_t5(), config=config(**T5_DROP))
        engine.load_checkpoint(str(tmp_path), tag=str(start))
        assert t5_losses(engine, range(start, 5)) == pytest.approx(expected[2 * start :], rel=1e-4)
        engine.destroy()


@distributed(world_size=2)
def test_what_later_blocks_keep_at_stage_3() -> None:
    engine, *_ = slipstream.initialize(model=tiny_t5(), config=config(3, slipstream={"activations": "recompute"}, **T5_DROP))
    assert t5_losses(engine, range(4)) == pytest.approx(t5_twin(4), rel=1e-4)
    engine.destroy()


def test_blocks_that_others_need_are_refused() -> None:
    class Making(Residual):
        def forward(self, x: Tensor, more: Tensor | None = None) -> Any:
            return super().forward(x), torch.ones(1) if more is None else more

    class Adding(Residual):
        def forward(self, x: Tensor, more: Tensor | None = None) -> Any:
            out = super().forward(x)
            return out, out if more is None else out + more

    class Handing(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x, more = self.enter(x), None
            for block in self.blocks:
                x, more = block(x, more)
            return x.square().mean()

    for kind in (Making, Adding):
        engine, *_ = slipstream.initialize(model=Handing(kind), config=config())
        with pytest.raises(TypeError, match=rf"given what others make \({kind.__name__}'s output 1\)"):
            engine(batch(0, 0))
        engine.destroy()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own check
def test_compiled_blocks_are_dropped() -> None:
    losses, kept, _ = twin(4)
    assert min(kept) < BLOCKS
    engine, *_ = slipstream.initialize(model=built(), config=config(compile={"enabled": True, "backend": "aot_eager"}))
    assert train(engine, range(4)) == pytest.approx(losses[0], rel=1e-5)
    engine.destroy()


def test_each_stack_has_a_depth_of_its_own() -> None:
    class Two(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.others = nn.ModuleList(Residual() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in (*self.blocks, *self.others):
                x = block(x)
            return x.square().mean()

    model = Two()
    engine, *_ = slipstream.initialize(model=model, config=config())
    drop = engine.states.resources["layer drop"]
    assert [drop.blocks[block] for block in model.others] == [(5, 0.5), (6, 1.0)]
    assert [drop.blocks[block] for block in model.blocks] == [(i, i / 4) for i in range(1, 5)]
    engine.destroy()


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


@distributed(world_size=2)
@pytest.mark.parametrize("style", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("recompute", [0, 2])
def test_a_pipeline_drops_the_same_blocks(style: str, recompute: int) -> None:
    losses, kept, model = twin(5)
    assert min(kept) < BLOCKS
    whole = built()
    layers = [whole.enter, *whole.blocks, Squares()]
    module = slipstream.PipelineModule(layers, num_stages=2, partition_method="uniform", activation_checkpoint_interval=recompute)
    more = {"slipstream": {"pipeline": {"schedule": style}}}
    engine, *_ = slipstream.initialize(model=module, config=config(**more))
    for step in range(5):
        loss = engine.train_batch(iter([(batch(step, micro), None) for micro in range(2)]))
        assert float(loss) == pytest.approx(sum(losses[0][2 * step : 2 * step + 2]) / 2, rel=1e-5)
    theirs = [model.enter, *model.blocks]
    for i, layer in enumerate(theirs):
        mine = dict(module.named_children()).get(str(i))
        for one, other in zip(mine.parameters() if mine is not None else (), layer.parameters(), strict=mine is not None):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    engine.destroy()


class Adapted(Residual):
    """A block that may have more parameters, and makes nothing more."""

    def __init__(self, has_more: bool) -> None:
        super().__init__()
        self.adapter = nn.Linear(WIDTH, WIDTH) if has_more else None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.adapter is None else x + torch.tanh(self.adapter(x)))


@distributed(world_size=2)
def test_blocks_with_more_parameters_are_named_and_kept_on_every_layout() -> None:
    """Also where the blocks with less, from which they differ, are on another stage."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("slipstream").addHandler(handler)
    losses = []
    for pp in (1, 2):
        torch.manual_seed(0)
        layers = [nn.Linear(8, WIDTH), *(Adapted(i > 2) for i in range(6)), Squares()]
        module = slipstream.PipelineModule(layers, num_stages=pp, partition_method="uniform")
        engine, *_ = slipstream.initialize(model=module, config=config())
        losses.append([float(engine.train_batch(iter([(batch(step, micro), None) for micro in range(2)]))) for step in range(5)])
        depths = {block.adapter is not None: depth for block, (_, depth) in engine.states.resources["layer drop"].blocks.items()}
        assert depths and not depths.get(True) and depths.get(False) != 0.0
        engine.destroy()
    logging.getLogger("slipstream").removeHandler(handler)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert [text for text in said if "never drops" in text and "4, " in text] or dist.get_rank()


LAYOUTS: list[dict[str, Any]] = [
    {"mesh": {"pp": 2}},
    {"mesh": {"pp": 2}, "activations": "recompute"},
    {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}},
]


@distributed(world_size=2)
def test_stages_and_shares_of_tokens_of_an_unmodified_model() -> None:
    """What connects the first and the last block to other ranks happens also where they are dropped, and to what they add."""
    transformers = pytest.importorskip("transformers")

    def train(own: dict[str, Any]) -> list[float]:
        torch.manual_seed(3)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, num_hidden_layers=5, **sizes))
        engine, *_ = slipstream.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 3,
                "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
                "progressive_layer_drop": {"enabled": True, "theta": 0.2, "gamma": 10.0},
                "zero_optimization": {"stage": 1},
                "slipstream": own,
            },
        )
        found = []
        for step in range(4):
            ids = torch.randint(64, (3, 2, 8), generator=torch.Generator().manual_seed(step))
            batches = [{"input_ids": each, "labels": each} for each in ids]
            if engine.mesh.pp.size > 1:
                found.append(float(engine.train_batch(iter(batches))))
            else:
                losses = []
                for each in batches:
                    losses.append(loss := engine(**each).loss)
                    engine.backward(loss)
                    engine.step()
                found.append(sum(loss.item() for loss in losses) / 3)
            found.append(engine.global_grad_norm)
        engine.destroy()
        return found

    expected = train({})  # both ranks have the same batches
    for own in LAYOUTS:
        assert train(own) == pytest.approx(expected, rel=1e-4), own
