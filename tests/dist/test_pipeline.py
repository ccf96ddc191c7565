"""Pipelines: the same bits as one stage, for every schedule and ZeRO stage, and as plain torch."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss

import slipstream
from slipstream.checkpoint import CheckpointError
from slipstream.parallel.layers import LayerSpec, TiedLayerSpec
from slipstream.parallel.mail import PairMail
from slipstream.parallel.module import DualPipeVModule, PipelineError, PipelineModule
from slipstream.parallel.topology import PipeModelDataParallelTopology, ProcessTopology
from slipstream.train import changes, handover, pipeline
from slipstream.world.watch import PeerError
from tests import cases, probe, toy
from tests.dist.test_axes import Enter, Leave
from tests.dist.test_noise import Recorder
from tests.pool import distributed

DIM, STEPS, CLIP, MICRO = 8, cases.STEPS, 0.05, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


def layers() -> list[Any]:
    return [LayerSpec(nn.Linear, 8, DIM), *(LayerSpec(Block) for _ in range(6)), LayerSpec(nn.Linear, DIM, 4)]


def module(kind: type[PipelineModule] = PipelineModule, **kwargs: Any) -> PipelineModule:
    torch.manual_seed(0)
    return kind(layers(), **{"loss_fn": mse_loss, "seed_layers": True} | kwargs)


def batches(index: int, step: int, count: int = MICRO, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    return [(toy.floats(index, step, k).to(dtype), toy.floats(index, step, 100 + k)[:, :4].to(dtype)) for k in range(count)]


def make(model: nn.Module, stage: int, transport: str, **blocks: Any) -> Any:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    settings: dict[str, Any] = {"gradient_clipping": CLIP, "gradient_accumulation_steps": MICRO, "optimizer": optimizer}
    return toy.make(model, stage, transport, **(settings | blocks))


def train(engine: Any, steps: int = STEPS) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(steps):
        loss = engine.train_batch(iter(batches(engine.mesh.batch.index, step, engine.micro_batches)))
        losses.append(loss.item())
        norms.append(engine.global_grad_norm)
    return losses, norms


def twin(
    num_batches: int, count: int = MICRO, build: Callable[..., PipelineModule] | None = None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Plain torch in one process, on the batches of all data-parallel ranks. build: of the model (default: `module`)."""
    whole = module(num_stages=1, stages=(0,)) if build is None else build(whole=True, num_stages=1, stages=(0,))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        pairs = [pair for index in range(num_batches) for pair in batches(index, step, count)]
        loss = torch.stack([mse_loss(whole.chunk(0)(x), y) for x, y in pairs]).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(whole.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, dict(whole.state_dict())


def decoder(**changes: Any) -> nn.Module:
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'slipstream[hf]'")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | {"initializer_range": 0.2} | changes))
    return model


def token_samples(index: int, step: int, count: int = MICRO) -> Iterator[dict[str, Tensor]]:
    ids = [toy.tokens(index, step, k) % 64 for k in range(count)]
    return iter([{"input_ids": each, "labels": each} for each in ids])


SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "num_chunks": 2},
    {"schedule": "zero_bubble"},
    {"schedule": "zero_bubble", "num_chunks": 2},
    {"schedule": "1f1b", "kind": DualPipeVModule},
)


@distributed(world_size=4, transports=("shared", "gloo"))
def test_two_stages_train_as_one_process(transport: str) -> None:
    losses, norms, weights = twin(2)
    assert all(norm > CLIP for norm in norms)
    for stage in cases.stages(transport):
        engine = make(module(num_stages=2), stage, transport)
        assert (engine.num_stages, engine.mesh.batch.size, engine.plan.batch.train_batch_size) == (2, 2, 2 * 2 * MICRO)
        assert engine.is_first_stage() is (engine.rank < 2) and engine.is_last_stage() is (engine.rank >= 2)
        assert train(engine) == (pytest.approx(losses, rel=1e-5), pytest.approx(norms, rel=1e-5)), stage
        state = engine.state_dict()
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], atol=2e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        engine.destroy()


class Group:
    """An mpu of consecutive ranks."""

    def __init__(self, size: int) -> None:
        self.group, _ = dist.new_subgroups(size)

    def get_data_parallel_group(self) -> Any:
        return self.group


