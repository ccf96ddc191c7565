"""Checkpoints of engines: other world sizes and stages, bit-identical resumption, and failures that change nothing."""

import copy
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import slipstream
from slipstream.activations.random_states import tracked
from slipstream.checkpoint import CheckpointError
from slipstream.checkpoint.document import counterpart
from slipstream.parallel import ColumnParallelLinear, RowParallelLinear
from tests import cases, toy
from tests.pool import distributed, run

DTYPES = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("AdamW", "Muon", *(("Adafactor", "Adagrad", "SGD") if cases.EVERYTHING else ()))


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Tensor:
        return toy.tokens(i, 0)[0]


class Noisy(toy.Lm):
    """Uses every random generator that a checkpoint saves; has a changing buffer, tied and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.blocks[1].requires_grad_(False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        noise = random.random() + numpy.random.rand() + torch.rand(()).item()
        return super().forward(tokens) * (1 + 0.1 * noise)


def build(stage: int, transport: str = "auto", optimizer: str = "AdamW", dtype: str = "bf16") -> Any:
    return slipstream.initialize(
        model=toy.seeded(Noisy),
        training_data=Numbers(),
        config=toy.settings(
            stage,
            transport,
            dtype=dtype,
            gradient_clipping=1.0,
            gradient_accumulation_steps=2,
            optimizer={"type": optimizer, "params": {"lr": 1e-2}},
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        ),
    )[0]


def go(engine: Any, micro_steps: int) -> list[float]:
    """Train and return the losses. Epochs have six micro-batches per rank at world size 2; successive calls continue them."""
    if not hasattr(engine, "stream"):
        engine.stream = slipstream.RepeatingLoader(engine.training_dataloader)
    return [toy.step(engine, next(engine.stream)).item() for _ in range(micro_steps)]


def snapshot(engine: Any) -> dict[str, Any]:
    """All state that a checkpoint restores, complete."""
    states: dict[str, Any] = {f"model.{name}": value for name, value in engine.state_dict().items()}
    for name, _ in engine.module.named_parameters():
        results = engine.optimizer_state(name)
        states |= {f"{name}.{key}": value for key, value in results.items()}
    states |= {name: getattr(engine, name) for name in ("global_steps", "skipped_steps", "micro_steps")}
    return states | {"scale": engine.precision.loss_scale, "lr": engine.lr_scheduler.state_dict()}


def same(results: dict[str, Any], expected: dict[str, Any]) -> None:
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        equal = results[name].equal(value) if isinstance(value, Tensor) else results[name] == value
        assert equal, f"{name}: {results[name]} is not {value}"


def save_somewhere(folder: Path, optimizer: str, stage: int) -> dict[str, Any]:
    engine = build(stage, optimizer=optimizer)
    go(engine, 4)
    engine.save_checkpoint(str(folder), client_state={"epoch": 3})
    state = snapshot(engine)
    engine.destroy()
    return state


def load_elsewhere(folder: Path, optimizer: str, stage: int, transport: str) -> dict[str, Any]:
    engine = build(stage, transport, optimizer)
    path, client = engine.load_checkpoint(str(folder))
    assert path == str(folder / "global_step2") and client == {"epoch": 3}
    state = snapshot(engine)
    go(engine, 2)
    assert engine.global_steps == 3
    engine.destroy()
    return state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saved_at_world_4_stage_3_loads_at_world_2_stage_1(optimizer: str, tmp_path: Path) -> None:
    expected = run(4, save_somewhere, tmp_path, optimizer, 3)[0]
    rows = ((2, 1, "shared"), (1, 0, "auto"), (4, 2, "gloo"))
    for world, stage, transport in rows if cases.EVERYTHING or optimizer == "AdamW" else rows[:1]:
        for results in run(world, load_elsewhere, tmp_path, optimizer, stage, transport):
            same(results, expected)


def test_saved_at_world_1_loads_at_world_4(tmp_path: Path) -> None:
    expected = run(1, save_somewhere, tmp_path, "AdamW", 0)[0]
    same(run(4, load_elsewhere, tmp_path, "AdamW", 3, "gloo")[3], expected)


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_resumes_bit_for_bit(dtype: str, transport: str, tmp_path: Path) -> None:
    """Restores model, optimizer, schedule, loss scale, random states and data position, in the middle of an epoch."""
    for stage in cases.by_turns(cases.stages(transport), DTYPES.index(dtype)):
        folder = str(tmp_path / str(stage))
        engine = build(stage, transport, dtype=dtype)
        go(engine, 8)
        engine.save_checkpoint(folder)
        losses = go(engine, 6)
        expected = snapshot(engine)
        engine.destroy()
        random.seed(5)
        numpy.random.seed(5)
        torch.manual_seed(5)
        engine = build(stage, transport, dtype=dtype)
        assert engine.load_checkpoint(folder)[0] is not None
        assert go(engine, 6) == losses, f"stage {stage}"
        same(snapshot(engine), expected)
        engine.destroy()


def apart(params: list[torch.Tensor], every: int = 2) -> torch.optim.Optimizer:
    """Optimizers whose groups the outer one does not share. Its state has a count, too."""
    optimizer = toy.Lookahead(params, every)
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    optimizer.state["of all"], optimizer.rank, optimizer.is_warm = 0, dist.get_rank(), False  # type: ignore[attr-defined]
    return optimizer


@distributed(world_size=2)
def test_the_states_of_optimizers_inside_an_optimizer_are_saved(tmp_path: Path) -> None:
    states = []
    for stage in (1, 3):
        engine = small(optimizer=apart, zero_optimization={"stage": stage})
        optimizer = engine.optimizer.optimizer
        if stage == 1:
            train(engine, 3)
            optimizer.inner[0].param_groups[0]["lr"] = optimizer.state["of all"] = 0.25
            optimizer.is_warm = True
            engine.save_checkpoint(str(tmp_path))
            train(engine, 1)
            expected = engine.state_dict()
        engine.load_checkpoint(str(tmp_path))
        assert optimizer.rank == engine.rank
        assert (optimizer.calls, optimizer.state["of all"], optimizer.inner[0].param_groups[0]["lr"]) == (3, 0.25, 0.25)
        assert optimizer.seen == 3 and optimizer.is_warm == (stage == 1)  # a flag is neither saved nor changed
        states.append(engine.optimizer.state_dict()["state"])
        train(engine, 1)
        states[-1]["after"] = engine.state_dict()
        same(states[-1]["after"], expected)
        engine.destroy()
        assert {*optimizer.state} == {"of all"}
    for number, expected in states[0].items():
        assert number == "after" or len({"slow", "exp_avg@1", "momentum_buffer@2"} & expected.keys()) == 2
        same(states[1][number], expected)
    toy.Lookahead([torch.zeros(2), torch.zeros(2)]).step()  # the class is as before
    engine = small(optimizer=torch.optim.RMSprop)
    refused = "is a state of an optimizer inside another, and this RMSprop has no such optimizer"
    with pytest.raises(CheckpointError, match=refused):
        engine.load_checkpoint(str(tmp_path))
    strange = engine.optimizer.state_dict() | {"state": {0: {"step@1": 3}}}
    with pytest.raises(ValueError, match=refused):
        engine.optimizer.load_state_dict(strange)
    engine.destroy()


@distributed(world_size=2)
def test_an_optimizers_counts_advance_on_ranks_whose_parameters_rest() -> None:
    """And the handle of a hook that it had before removes it."""
    called: list[int] = []
    handles = []

    def lookahead(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer = toy.Lookahead(params)
        handles.append(optimizer.inner[0].register_step_post_hook(lambda *_: called.append(optimizer.calls)))
        return optimizer

    engine = small(lambda: nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2))), optimizer=lookahead)
    engine.module[1].weight.requires_grad_(False)
    train(engine, 3)
    handles[0].remove()
    train(engine, 1)
    assert called == [0, 1, 2] and engine.optimizer.optimizer.calls == 4
    engine.destroy()


class Scaled(toy.Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@distributed(world_size=2)
def test_states_that_are_not_like_their_parameters_load_back() -> None:
    """Adafactor's sums over rows and columns, and its state of a parameter without dimensions."""
    engine = small(Scaled, optimizer=torch.optim.Adafactor)
    train(engine, 2)
    before = copy.deepcopy(engine.optimizer.state_dict())
    train(engine, 1)
    engine.optimizer.load_state_dict(before)
    for number, expected in before["state"].items():
        same(engine.optimizer.state_dict()["state"][number], expected)
    number, rows = next((number, state["row_var"]) for number, state in before["state"].items() if "row_var" in state)
    before["state"][number]["row_var"] = rows.expand(-1, before["state"][number]["col_var"].shape[-1]).T
    with pytest.raises(ValueError, match=r"row_var of .* has shape .*, but the parameter has shape"):
        engine.optimizer.load_state_dict(before)
    engine.destroy()


