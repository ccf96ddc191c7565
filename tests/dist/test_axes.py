"""Parameters over tp, sp and pp: with whom gradients are added and by how many ranks they are divided, against one process.

The models split their own layers, with torch's collectives, so that these tests do not depend on slipstream.parallel.
"""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, linear

from slipstream.world.mesh import gather_objects
from slipstream.zero.leaves import mark_part, mark_tied
from tests import cases, toy
from tests.pool import distributed

DIM, STEPS, CLIP = 8, cases.STEPS, 0.05
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


class Enter(torch.autograd.Function):
    """The same input on all ranks of a group, which use it differently."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Leave(torch.autograd.Function):
    """The sum of the group's outputs, which all ranks use alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Layer(nn.Module):
    """Two linear layers with a norm of the hidden values, which each tp rank computes for its own share of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM, bias=False)
        self.inner = nn.LayerNorm(DIM // 2)  # of each head of DIM // 2 hidden values
        self.group: Any = None

    def split(self, group: Any) -> None:
        """Keep this rank's share. The down weight is cut into two ranges per rank, as fused projections are."""
        size, index = dist.get_world_size(group), dist.get_rank(group)
        share, half = 4 * DIM // size, 2 * DIM // size
        ranges = tuple((start + index * half, start + (index + 1) * half) for start in (0, 2 * DIM))
        rows = torch.cat([torch.arange(*each) for each in ranges])
        with torch.no_grad():
            for module, dim in ((self.up, 0), (self.down, 1)):
                module.weight.data = module.weight.index_select(dim, rows).contiguous()
                mark_part(module.weight, "tp", size, dim, whole=4 * DIM, ranges=ranges)
            self.up.bias.data = self.up.bias[rows].contiguous()
        mark_part(self.up.bias, "tp", size, whole=4 * DIM, ranges=ranges)
        for param in self.inner.parameters():
            mark_part(param, "tp", 1)
        self.group = group
        assert self.up.weight.shape == (share, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = gelu(self.up(h if self.group is None else Enter.apply(h, self.group)))
        h = self.inner(h.unflatten(-1, (-1, DIM // 2))).flatten(-2)
        out = self.down(h)
        return x + (out if self.group is None else Leave.apply(out, self.group))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, DIM)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.out = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x).square().mean()


def twin(batches: Any, model: nn.Module | None = None) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and weights of plain torch in one process; batches(step): what the mean is over."""
    torch.manual_seed(0)
    model = model or Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([model(batch) for batch in batches(step)]).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, dict(model.state_dict())


def make(model: nn.Module, stage: int, transport: str, optimizer: Any = OPTIMIZER, **mesh: int) -> Any:
    return toy.make(model, stage, transport, gradient_clipping=CLIP, optimizer=optimizer, slipstream={"mesh": mesh})


@distributed(world_size=3)
def test_values_of_any_length_are_gathered() -> None:
    """All short, all long, and one of each."""
    for lengths in ((0, 5, 900), (9000, 5000, 2000), (0, 1024, 1)):
        values = [{"rank": rank, "text": "x" * length} for rank, length in enumerate(lengths)]
        assert gather_objects(values[dist.get_rank()]) == values


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_layers_in_parts(transport: str, tp: int, tmp_path: Path) -> None:
    """`slipstream.mesh.tp`: parts, copies with equal gradients and copies with partial ones, at each stage, as one process."""
    num_batches = 4 // tp
    losses, norms, weights = twin(lambda step: [toy.floats(i, step) for i in range(num_batches)])
    assert all(norm > CLIP for norm in norms)
    group, _ = dist.new_subgroups(tp)
    for stage in cases.stages(transport):
        torch.manual_seed(0)
        model = Model()
        for block in model.blocks:
            block.split(group)
        engine = make(model, stage, transport, tp=tp)
        assert (engine.mesh.tp.size, engine.mesh.batch.size) == (tp, num_batches)
        assert engine.plan.batch.train_batch_size == 2 * num_batches
        for step in range(STEPS):
            loss = engine(toy.floats(engine.mesh.batch.index, step))
            engine.backward(loss)
            engine.step()
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            assert mean.item() == pytest.approx(losses[step], abs=2e-6)
            assert engine.global_grad_norm == pytest.approx(norms[step], rel=1e-5), (stage, step)
        state = engine.state_dict()
        assert state.keys() == weights.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], atol=2e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        engine.save_checkpoint(folder := str(tmp_path / f"{tp} {stage}"))
        whole = toy.make(toy.seeded(Model), 0, transport, optimizer=OPTIMIZER)
        whole.load_checkpoint(folder)
        assert all(torch.equal(value, state[name]) for name, value in whole.state_dict().items())
        whole.save_checkpoint(folder, tag="whole")
        whole.destroy()
        engine.load_checkpoint(folder, tag="whole")
        assert all(torch.equal(value, state[name]) for name, value in engine.state_dict().items())
        engine.load_state_dict(weights)
        for name, value in engine.state_dict().items():
            assert torch.equal(value, weights[name]), name
        engine.destroy()


@distributed(world_size=4)
def test_the_layout_is_logged() -> None:
    """Which ranks hold which stage, and slices that two hosts share."""
    group, _ = dist.new_subgroups(2)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("slipstream.train")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    host = os.environ.get("LOCAL_WORLD_SIZE", "")
    for per_host, warned in ((4, False), (1, True)):
        os.environ["LOCAL_WORLD_SIZE"] = str(per_host)
        said.clear()
        model = Model()
        for block in model.blocks:
            block.split(group)
        engine = make(model, 1, "gloo", tp=2)
        assert engine.mesh.names == {rank: f"tp {rank % 2}" for rank in range(4)}
        text = "\n".join(said)
        if engine.rank == 0:
            assert "mesh data 2 x tp 2\n  host " in text and text.count("mesh data") == 1
            assert ("host 1" in text) is warned and ("ranks 0, 1 are on several hosts" in text) is warned
            assert ("use tp 1" in text) is warned
        engine.destroy()
    os.environ["LOCAL_WORLD_SIZE"] = host
    logger.removeHandler(handler)
    logger.setLevel(level)


@distributed(world_size=4, transports=("shared", "gloo"))
def test_parts_of_a_sequence(transport: str) -> None:
    """`slipstream.mesh.sp` and `sequence_parallel_size`: ranks of one sample average their gradients, and share its batch index."""
    halves = lambda index, step: toy.floats(index, step).chunk(2)  # noqa: E731
    losses, norms, weights = twin(lambda step: [half for i in range(2) for half in halves(i, step)])
    for stage in cases.stages(transport):
        torch.manual_seed(0)
        engine = toy.make(
            Model(), stage, transport, gradient_clipping=CLIP, optimizer=OPTIMIZER, sequence_parallel_size=2, train_batch_size=4
        )
        assert (engine.mesh.sp.index, engine.mesh.batch.index) == (engine.rank % 2, engine.rank // 2)
        for step in range(STEPS):
            loss = engine(halves(engine.mesh.batch.index, step)[engine.mesh.sp.index])
            engine.backward(loss)
            engine.step()
            assert engine.global_grad_norm == pytest.approx(norms[step], rel=1e-5), (stage, step)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, weights[name], atol=2e-5, rtol=1e-4)
        engine.destroy()
    assert losses[-1] < losses[0]


class Tied(nn.Module):
    """An embedding that is also the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(toy.VOCABULARY, DIM))
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return self.end(self.begin(ids), ids)

    def begin(self, ids: Tensor) -> Tensor:
        return gelu(self.first(embedding(ids, self.table)))

    def end(self, x: Tensor, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(linear(self.second(x), self.table).flatten(0, 1), ids.flatten())


class Stage(nn.Module):
    def __init__(self, whole: Tied, index: int) -> None:
        super().__init__()
        self.table, self.index = whole.table, index
        if index == 0:
            self.first = whole.first
        else:
            self.second = whole.second
        mark_tied(self.table, (0, 1))

    def forward(self, *inputs: Tensor) -> Tensor:
        return Tied.begin(self, *inputs) if self.index == 0 else Tied.end(self, *inputs)  # type: ignore[arg-type]


class Layers(nn.Module):
    """A stage whose table is an embedding's or a head's, under a name of its own."""

    def __init__(self, whole: Tied, index: int) -> None:
        super().__init__()
        self.index = index
        if index == 0:
            self.embed, self.first = nn.Embedding(*whole.table.shape), whole.first
            self.embed.weight = whole.table
        else:
            self.second, self.head = whole.second, nn.Linear(DIM, len(whole.table), bias=False)
            self.head.weight = whole.table
        mark_tied(whole.table, (0, 1))

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        if ids is None:
            return gelu(self.first(self.embed(x)))
        return nn.functional.cross_entropy(self.head(self.second(x)).flatten(0, 1), ids.flatten())


def step_of_stages(engine: Any, step: int) -> None:
    """One step of two stages that send to each other by torch."""
    index = engine.mesh.pp.index
    peer, ids = engine.mesh.pp.ranks[1 - index], toy.tokens(engine.mesh.batch.index, step)
    hidden = torch.empty(*ids.shape, DIM, requires_grad=index == 1)
    if index == 0:
        out = engine(ids)
        dist.send(out.detach(), peer)
        dist.recv(hidden, peer)
        out.backward(hidden)
    else:
        with torch.no_grad():
            dist.recv(hidden, peer)
        engine.backward(engine(hidden, ids))
        dist.send(hidden.grad, peer)
    engine.step()


@distributed(world_size=4, transports=("shared", "gloo"))
def test_a_parameter_on_two_stages(transport: str) -> None:
    """`slipstream.mesh.pp`: a tied parameter has one gradient and one value, and counts once in the norm."""
    losses, norms, weights = twin(lambda step: [toy.tokens(i, step) for i in range(2)], toy.seeded(Tied))
    assert losses
    for stage in cases.stages(transport):
        index = dist.get_rank() // 2
        engine = make(Stage(toy.seeded(Tied), index), stage, transport, pp=2)
        assert (engine.mesh.pp.index, engine.mesh.batch.size) == (index, 2)
        for step in range(STEPS):
            step_of_stages(engine, step)
            assert engine.global_grad_norm == pytest.approx(norms[step], rel=1e-5), (stage, step)
        with torch.no_grad():
            for name, value in engine.state_dict().items():
                torch.testing.assert_close(value, weights[name], atol=2e-5, rtol=1e-4)
        engine.destroy()


@distributed(world_size=4, transports=("shared", "gloo"))
def test_a_parameter_that_is_an_embedding_on_one_stage(transport: str) -> None:
    """An optimizer that exchanges signs keeps embeddings apart, and heads not: stages agree, and both have one value."""
    onebit = {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 2}}
    _, norms, _ = twin(lambda step: [toy.tokens(i, step) for i in range(2)], toy.seeded(Tied))
    for stage in cases.stages(transport):
        engine = make(Layers(toy.seeded(Tied), dist.get_rank() // 2), stage, transport, optimizer=onebit, pp=2)
        for step in range(4):
            step_of_stages(engine, step)
            assert step or engine.global_grad_norm == pytest.approx(norms[0], rel=1e-5), stage
        state = engine.state_dict()
        tables = [torch.empty(toy.VOCABULARY, DIM) for _ in range(4)]
        dist.all_gather(tables, state["embed.weight" if engine.mesh.pp.index == 0 else "head.weight"].contiguous())
        assert all(torch.equal(table, tables[0]) for table in tables)
        engine.destroy()


@distributed(world_size=3)
def test_a_stage_of_the_users_without_parameters_of_others() -> None:
    """Between two stages that have one: it is as much the user's as they are."""
    whole, index = toy.seeded(Tied), dist.get_rank()
    stage = nn.Linear(DIM, DIM) if index == 1 else Layers(whole, index // 2)
    if index != 1:
        mark_tied(whole.table, (0, 2))
    engine = make(stage, 1, "auto", pp=3)
    assert engine.mesh.pp.index == index and engine.module is stage
    engine.destroy()