def states_of(engine: Any) -> dict[str, Tensor]:
    """Weights, masters and moments by name, of all stages. Collective."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, probe.states(engine))
    return {name: value for each in every for name, value in each.items()}


def same_bits(
    transport: str, dtype: str, stage: int, dp: int, num_stages: int, schedules: Any, optimizer: Any = None, steps: int = 2
) -> None:
    given = {} if optimizer is None else {"optimizer": optimizer}
    config = toy.settings(stage, transport, dtype=dtype, gradient_accumulation_steps=MICRO, gradient_clipping=CLIP, **given)
    single = slipstream.initialize(model=module(num_stages=1, stages=(0,)), config=config, mpu=Group(dp))[0]
    want_losses, want_norms = train_on(single, dp, steps)
    want = states_of(single)
    single.destroy()
    for options in schedules:
        model = module(options.get("kind", PipelineModule), num_stages=num_stages, num_chunks=options.get("num_chunks", 1))
        blocks = {"slipstream": {"pipeline": {"schedule": options["schedule"]}}}
        engine = make(model, stage, transport, dtype=dtype, optimizer=config["optimizer"], **blocks)
        losses, norms = train_on(engine, dp, steps)  # squares of a norm are added in fp64, by rank
        assert (losses, norms) == (want_losses, pytest.approx(want_norms, rel=1e-14)), (stage, options)
        got = states_of(engine)
        assert got.keys() == want.keys()
        for name, value in got.items():
            assert torch.equal(value, want[name]), (stage, dp, options, name)
        engine.destroy()


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_two_stages_have_the_bits_of_one(transport: str, dtype: str) -> None:
    """At the same data-parallel size; the schedules by turns, and all with every ZeRO stage in `make test-all`."""
    for stage in cases.stages(transport) if dtype == "fp32" else (3,):
        same_bits(transport, dtype, stage, dp=2, num_stages=2, schedules=SCHEDULES[stage::4])


@distributed(world_size=2)
def test_mail_as_between_gpus_has_the_bits_of_one_stage() -> None:
    """Messages that are matched by order, a group for each key; gloo in place of NCCL. No schedule waits for itself."""

    def connect(axis: Any, device: torch.device, transport: str, watch: Any, routes: Any, slots: int) -> PairMail:
        return PairMail(axis, device, watch, routes, backend="gloo")

    with pytest.MonkeyPatch.context() as patch:  # the ranks run other tests later
        patch.setattr(pipeline, "connect_mail", connect)
        same_bits("gloo", "fp32", 1, dp=1, num_stages=2, schedules=SCHEDULES)


@distributed(world_size=2)
def test_a_leaf_class_of_another_stage_is_not_missing() -> None:
    warned: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes.logger, "warning", lambda text, rule, wanted: warned.append(wanted))
        zero = {"stage": 1, "leaf_module": {"classes": ["LayerNorm", "Missing"]}}
        stages = PipelineModule([LayerSpec(nn.Linear, DIM, DIM), LayerSpec(Block)], num_stages=2, loss_fn=mse_loss)
        make(stages, 1, "shared", zero_optimization=zero).destroy()
    assert warned == ["Missing"]


@pytest.mark.slow
@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_schedule_has_the_bits_of_one_stage(transport: str, dtype: str) -> None:
    for stage in cases.stages(transport):
        same_bits(transport, dtype, stage, dp=2, num_stages=2, schedules=SCHEDULES)
        same_bits(transport, dtype, stage, dp=1, num_stages=4, schedules=SCHEDULES)


@distributed(world_size=4)
@pytest.mark.parametrize(
    ("kind", "stage", "wire"),
    [
        ("OneBitAdam", 2, "shared"),
        *(
            pytest.param(kind, stage, wire, marks=pytest.mark.slow)
            for kind in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
            for stage, wire in ((0, "gloo"), (1, "shared"), (3, "gloo"))
        ),
    ],
)
def test_stages_exchange_the_signs_of_one(kind: str, stage: int, wire: str) -> None:
    """Two dense steps, then signs: each stage has its own servers, and the same bits."""
    counts = {"var_freeze_step": 2, "local_step_clipper": 1} if kind == "ZeroOneAdam" else {"freeze_step": 2}
    optimizer = {"type": kind, "params": {"lr": 1e-2, "betas": [0.9, 0.99], **counts}}
    same_bits(wire, "fp32", stage, dp=2, num_stages=2, schedules=SCHEDULES[:1], optimizer=optimizer, steps=4)


def train_on(engine: Any, dp: int, steps: int = 2) -> Any:
    """As `train`, where each group of `dp` ranks that are one engine sees the batches of the first."""
    losses, norms = [], []
    for step in range(steps):
        loss = engine.train_batch(iter(batches(engine.mesh.batch.index % dp, step, MICRO, engine.plan.precision.param_dtype)))
        losses.append(loss.item())
        norms.append(engine.global_grad_norm)
    return losses, norms


class Embed(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(toy.VOCABULARY, DIM)


def to_logits(module: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.linear(x, module.weight)  # type: ignore[arg-type]


def language(num_stages: int, **kwargs: Any) -> PipelineModule:
    """A model whose embedding is also its last layer."""
    torch.manual_seed(0)
    specs = [
        TiedLayerSpec("embed", Embed),
        *(LayerSpec(Block) for _ in range(4)),
        TiedLayerSpec("embed", Embed, forward_fn=to_logits),
    ]
    loss = lambda logits, ids: nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())  # noqa: E731
    return PipelineModule(specs, num_stages=num_stages, loss_fn=loss, partition_method="uniform", seed_layers=True, **kwargs)


def token_batches(index: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    return iter([(ids := toy.tokens(index, step, k), ids) for k in range(MICRO)])


@distributed(world_size=4, transports=("shared", "gloo"))
def test_tied_layers_and_checkpoints(transport: str, tmp_path: Path) -> None:
    """A tied embedding trains as in one process; a checkpoint of two stages resumes in two stages and as one."""
    whole = language(1, stages=(0,))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(4):
        optimizer.zero_grad()
        pairs = [pair for index in range(2) for pair in token_batches(index, step)]
        loss = torch.stack([whole.loss(whole.chunk(0)(x), (x, y)) for x, y in pairs]).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(whole.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    for stage in (0, 1, 2, 3) if cases.EVERYTHING else (2,) if transport == "shared" else (3,):
        engine = make(language(2), stage, transport)
        for step in range(2):
            assert engine.train_batch(token_batches(engine.mesh.batch.index, step)).item() == pytest.approx(losses[step], rel=1e-5)
            assert engine.global_grad_norm == pytest.approx(norms[step], rel=1e-5), stage
        folder = str(tmp_path / f"stage {stage}")
        engine.save_checkpoint(folder)
        evaluated = engine.eval_batch(token_batches(engine.mesh.batch.index, 2)).item()
        assert evaluated == pytest.approx(losses[2], rel=1e-5)
        for step in (2, 3):
            engine.train_batch(token_batches(engine.mesh.batch.index, step))
        want = states_of(engine)
        engine.destroy()
        other = make(language(2), 3 - stage, transport)
        other.load_checkpoint(folder)
        for step in (2, 3):
            assert other.train_batch(token_batches(other.mesh.batch.index, step)).item() == pytest.approx(losses[step], rel=1e-5)
        for name, value in states_of(other).items():
            torch.testing.assert_close(value, want[name], atol=2e-5, rtol=1e-4)
        other.destroy()
        alone = make(language(1, stages=(0,)), 1, transport)
        alone.load_checkpoint(folder)
        assert alone.global_steps == 2
        state = alone.state_dict()
        alone.destroy()
        assert state.keys() == whole.state_dict().keys()


@distributed(world_size=2)
def test_the_schedule_of_the_config() -> None:
    """`slipstream.pipeline.schedule`: the order of actions, and the most micro-batches whose activations are kept."""
    for name, most in (("gpipe", MICRO), ("1f1b", 2)):
        model = module(num_stages=2)
        engine = make(model, 1, "auto", slipstream={"pipeline": {"schedule": name}})
        assert engine.schedule.style == name and engine.schedule.peaks[0] == most
        kept = [0, 0]  # now, most

        def forward(*_: Any, kept: list[int] = kept) -> None:
            kept[:] = kept[0] + 1, max(kept[1], kept[0] + 1)

        def backward(*_: Any, kept: list[int] = kept) -> None:
            kept[0] -= 1

        block = model.get_submodule("1" if engine.is_first_stage() else "5")
        block.register_forward_hook(forward)
        block.register_full_backward_hook(backward)
        engine.train_batch(iter(batches(0, 0)))
        assert kept[1] == engine.schedule.peaks[engine.stage_id], name
        engine.destroy()


TIERS: dict[str, tuple[int, tuple[str, ...]]] = {  # by name: the ZeRO stage, and the blocks whose states rest on disk
    "optimizer": (1, ("offload_optimizer",)),
    "optimizer and weights": (3, ("offload_optimizer", "offload_param")),
}


@pytest.mark.disk
@distributed(world_size=4)
@pytest.mark.parametrize("tier", [pytest.param("optimizer", marks=pytest.mark.slow), "optimizer and weights"])
def test_stages_with_states_on_disk(tier: str, tmp_path: Path) -> None:
    """Losses, norms, weights, masters and moments have the bits of a pipeline in memory."""
    stage, blocks = TIERS[tier]
    results = []
    for names in ((), blocks):
        zero: dict[str, Any] = {name: {"device": "nvme", "nvme_path": str(tmp_path)} for name in names}
        engine = make(module(num_stages=2), stage, "auto", dtype="bf16", zero_optimization={"stage": stage, **zero})
        losses, norms = train_on(engine, 2)
        results.append((losses, norms, states_of(engine)))
        assert all(type(unit.master).__name__ == ("DiskStore" if names else "MemoryStore") for unit in probe.units(engine))
        engine.destroy()
    (*want_figures, want), (*figures, got) = results
    assert figures == want_figures
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@distributed(world_size=2)
def test_a_schedule_of_learning_rates_and_its_resumption(tmp_path: Path) -> None:
    """Both stages step with the rates of `WarmupDecayLR`, and a resumed pipeline goes on with them."""
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear"}}
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2}
    blocks = {"scheduler": scheduler | {"params": scheduler["params"] | params}}
    engine = make(module(num_stages=2), 1, "auto", **blocks)
    rates = []
    for step in range(5):
        engine.train_batch(iter(batches(0, step)))
        rates.append(engine.optimizer.param_groups[0]["lr"])
        if step == 2:
            engine.save_checkpoint(str(tmp_path))
    want = states_of(engine)
    engine.destroy()
    assert rates == pytest.approx([0.0, 5e-3, 1e-2, 7.5e-3, 5e-3])
    resumed = make(module(num_stages=2), 1, "auto", **blocks)
    resumed.load_checkpoint(str(tmp_path))
    for step in (3, 4):
        resumed.train_batch(iter(batches(0, step)))
        assert resumed.optimizer.param_groups[0]["lr"] == rates[step]
    got = states_of(resumed)
    assert all(torch.equal(got[name], want[name]) for name in want)
    resumed.destroy()


@distributed(world_size=2)
def test_what_one_stage_alone_has_is_excluded_or_refused_on_all(tmp_path: Path) -> None:
    """A layer that the checkpoint lacks, and one of another shape, both on the last stage."""

    def ending(*last: LayerSpec) -> Any:
        return make(PipelineModule([*layers()[:-1], *last], num_stages=2, loss_fn=mse_loss), 1, "gloo")

    head = LayerSpec(nn.Linear, DIM, 4)
    engine = ending(head)
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    engine = ending(head, LayerSpec(nn.LayerNorm, 4))
    assert engine.load_checkpoint(str(tmp_path), exclude=["*8.*"])[0] is not None
    engine.destroy()
    engine = ending(LayerSpec(nn.Linear, DIM, 5))
    with pytest.raises(CheckpointError, match=r"rank 1 of 2: .*has shape \(4, 8\) in the checkpoint and \(5, 8\)"):
        engine.load_checkpoint(str(tmp_path))
    engine.destroy()


@distributed(world_size=4)
def test_an_overflow_on_one_stage_is_skipped_by_all() -> None:
    """fp16: one scale and one verdict. An infinite gradient on the last stage leaves the weights of the first as they are."""
    engine = make(module(num_stages=2), 2, "auto", dtype="fp16", fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    good = lambda step: iter(batches(engine.mesh.batch.index, step, MICRO, torch.float16))  # noqa: E731
    engine.train_batch(good(0))
    assert engine.step_applied and engine.precision.loss_scale == 2.0**8
    before = states_of(engine)
    micros = batches(engine.mesh.batch.index, 1, MICRO, torch.float16)
    if engine.mesh.batch.index == 1:  # one replica, one micro-batch, and only the targets, which the last stage alone reads
        micros[2] = (micros[2][0], torch.full_like(micros[2][1], float("inf")))
    engine.train_batch(iter(micros))
    assert engine.overflow and engine.skipped_steps == 1 and engine.precision.loss_scale == 2.0**7, engine.rank
    after = states_of(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)
    engine.train_batch(good(2))
    assert engine.step_applied and engine.precision.loss_scale == 2.0**7
    engine.destroy()


@distributed(world_size=4)
def test_gradients_reduced_after_each_micro_batch() -> None:
    """`slipstream.pipeline.reduce`: the same training, and at stage 3 no whole gradients between micro-batches."""
    losses, norms, _ = twin(2)
    for stage in (1, 3):
        engine = make(module(num_stages=2), stage, "auto", slipstream={"pipeline": {"reduce": "micro_batch"}})
        assert train(engine) == (pytest.approx(losses, rel=1e-5), pytest.approx(norms, rel=1e-5)), stage
        assert stage < 3 or all(unit.memory.local is None for unit in engine.units)
        engine.destroy()


@distributed(world_size=2)
def test_the_stages_of_the_config() -> None:
    """`pipeline.stages` and `slipstream.mesh.pp` must be those of the module."""
    with pytest.raises(ValueError, match=r"pipeline.stages \(1\) and the model or an argument \(2\)"):
        make(module(num_stages=2), 1, "auto", pipeline={"stages": 1})
    engine = make(module(num_stages=2), 1, "auto", pipeline={"stages": 2})
    assert engine.num_stages == 2 and engine.grid.get_pipe_parallel_rank() == engine.stage_id
    engine.destroy()


@distributed(world_size=2)
def test_recomputed_layers() -> None:
    """`pipeline.activation_checkpoint_interval`: each block runs twice, and results are the same bits."""
    results, calls = [], []
    for interval in (0, 2):
        model = module(num_stages=2)
        engine = make(model, 2, "auto", pipeline={"activation_checkpoint_interval": interval})
        count = [0]
        block = model.get_submodule("1" if engine.is_first_stage() else "5")
        block.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        results.append(train_on(engine, 1))
        calls.append(count[0])
        engine.destroy()
    assert results[0] == results[1]
    assert calls == [2 * MICRO, 4 * MICRO]
    results.clear(), calls.clear()
    for interval in (0, 1):  # the blocks of an unmodified decoder
        engine = make(decoder(), 2, "auto", pipeline={"stages": 2, "activation_checkpoint_interval": interval})
        count = [0]
        block = engine.module.get_submodule(f"model.layers.{2 * engine.stage_id}.mlp")
        block.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        results.append([float(engine.train_batch(token_samples(0, step))) for step in range(2)])
        calls.append(count[0])
        engine.destroy()
    assert results[0] == results[1]
    assert calls == [2 * MICRO, 4 * MICRO]
    with pytest.raises(ValueError, match=r"has no stages; drop it, or set slipstream\.activations"):
        make(nn.Linear(2, 2), 1, "auto", pipeline={"activation_checkpoint_interval": 1})


@distributed(world_size=2)
def test_what_an_evaluation_returns() -> None:
    """Each option of `eval_batch`, against the layers in one process; and what sets the data of a step."""
    engine, whole = make(module(num_stages=2), 1, "shared"), module(num_stages=1, stages=(0,)).chunk(0).eval()
    is_last, index = engine.is_last_stage(), engine.mesh.batch.index
    data = batches(index, 0)
    with torch.no_grad():
        outputs = [whole(x) for x, _ in data]
        losses = [mse_loss(out, y) for out, (_, y) in zip(outputs, data, strict=True)]
    close = torch.testing.assert_close
    close(engine.eval_batch(iter(data)), torch.stack(losses).mean())
    close(engine.eval_batch(iter(data), num_micro_batches=2), torch.stack(losses[:2]).mean())
    each = engine.eval_batch(iter(data), reduce_output=None)
    assert (each is not None) is is_last
    if is_last:
        close(torch.stack(each), torch.stack(losses))
    loss, logits = engine.eval_batch(iter(data), return_logits=True)
    close(loss, torch.stack(losses).mean())
    last = engine.eval_batch(iter(data), compute_loss=False)
    assert (logits is not None) is is_last and (last is not None) is is_last
    if is_last:
        close(logits, outputs[-1])
        close(last, torch.stack(outputs).mean(0))
    assert (engine.eval_batch(iter(data), bcast_loss=False) is not None) is is_last
    with pytest.raises(ValueError, match="reduce_output='sum'"):
        engine.eval_batch(iter(data), reduce_output="sum")
    with pytest.raises(ValueError, match="num_micro_batches=0"):
        engine.eval_batch(iter(data), num_micro_batches=0)
    engine.set_batch_fn(lambda pair: (pair[0] * 2, pair[1]))
    doubled = float(engine.eval_batch(iter(data)))
    assert doubled != pytest.approx(float(loss))
    engine.set_dataiterator(iter(data))
    first = float(engine.train_batch())
    assert first == pytest.approx(doubled, rel=1e-5)
    engine.set_dataloader(data)
    assert float(engine.train_batch()) < first and float(engine.train_batch()) < first  # again from its start
    engine.reset_activation_shape()
    records: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.logger, "info", lambda text, *values: records.append(text % values))
        engine.mem_status("after two steps", print_rank=1)
        engine.mem_status("all", reset_max=True)
    assert len(records) == 1 + (engine.rank == 1) and "MiB, at most" in records[0]
    engine.destroy()


class Reporting(PipelineModule):
    """Reports a loss of each of its own micro-batches."""

    def get_additional_losses(self) -> dict[str, Any]:
        self.count = getattr(self, "count", 0) + 1
        return {"aux": torch.tensor(2.0 + dist.get_rank()), "count": self.count}


@distributed(world_size=4)
def test_additional_losses_are_reported_on_all_ranks() -> None:
    """DeepSpeed's get_additional_losses: means over micro-batches and ranks; and the last stage's sum of losses."""
    engine, plain = (make(module(kind, num_stages=2), 1, "shared") for kind in (Reporting, PipelineModule))
    assert engine.get_additional_losses() is None and engine.total_loss is None
    data = batches(engine.mesh.batch.index, 0)
    assert engine.train_batch(iter(data)) == plain.train_batch(iter(data))
    extra = engine.get_additional_losses()
    assert extra == {"aux": 4.5, "count": 2.5}  # of ranks 2 and 3; of 1, 2, 3, 4
    assert plain.get_additional_losses() is None
    assert (engine.total_loss is not None) is engine.is_last_stage()
    totals: list[Any] = [None] * 4
    dist.all_gather_object(totals, None if engine.total_loss is None else float(engine.total_loss))
    assert totals[:2] == [None, None] and float(engine.agg_train_loss) == pytest.approx(sum(totals[2:]) / (2 * MICRO))
    engine.eval_batch(iter(data), num_micro_batches=1)
    assert engine.get_additional_losses() == {"aux": 4.5, "count": 5.0}
    engine.set_has_attention_mask(True)
    with pytest.raises(TypeError, match="takes a bool"):
        engine.set_has_attention_mask(1)
    engine.destroy()
    plain.destroy()


@distributed(world_size=2)
def test_few_micro_batches_are_told() -> None:
    for count, schedule, told in ((1, "zero_bubble", "25%"), (4, "1f1b", "20%"), (4, "zero_bubble", ""), (8, "1f1b", "")):
        engine = make(
            module(num_stages=2), 1, "auto", gradient_accumulation_steps=count, slipstream={"pipeline": {"schedule": schedule}}
        )
        notes = [note for note in engine.plan.notes if "few micro-batches" in note]
        assert len(notes) == bool(told) and all(told in note for note in notes), (count, schedule)
        engine.destroy()


@distributed(world_size=2)
def test_a_checkpoint_function_of_the_users() -> None:
    calls: list[int] = []

    def keep(function: Any, *args: Any) -> Any:
        calls.append(len(args))
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    plain, own = (
        make(module(num_stages=2, **extra), 1, "shared")
        for extra in ({}, {"activation_checkpoint_interval": 2, "activation_checkpoint_func": keep})
    )
    assert train(own) == train(plain) and calls
    plain.destroy()
    own.destroy()


@distributed(world_size=2)
def test_monitors_get_the_loss_of_their_own_step() -> None:
    custom = {f"{Recorder.__module__}.Recorder": {}}
    engine = make(module(num_stages=2), 1, "shared", slipstream={"monitors": {"custom": custom}})
    losses, _ = train(engine)
    size = engine.plan.batch.train_batch_size
    engine.destroy()
    if dist.get_rank() == 0:
        seen = [(event.samples, event.value) for event in Recorder.made.pop().seen if event.tag == "Train/Samples/train_loss"]
        assert seen == [(size * (step + 1), pytest.approx(loss)) for step, loss in enumerate(losses)]


@distributed(world_size=4)
def test_a_step_is_drawn_as_it_ran() -> None:
    """Two pipelines of two stages, each with every action of its own ranks, once and in the schedule's order."""
    engine = make(module(num_stages=2), 1, "auto", slipstream={"pipeline": {"schedule": "zero_bubble"}})
    with pytest.raises(ValueError, match="none has run"):
        engine.draw()
    train(engine, 2)
    text, picture = engine.draw(width=200), ElementTree.fromstring(engine.draw("svg"))
    title, first, second = text.splitlines()[:3]
    assert title.startswith("zero_bubble, 2 ranks, 4 micro-batches, measured: step ") and "idle" in title
    assert first.startswith("rank 0 |") and second.startswith("rank 1 |")
    drawn = [each.text.split(":")[0] for each in picture.iter("{http://www.w3.org/2000/svg}title")]
    expected = [f"{kind} chunk {chunk} micro-batch {micro}" for row in engine.schedule.actions for kind, chunk, micro in row]
    assert drawn == expected
    with pytest.raises(ValueError, match=r"draw\(form='png'\): use 'text' or 'svg'"):
        engine.draw("png")
    engine.destroy()