# ---- failures


def truncated(folder: Path) -> None:
    largest = max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)


def without_data(folder: Path) -> None:
    max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size).unlink()


def garbage(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix in (".json", ""):
            file.write_bytes(b"\x80\x05garbage")


def flipped(folder: Path) -> None:
    """Detected only when the bytes are read, after the scalars have been loaded."""
    for file in folder.glob("*.bin"):
        file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))


HARMS: dict[str, Callable[[Path], None]] = {
    "truncated": truncated,
    "without data": without_data,
    "garbage": garbage,
    "flipped": flipped,
}


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_bad_checkpoint_is_refused_and_changes_nothing(stage: int, tmp_path: Path) -> None:
    engine = build(stage)
    go(engine, 2)
    for harm in HARMS:
        engine.save_checkpoint(str(tmp_path), tag=harm)
        dist.barrier()
        if engine.rank == 0:
            HARMS[harm](tmp_path / harm)
        dist.barrier()
        go(engine, 1)
        before = snapshot(engine)
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(str(tmp_path), tag=harm)
        same(snapshot(engine), before)
    go(engine, 2)
    engine.destroy()


@distributed(world_size=2)
def test_another_models_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    small = toy.make(toy.seeded(toy.Net), 1)
    small.save_checkpoint(str(tmp_path))
    small.destroy()
    for stage in (0, 3):
        for kind, message in ((toy.Lm, "does not hold"), (lambda: toy.Net(dim=32), r"shape|\(16, 8\)")):
            engine = toy.make(toy.seeded(kind), stage)
            before = toy.checksum(engine)
            with pytest.raises(CheckpointError, match=message):
                engine.load_checkpoint(str(tmp_path))
            assert toy.checksum(engine) == before and engine.global_steps == 0
            engine.destroy()