@distributed(world_size=2)
def test_stages_of_a_model_that_has_none_are_refused() -> None:
    """Each rank would train a copy of its own, without a reduction."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for blocks in ({"pipeline": {"stages": 2}}, {"slipstream": {"mesh": {"pp": 2}}}):
        with pytest.raises(ValueError, match=r"2 pipeline stages .* Sequential is neither a slipstream\.PipelineModule"):
            make(model, 1, "auto", **blocks)
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 20}
    small = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, **sizes))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no repeated layers to cut into pipeline stages"):
        make(small, 1, "auto", pipeline={"stages": 2})


@distributed(world_size=4)
def test_more_stages_than_layers_are_refused_with_a_number_that_works() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has 3 layers, fewer than the 4 pipeline stages; 2 work on 4 ranks"):
        make(decoder(num_hidden_layers=3), 1, "auto", pipeline={"stages": 4})


@distributed(world_size=2)
def test_a_stage_that_cannot_be_handed_over_stops_all() -> None:
    engine = make(module(num_stages=2), 1, "auto")

    def refuse(states: Any) -> Any:
        raise ValueError("its adapter cannot be merged")

    with pytest.MonkeyPatch.context() as patch:
        if engine.stage_id == 1:
            patch.setattr(handover, "_source", refuse)
        with pytest.raises(ValueError, match="its adapter cannot be merged"):
            list(engine.named_weights())
    assert len(list(engine.named_weights())) == len(list(module(num_stages=1, stages=(0,)).parameters()))
    engine.destroy()


@pytest.mark.slow
@distributed(world_size=2)
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_a_step_is_that_of_torchs_own_pipeline(name: str) -> None:
    """torch.distributed.pipelining on the same stages: losses and updated weights."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    engine = make(module(num_stages=2), 0, "gloo", optimizer=optimizer, gradient_clipping=0.0)
    micros = batches(0, 0)
    rank, parts = engine.stage_id, engine.module.parts
    whole = module(num_stages=1, stages=(0,))
    own = nn.Sequential(*(whole.get_submodule(str(i)) for i in range(parts[rank], parts[rank + 1])))
    stage = PipelineStage(own, rank, 2, torch.device("cpu"))
    losses: list[Tensor] = []
    schedule = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[name](stage, MICRO, loss_fn=mse_loss)
    inputs, targets = (torch.cat(each) for each in zip(*micros, strict=True))
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=losses)
    loss = engine.train_batch(iter(micros))
    if losses:
        assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)
    for key, value in engine.state_dict().items():
        param = whole.get_parameter(key)
        torch.testing.assert_close(value, param.detach() - 0.1 * param.grad, atol=1e-6, rtol=1e-6)
    engine.destroy()


@pytest.mark.disk
@distributed(world_size=2)
def test_stages_sleep_on_disk(tmp_path: Path) -> None:
    losses = []
    for sleeps in (False, True):
        engine = make(module(num_stages=2), 3, "auto")
        train(engine, 1)
        if sleeps:
            assert engine.sleep(device="disk", path=str(tmp_path)) > 0
            engine.wake()
        losses.append(train(engine))
        engine.destroy()
    assert losses[0] == losses[1]


@distributed(world_size=2)
def test_what_a_pipeline_refuses() -> None:
    engine = make(module(num_stages=2), 1, "auto")
    for call in (lambda: engine(1), lambda: engine.backward(1), lambda: engine.step()):
        with pytest.raises(PipelineError, match="Only train_batch"):
            call()
    with torch.no_grad(), pytest.raises(RuntimeError, match="requires gradients enabled"):
        engine.train_batch(iter([]))
    with pytest.raises(ValueError, match="has no data"):
        engine.train_batch()
    engine.destroy()
    engine = make(module(num_stages=1, loss_fn=lambda out, y: (mse_loss(out, y), out.mean())), 1, "auto")
    for call in (engine.train_batch, engine.eval_batch):
        with pytest.raises(ValueError, match=r"must be a scalar tensor, not tuple: pass a loss_fn= .*get_additional_losses\(\)"):
            call(iter(batches(0, 0)))
    engine.destroy()