@distributed(world_size=2)
def test_a_pattern_that_matches_nothing_changes_no_optimizer_state(tmp_path: Path) -> None:
    engine = build(1, optimizer="RMSprop")
    go(engine, 2)
    engine.save_checkpoint(str(tmp_path))
    go(engine, 2)
    before = snapshot(engine)
    with pytest.raises(CheckpointError, match=r"'nohead\.\*' matches no parameter or buffer"):
        engine.load_checkpoint(str(tmp_path), exclude=["nohead.*"])
    same(snapshot(engine), before)
    engine.destroy()


@distributed(world_size=2)
def test_a_missing_checkpoint(tmp_path: Path) -> None:
    engine = build(3)
    for folder, missing in ((tmp_path, f"{tmp_path}/latest"), (tmp_path / "wrong", f"folder {tmp_path}/wrong")):
        with warned() as said:
            assert engine.load_checkpoint(os.path.relpath(folder)) == (None, {})
        assert [f"loaded: {missing} does not exist" in line for line in said] == [True] * (dist.get_rank() == 0)
    with pytest.raises(CheckpointError, match="nowhere"):
        engine.load_checkpoint(str(tmp_path), tag="nowhere")
    engine.destroy()


@distributed(world_size=2)
def test_only_requested_parts_are_loaded(tmp_path: Path) -> None:
    engine = build(2)
    go(engine, 4)
    engine.save_checkpoint(str(tmp_path))
    saved = snapshot(engine)
    engine.destroy()
    engine = build(3)
    engine.load_checkpoint(str(tmp_path), load_module_only=True)
    results = snapshot(engine)
    assert results["model.embedding.weight"].equal(saved["model.embedding.weight"])
    assert results["global_steps"] == 0 and results["embedding.weight.exp_avg"].eq(0).all()
    engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    results = snapshot(engine)
    assert results["global_steps"] == 2 and results["embedding.weight.exp_avg"].eq(0).all()
    engine.destroy()