@distributed(world_size=4)
def test_data_that_ends_or_fails_stops_all_ranks() -> None:
    """Also the ranks of the stages between, which read none; the next batch trains as if nothing had been."""
    engine = make(module(num_stages=4), 1, "shared", slipstream={"pipeline": {"schedule": "zero_bubble"}})
    plain = make(module(num_stages=4), 1, "shared", slipstream={"pipeline": {"schedule": "zero_bubble"}})
    for _ in range(2):
        with pytest.raises(StopIteration, match=f"the iterator of rank 0 ended after 3 of the {MICRO} micro-batches"):
            engine.train_batch(iter(batches(0, 0, MICRO if engine.stage_id == 3 else 3)))
    with pytest.raises(StopIteration, match="the iterator of rank 3 ended after 1"):
        engine.eval_batch(iter(batches(0, 0, 1 if engine.stage_id == 3 else MICRO)))

    def failing() -> Iterator[Any]:
        yield from batches(0, 0, 2)
        raise OSError("the file is gone")

    errors = {0: OSError, 1: PeerError, 2: PeerError, 3: PeerError}
    with pytest.raises(errors[engine.stage_id], match="the file is gone" if engine.stage_id == 0 else "rank 0 could not read"):
        engine.train_batch(failing() if engine.stage_id == 0 else iter(batches(0, 0)))
    assert train(engine, 1) == train(plain, 1)
    plain.destroy()
    engine.destroy()
    linear = [each for each in engine.module.modules() if type(each) is nn.Linear]
    assert linear and not any("forward" in vars(each) for each in linear)  # the layers compute as before


class Sliced(nn.Module):
    """Column and row layers of our own, or the user's, marked as Megatron's are."""

    def __init__(self, own: bool, group: Any, index: int) -> None:
        super().__init__()
        self.up, self.down, self.own, self.group = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM), own, group
        if own:
            up, down = slipstream.parallel.ColumnParallelLinear(DIM, 4 * DIM), slipstream.parallel.RowParallelLinear(4 * DIM, DIM)
            up.load_state_dict(self.up.state_dict())
            down.load_state_dict(self.down.state_dict())
            self.up, self.down = up, down
        elif group is not None:
            rows = slice(2 * DIM * index, 2 * DIM * (index + 1))
            self.up.weight = nn.Parameter(self.up.weight.detach()[rows].clone())
            self.up.bias = nn.Parameter(self.up.bias.detach()[rows].clone())
            self.down.weight = nn.Parameter(self.down.weight.detach()[:, rows].clone())
            for param, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):
                param.tensor_model_parallel, param.partition_dim = True, dim  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if self.own or self.group is None:
            return x + self.down(gelu(self.up(x)))
        hidden = gelu(self.up(Enter.apply(x, self.group)))
        return x + Leave.apply(nn.functional.linear(hidden, self.down.weight), self.group) + self.down.bias


@distributed(world_size=4)
@pytest.mark.parametrize(("own", "stage"), [(True, 1), (False, 3)])
def test_a_topology_with_a_model_axis(own: bool, stage: int) -> None:
    """Three axes by DeepSpeed's class, with our layers and with the user's: as one process on a data-parallel rank's batch."""
    group = None if own else dist.new_subgroups(2)[0]

    def build(whole: bool = False, **kwargs: Any) -> PipelineModule:
        torch.manual_seed(0)
        specs = [LayerSpec(nn.Linear, 8, DIM)]
        specs += [LayerSpec(Sliced, own and not whole, None if whole else group, dist.get_rank() % 2) for _ in range(4)]
        return PipelineModule([*specs, LayerSpec(nn.Linear, DIM, 4)], loss_fn=mse_loss, seed_layers=True, **kwargs)

    plain = build(whole=True, num_stages=1, stages=(0,))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    engine = make(build(topology=PipeModelDataParallelTopology(2, 2, 1)), stage, "shared")
    assert engine.mesh.sizes == {"pp": 2, "batch": 1, "tp": 2} and engine.plan.batch.train_batch_size == 2 * MICRO
    assert (engine.grid.get_slice_parallel_world_size(), engine.grid.get_data_parallel_world_size()) == (2, 1)
    for step in range(STEPS):
        loss = engine.train_batch(iter(batches(0, step)))
        optimizer.zero_grad()
        expected = torch.stack([mse_loss(plain.chunk(0)(x), y) for x, y in batches(0, step)]).mean()
        expected.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
        assert engine.global_grad_norm == pytest.approx(float(norm), rel=1e-5)
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], atol=2e-5, rtol=1e-4)
    engine.destroy()