# ---- what does not fit


@contextmanager
def warned() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("slipstream").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("slipstream").removeHandler(handler)


class SlicedNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(ColumnParallelLinear(8, 16), RowParallelLinear(16, 8))


def small(kind: Callable[[], Any] = toy.Net, data: Any = None, **settings: Any) -> Any:
    given = [name for name in ("lr_scheduler", "optimizer", "mpu") if not isinstance(settings.get(name), dict | None)]
    options = {name: settings.pop(name) for name in given}
    return slipstream.initialize(model=toy.seeded(kind), training_data=data, config=toy.settings(1, **settings), **options)[0]


def train(engine: Any, micro_steps: int) -> None:
    for i in range(micro_steps):
        engine.backward(engine(toy.floats(engine.rank, i)).square().mean())
        engine.step()


@distributed(world_size=2)
def test_a_resumed_run_begins_a_window(tmp_path: Path) -> None:
    engine = small(gradient_accumulation_steps=2)
    train(engine, 3)
    with warned() as said:
        engine.save_checkpoint(str(tmp_path))
    assert engine.rank != 0 or ("the gradients of its 1 backward pass(es) are not saved" in said[0] and "zero_grad()" in said[0])
    engine.zero_grad()
    with warned() as said:
        engine.save_checkpoint(str(tmp_path))
    assert not said, "no gradients are left"
    engine.destroy()
    engine = small(gradient_accumulation_steps=3)
    train(engine, 1)
    engine.load_checkpoint(str(tmp_path), load_module_only=True)
    train(engine, 2)
    assert engine.global_steps == 0, "the window that was under way has ended with the load"
    engine.load_checkpoint(str(tmp_path))
    assert engine.global_steps == 1
    train(engine, 2)
    assert engine.global_steps == 1
    train(engine, 1)
    assert engine.global_steps == 2
    engine.destroy()


def groups(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=1e-2)


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "surplus": ({"kind": lambda: toy.Net(depth=4)}, r"also holds .*blocks\.3.*load_module_strict=False"),
    "missing": ({"kind": lambda: toy.Net(depth=2)}, "does not hold .*load_module_strict=False"),
    "SGD": ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, "SGD and this engine's is AdamW; load_optimizer_states=False"),
    "Lion": ({"optimizer": {"type": "Lion", "params": {"lr": 0.1}}}, "Lion and this .*load_optimizer_states=False"),
    "no optimizer": ({"optimizer": None}, "saved without an optimizer.*load_optimizer_states=False"),
    "groups": ({"optimizer": groups}, "has 2 parameter groups .*load_optimizer_states=False"),
    "schedule": ({"lr_scheduler": step_lr, "scheduler": None}, "another scheduler's; load_lr_scheduler_states=False"),
}
# In the reverse order of the checks, because the changes accumulate
HOSTILE: dict[str, tuple[Callable[[Any], None], str]] = {
    "schedule": (lambda engine: setattr(engine.lr_scheduler, "last_batch_iteration", "x"), "last_batch_iteration is x"),
    "moments' step": (
        lambda engine: setattr(next(engine.states.steps.pieces(engine.units[1:])), "step", "n"),
        "blocks.0.*step is n",
    ),
    "group": (lambda engine: engine.optimizer.param_groups[0].update(lr="fast"), "group 0.lr is fast"),
    "loss scale": (lambda engine: setattr(engine.precision.scaler, "scale", float("nan")), "loss scale is nan"),
    "counter": (lambda engine: setattr(engine, "global_steps", "7"), "global_steps is '7'"),
}