def of_three_axes(whole: bool = False, **kwargs: Any) -> PipelineModule:
    torch.manual_seed(0)
    specs = [LayerSpec(nn.Linear, 8, DIM), *(LayerSpec(Sliced, not whole, None, 0) for _ in range(4)), LayerSpec(nn.Linear, DIM, 4)]
    return PipelineModule(specs, loss_fn=mse_loss, seed_layers=True, **kwargs)


@distributed(world_size=8)
def test_three_axes_of_two_are_one_process() -> None:
    """pp 2 x dp 2 x tp 2 at each ZeRO stage: the losses, norms and weights of plain torch on both replicas' batches; equal bits."""
    losses, norms, weights = twin(2, build=of_three_axes)
    sums = set()
    for stage in range(4) if cases.EVERYTHING else (1, 3):
        engine = make(of_three_axes(topology=PipeModelDataParallelTopology(2, 2, 2)), stage, "auto")
        assert engine.mesh.sizes == {"pp": 2, "batch": 2, "tp": 2}
        assert engine.mesh.names == {rank: f"stage {rank // 4}, tp {rank % 2}" for rank in range(8)}
        own, own_norms = train(engine)
        assert own == pytest.approx(losses, rel=1e-5) and own_norms == pytest.approx(norms, rel=1e-5), stage
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, weights[name], atol=2e-5, rtol=1e-4)
        sums.add(int(toy.checksum(engine)))
        engine.destroy()
    assert len(sums) == 1


@pytest.mark.slow
@distributed(world_size=8)
@pytest.mark.parametrize(("stage", "axes"), [(1, "tp"), (2, "tp"), (3, "tp"), (1, "sp"), (3, "sp")])
def test_a_decoder_on_three_axes_of_two(stage: int, axes: str) -> None:
    """pp 2 x dp 2 x tp 2 (or sp 2) of an unmodified Llama: the losses of plain torch within 1e-5 over 20 steps of two batches."""
    plain = decoder()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1)
    own = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}, "slipstream": {"mesh": {"pp": 2, axes: 2}}}
    engine = make(decoder(), stage, "auto", **own)
    for step in range(20):
        micros = [list(token_samples(index, step)) for index in range(2)]
        optimizer.zero_grad()
        expected = torch.stack([plain(**each, use_cache=False).loss for samples in micros for each in samples]).mean()
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        assert float(engine.train_batch(iter(micros[engine.mesh.batch.index]))) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], atol=1e-4, rtol=0)
    engine.destroy()


@distributed(world_size=4)
def test_topologies_that_are_not_the_meshs_are_refused() -> None:
    other = module(topology=ProcessTopology(["data", "pipe"], [2, 2]))
    with pytest.raises(ValueError, match=r"(?s)topology has \{'data': 2, 'pipe': 2\}, .*PipeModelDataParallelTopology\(num_pp=2, "):
        make(other, 1, "auto")
    model = module(topology=PipeModelDataParallelTopology(2, 2, 1))
    with pytest.raises(ValueError, match=r"slipstream.mesh.tp \(1\) and the model or an argument \(2\)"):
        make(model, 1, "auto", slipstream={"mesh": {"tp": 1}})
    engine = make(module(num_stages=2), 1, "auto")
    assert engine.grid.topology().sizes == {"pipe": 2, "data": 2}
    engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_chunks_of_a_decoder(stage: int) -> None:
    """`slipstream.pipeline.chunks` and v: the bits of one stage per rank; in v but for rounding, as embeddings are tied."""
    results: list[Any] = []
    orders = []
    for own in ({}, {"chunks": 2}, {"schedule": "zero_bubble", "chunks": 2}, {"schedule": "v"}):
        engine = make(decoder(tie_word_embeddings=True), stage, "auto", pipeline={"stages": 2}, slipstream={"pipeline": own})
        orders.append((str(engine.schedule.style), engine.module.stages))
        embed: Any = decoder(tie_word_embeddings=True).get_input_embeddings()  # type: ignore[operator]
        embedded = [{"inputs_embeds": embed(each["input_ids"]), "labels": each["labels"]} for each in token_samples(0, 9)]
        assert float(engine.eval_batch(iter(embedded))) == float(engine.eval_batch(token_samples(0, 9)))
        losses = [float(engine.train_batch(token_samples(0, step))) for step in range(2)]
        results.append((own, losses, states_of(engine)))
        assert float(engine.eval_batch(token_samples(0, 9))) < 10
        engine.destroy()
    own_stages = [{0: (0,), 1: (1,)}, {0: (0, 2), 1: (1, 3)}, {0: (0, 2), 1: (1, 3)}, {0: (0, 3), 1: (1, 2)}]
    styles = ("1f1b", "interleaved", "zero_bubble", "v")
    assert orders == [(style, stages[dist.get_rank()]) for style, stages in zip(styles, own_stages, strict=True)]
    for own, losses, states in results[1:]:
        assert losses == pytest.approx(results[0][1], rel=0 if own != {"schedule": "v"} else 1e-6)
        assert states.keys() == results[0][2].keys()
        for name, value in states.items():
            if own == {"schedule": "v"}:  # one rank has both ends, and adds their gradients as they come
                torch.testing.assert_close(value, results[0][2][name], rtol=1e-4, atol=2e-6)
            else:
                assert torch.equal(value, results[0][2][name]), (own, name)
    for model, own, text in (
        (decoder(), {"schedule": "v", "chunks": 2}, r"chunks \(2\) is for the schedules 1f1b and zero_bubble"),
        (module(num_stages=2), {"chunks": 2}, "PipelineModule has 1 stages on each rank: build it with num_chunks=2"),
        (module(num_stages=2), {"schedule": "v"}, "for v as a DualPipeVModule"),
    ):
        with pytest.raises(ValueError, match=text):
            make(model, stage, "auto", pipeline={"stages": 2}, slipstream={"pipeline": own})