def everything(engine: Any) -> dict[str, Any]:
    options = [{key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups]
    return snapshot(engine) | {"random": torch.get_rng_state(), "python": random.random(), "options": options}


@distributed(world_size=2)
def test_a_mismatch_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    engine = small(scheduler=WARMUP, gradient_accumulation_steps=2)
    train(engine, 2)
    for name, (settings, message) in MISFITS.items():
        other = small(**({"scheduler": WARMUP if name != "no optimizer" else None} | settings))
        if other.states.steps.has_optimizer:
            train(other, 2)
        other.save_checkpoint(str(tmp_path), tag=name)
        other.destroy()
        refused(engine, tmp_path, name, message)
    engine.load_checkpoint(str(tmp_path), tag="surplus", load_module_strict=False)
    engine.load_checkpoint(str(tmp_path), tag="SGD", load_optimizer_states=False)
    engine.load_checkpoint(str(tmp_path), tag="schedule", load_lr_scheduler_states=False)
    engine.destroy()


def by_lambda(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)  # as transformers' Trainer creates it


def older(schedule: Any) -> None:
    """A schedule's state as other versions of torch save it."""
    del schedule._is_initial
    schedule.verbose, schedule.history = False, [0.1, 0.2]


@distributed(world_size=1)
def test_a_schedules_state_of_another_torch_is_loaded(tmp_path: Path) -> None:
    engine, other = small(lr_scheduler=by_lambda, scheduler=None), small(lr_scheduler=by_lambda, scheduler=None)
    train(other, 3)
    older(other.lr_scheduler)
    other.save_checkpoint(str(tmp_path), tag="older")
    other.lr_scheduler._last_lr = [0.1, 0.1]
    other.save_checkpoint(str(tmp_path), tag="two groups")
    engine.lr_scheduler.history = [0.3]
    refused(engine, tmp_path, "two groups", r"_last_lr is \[0.1, 0.1\] .*load_lr_scheduler_states=False")
    engine.load_checkpoint(str(tmp_path), tag="older")
    assert engine.lr_scheduler.last_epoch == 3 and engine.lr_scheduler.history == [0.1, 0.2]
    train(engine, 1)
    assert engine.lr_scheduler.get_last_lr() == [1e-2 * 0.5**4] == [engine.optimizer.param_groups[0]["lr"]]
    engine.destroy()
    other.destroy()


@distributed(world_size=2)
def test_hostile_values_are_refused_and_change_nothing(tmp_path: Path) -> None:
    engine, other = small(scheduler=WARMUP), small(scheduler=WARMUP)
    for each, steps in ((engine, 1), (other, 2)):
        train(each, steps)
    for name, (harm, message) in HOSTILE.items():
        harm(other)
        other.save_checkpoint(str(tmp_path), tag=name)
        refused(engine, tmp_path, name, message)
    engine.destroy()
    other.destroy()


def refused(engine: Any, folder: Path, tag: str, message: str) -> None:
    random.seed(3)
    before = everything(engine)
    random.seed(3)
    with pytest.raises(CheckpointError, match=message):
        engine.load_checkpoint(str(folder), tag=tag)
    same(everything(engine), before)


class Own(IterableDataset[Tensor]):
    """A rank's own shard, which saves its position; rank 1 is one batch ahead."""

    already_sharded = True

    def __init__(self, rank: int) -> None:
        self.at = 2 * rank

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.at += 1
            yield toy.floats(0, self.at)[0]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["at"] < 0:
            raise RuntimeError("no such place")
        self.at = state["at"]


def read_own_shards(folder: Path) -> None:
    rank = dist.get_rank()
    engine = small(data=Own(rank))
    next(iter(engine.training_dataloader))
    train(engine, 1)
    engine.save_checkpoint(str(folder), tag="shards")
    engine.training_dataloader.dataset.at = -rank
    engine.save_checkpoint(str(folder), tag="hostile")
    engine.destroy()
    engine = small(data=Own(rank))
    with pytest.raises(CheckpointError, match=r"rank 1 of 2: .*no such place"):
        engine.load_checkpoint(str(folder), tag="hostile")
    assert engine.training_dataloader.dataset.at == 2 * rank and engine.global_steps == 0
    engine.load_checkpoint(str(folder), tag="shards")
    assert engine.training_dataloader.dataset.at == 2 * rank + 2
    engine.destroy()


def read_other_data(folder: Path) -> None:
    for data in (Own(0), Numbers()):
        engine = small(data=data)
        with warned() as said:
            engine.load_checkpoint(str(folder), tag="shards")
        ranks = "the number of ranks was 2 when the checkpoint was saved and is 1 now"
        assert f"start with a new epoch: {ranks}" in said[0] and engine.global_steps == 1
        next(iter(engine.training_dataloader))
        engine.save_checkpoint(str(folder), tag="numbers")
        engine.destroy()
    fewer = Numbers()
    fewer.__class__ = type("Fewer", (Numbers,), {"__len__": lambda self: 20})
    engine = small(data=fewer)
    with warned() as said:
        engine.load_checkpoint(str(folder), tag="numbers")
    assert "its dataset has 24 samples and this dataset has 20" in said[0]
    assert engine.optimizer_state("inp.weight")["exp_avg"].ne(0).any() and engine.training_dataloader.state_dict()["samples"] == 0
    engine.destroy()


def test_data_positions_are_each_ranks_own_or_left_out(tmp_path: Path) -> None:
    run(2, read_own_shards, tmp_path)
    run(1, read_other_data, tmp_path)


class Alone:
    """An mpu with data-parallel groups of one rank."""

    def __init__(self) -> None:
        self.group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def get_data_parallel_group(self) -> Any:
        return self.group


@distributed(world_size=2)
def test_engines_of_other_groups_are_warned_of(tmp_path: Path) -> None:
    engine = small(mpu=Alone())
    with warned() as said:
        engine.save_checkpoint(str(tmp_path / str(dist.get_rank())))
    assert f"only ([{dist.get_rank()}] of 2): save engines of other groups" in said[0]
    engine.destroy()


@distributed(world_size=2)
def test_ranks_of_a_slice_keep_a_client_state_of_their_own(tmp_path: Path) -> None:
    """As Megatron's random states of dropout in slices. Ranks of another mesh, and replicas, get rank 0's."""
    for tp, expected in ((1, [0, 0]), (2, [0, 1])):
        engine = small(SlicedNet, slipstream={"mesh": {"tp": tp}})
        engine.save_checkpoint(str(tmp_path), f"tp{tp}", client_state={"of": torch.tensor(engine.rank)})
        for tag in ("tp1", f"tp{tp}"):
            _, client = engine.load_checkpoint(str(tmp_path), tag)
            assert client == {"of": expected[engine.rank] if tag == f"tp{tp}" else 0}
        engine.save_checkpoint(str(tmp_path), "rank 0's", client_state={"of": 0} if engine.rank == 0 else None)
        assert engine.load_checkpoint(str(tmp_path), "rank 0's")[1] == {"of": 0}
        engine.destroy()


@distributed(world_size=2)
def test_stages_of_a_pipeline_keep_a_client_state_of_their_own(tmp_path: Path) -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    model = slipstream.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    engine = toy.make(model, 0)
    engine.save_checkpoint(str(tmp_path), client_state={"of": engine.rank})
    assert engine.load_checkpoint(str(tmp_path))[1] == {"of": engine.rank}
    engine.destroy()


@distributed(world_size=2)
def test_a_state_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    engine = small(data=Own(0))
    if engine.rank == 1:
        del engine.training_dataloader.dataset.at
    with pytest.raises(CheckpointError, match="rank 1 of 2: AttributeError"):
        engine.save_checkpoint(str(tmp_path))
    engine.destroy()


class Swapping:
    """A schedule that simulates another process: when it is loaded, it replaces the tag by a newer checkpoint."""

    def __init__(self, swap: Callable[[], None]) -> None:
        self.swap = swap

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.swap()


@distributed(world_size=2)
def test_a_tag_that_is_replaced_while_ranks_read_it_is_read_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def swap() -> None:
        calls.append(1)
        if dist.get_rank() == 0 and (tmp_path / "new").exists():
            (tmp_path / "t").rename(tmp_path / "old")
            (tmp_path / "new").rename(tmp_path / "t")

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    engine = slipstream.initialize(model=torch.nn.Linear(64, 64), config=config, lr_scheduler=Swapping(swap))[0]
    for tag in ("t", "new"):
        engine.backward(engine(torch.ones(1, 64)).sum())
        engine.step()
        engine.save_checkpoint(str(tmp_path), tag)
    expected = engine.state_dict()
    engine.load_checkpoint(str(tmp_path), "t")
    results = engine.state_dict()
    assert len(calls) == 3 and engine.global_steps == 2  # loaded, undone, loaded again
    assert all(results[name].equal(expected[name]) for name in expected)
    engine.destroy()


# ---- random states


def test_a_rank_continues_the_rank_at_its_place() -> None:
    saved = {"pp": 2, "batch": 2, "tp": 2}
    assert [counterpart(saved, saved, rank) for rank in range(8)] == [(rank, 0) for rank in range(8)]
    wider = {"batch": 2, "tp": 4}  # one stage; the new slices continue the first
    assert [counterpart(saved, wider, rank).rank for rank in range(8)] == [0, 1, 0, 0, 2, 3, 2, 2]
    assert [counterpart({"batch": 2}, {"batch": 5}, rank) for rank in range(5)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    assert [counterpart({"batch": 1}, {"batch": 1, "sp": 2}, rank) for rank in range(2)] == [(0, 0), (0, 1)]
    both = [counterpart({"batch": 2, "sp": 2}, {"batch": 4, "sp": 4}, rank) for rank in range(16)]
    assert {each.rank for each in both} == {0, 1, 2, 3} and len(set(both)) == 16  # no two ranks draw the same
    assert [counterpart({"batch": 2, "sp": 2}, {"pp": 2, "batch": 2}, rank).rank for rank in range(4)] == [0, 2, 0, 2]


def draws_after(folder: Path, action: str) -> list[float]:
    rank = torch.distributed.get_rank()
    tracked.reset()
    tracked.add("of slices", 7)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(100 + rank)
    engine = build(1, "auto")
    if action == "save":
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(rank)
        with tracked.fork("of slices"):
            torch.rand(rank + 1)
        engine.save_checkpoint(str(folder))
    else:
        assert engine.load_checkpoint(str(folder))[0] is not None
    engine.destroy()
    with tracked.fork("of slices"):
        apart = float(torch.rand(()))
    tracked.reset()
    return [float(torch.rand(())), float(numpy.random.rand()), random.random(), apart]


def test_random_states_continue_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Ranks that were there go on; those that were not get streams of their own, the same in each load."""
    saved = run(2, draws_after, tmp_path, "save")
    three, again = (run(3, draws_after, tmp_path, "load") for _ in range(2))
    assert three[:2] == saved and three == again
    assert not set(three[2]) & {value for draws in saved for value in draws}
    assert run(1, draws_after, tmp_path, "load") == saved[:1]