def slow(model: Any, layer: int) -> Any:
    """The decoder with one layer that takes far longer than the others."""
    forward = model.model.layers[layer].forward
    model.model.layers[layer].forward = lambda *args, **kwargs: (time.sleep(0.1), forward(*args, **kwargs))[1]
    return model


@distributed(world_size=4)
def test_engines_of_parts_of_the_world_measure_their_own_layers() -> None:
    part = dist.get_rank() // 2
    model, config = slow(decoder(num_hidden_layers=5), 4 * part), toy.settings(1, pipeline={"stages": 2, "partition": "profile"})
    engine: Any = slipstream.initialize(model=model, config=config, mpu=Group(2))[0]
    assert engine.module.parts == ([0, 4, 5] if part else [0, 1, 5])
    engine.destroy()


@distributed(world_size=2)
def test_the_partition_of_the_config() -> None:
    """`pipeline.partition` of a decoder whose head is as large as its blocks."""
    sizes = {"num_hidden_layers": 5, "vocab_size": 64 * 16}

    def parts(method: str, model: Any = None, **blocks: Any) -> list[int]:
        engine = make(model or decoder(**sizes), 1, "auto", pipeline={"stages": 2, "partition": method}, **blocks)
        found: list[int] = engine.module.parts
        engine.destroy()
        return found

    assert parts("best") == parts("parameters") != parts("uniform") == [0, 3, 5]
    assert parts("type:decoderlayer") == [0, 3, 5] or parts("type:decoderlayer") == [0, 2, 5]
    assert parts("profile", slow(decoder(**sizes), 0)) == [0, 1, 5]
    with pytest.raises(RuntimeError, match="'type:Nothing' matches none of the layers' classes"):
        parts("type:Nothing")
    with pytest.raises(ValueError, match=r"pipeline\.partition 'thirds' is none of parameters, uniform, type:REGEX, profile"):
        parts("thirds")
    with torch.device("meta"):
        empty = decoder(**sizes)
    with pytest.raises(ValueError, match="'profile' measures LlamaForCausalLM, whose weights are on meta"):
        parts("profile", empty)


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "OPT"])
def test_a_decoder_of_transformers(transport: str, kind: str, tmp_path: Path) -> None:
    """`mesh.pp` cuts an unmodified model, with tied embeddings: losses, norms and weights as in one process, which loads them."""
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'slipstream[hf]'")

    def model() -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "tie_word_embeddings": True, "initializer_range": 0.2}
        if kind == "Llama":
            layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **layers, num_attention_heads=2))
        if kind == "OPT":
            layers = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 4, "word_embed_proj_dim": 16, "init_std": 0.2}
            return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, **layers, num_attention_heads=2, dropout=0.0))
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, n_embd=16, n_layer=4, n_head=2))

    def samples(index: int, step: int) -> list[dict[str, Tensor]]:
        ids = [toy.tokens(index, step, k) % 64 for k in range(MICRO)]
        return [{"input_ids": each, "labels": each} for each in ids]

    whole = model()
    adamw = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}  # biases of keys have no gradient but its rounding
    optimizer = torch.optim.AdamW(whole.parameters(), **adamw)
    losses, norms = [], []
    for step in range(2):
        optimizer.zero_grad()
        loss = torch.stack([whole(**each).loss for index in range(2) for each in samples(index, step)]).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(whole.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    for stage in (1, 3) if (transport, kind) == ("shared", "Llama") else (3,):
        engine = make(model(), stage, transport, pipeline={"stages": 2}, optimizer={"type": "AdamW", "params": adamw})
        for step in range(2):
            loss = engine.train_batch(iter(samples(engine.mesh.batch.index, step)))
            assert loss.item() == pytest.approx(losses[step], rel=1e-5)
            assert engine.global_grad_norm == pytest.approx(norms[step], rel=1e-4)
        if dist.get_rank() == 0:  # alone: it is not collective
            assert engine.grid.get_pipe_parallel_rank() == engine.stage_id and engine.grid.get_data_parallel_world_size() == 2
        engine.save_checkpoint(str(tmp_path / f"{stage}"))
        engine.destroy()
        alone = make(model(), 0, transport)
        alone.load_checkpoint(str(tmp_path / f"{stage}"))
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(value, whole.state_dict()[name], atol=1e-4, rtol=1e-3)
        alone.destroy()


class Steep(nn.Module):
    """A layer with the gradient of an energy of its own, as in a force field."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        at = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(torch.tanh(self.energy(at)).square().sum(), at, create_graph=True)
        return x + self.out(force)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_stages_that_take_derivatives_themselves(stage: int) -> None:
    """Weight gradients that wait are those of the backward of the loss."""

    def build(whole: bool = False, **kwargs: Any) -> PipelineModule:
        torch.manual_seed(0)
        specs = [LayerSpec(nn.Linear, 8, DIM), LayerSpec(Steep), LayerSpec(Steep), LayerSpec(nn.Linear, DIM, 4)]
        return PipelineModule(specs, loss_fn=mse_loss, seed_layers=True, **kwargs)

    losses, norms, _ = twin(1, build=build)
    for schedule in ("1f1b", "zero_bubble"):
        engine = make(build(num_stages=2), stage, "auto", slipstream={"pipeline": {"schedule": schedule}})
        assert train(engine) == (pytest.approx(losses, rel=1e-5), pytest.approx(norms, rel=1e-5)), schedule
        engine.destroy()
