"""Parameters that differ over an axis: experts over their own data axis, beside dense parameters over all ranks.

Two of four ranks hold one half of the experts each, and the other two the same halves: expert gradients are reduced, sharded and
copied between ranks 0, 2 and 1, 3. A twin in plain torch holds all experts and sees all batches.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from slipstream import checkpoint, ema
from slipstream.zero.leaves import mark_part
from tests import cases, probe, toy
from tests.pool import distributed, run

EXPERTS, DIM, STEPS, CLIP = 4, 8, cases.STEPS, 0.05


class Gather(torch.autograd.Function):
    """Rows of all ranks of a group; the gradient of a rank's rows is the sum over the group."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.index = group, dist.get_rank(group)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[ctx.index], None


class Combine(torch.autograd.Function):
    """The rank's own rows of the sum over the group: the transpose of `Gather`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = rows.clone()
        dist.all_reduce(total, group=group)
        return total.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Experts(nn.Module):
    """Each row goes to one expert. `down` is stored with the experts in its middle dimension: its parts are not contiguous."""

    def __init__(self, first: int, count: int, group: Any) -> None:
        super().__init__()
        up, down = torch.randn(EXPERTS, DIM, 2 * DIM) * 0.3, torch.randn(2 * DIM, EXPERTS, DIM) * 0.3
        self.up, self.down = nn.Parameter(up[first : first + count].clone()), nn.Parameter(down[:, first : first + count].clone())
        self.router = nn.Linear(DIM, EXPERTS)
        self.first, self.group = first, group
        if group is not None:
            mark_part(self.up, "ep", EXPERTS // count)
            mark_part(self.down, "ep", EXPERTS // count, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weight, chosen = scores.max(-1)
        rows, places = x * weight[:, None], chosen
        if self.group is not None:
            rows, places = Gather.apply(rows, self.group), torch.cat(_all(chosen, self.group))
        out = torch.zeros_like(rows)
        for i in range(len(self.up)):
            own = (places == self.first + i)[:, None].to(rows.dtype)
            out = out + own * (torch.relu(rows @ self.up[i]) @ self.down[:, i])
        return x + (out if self.group is None else Combine.apply(out, self.group))


def _all(values: Tensor, group: Any) -> list[Tensor]:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values, group=group)
    return parts


class Moe(nn.Module):
    def __init__(self, first: int = 0, count: int = EXPERTS, group: Any = None) -> None:
        super().__init__()
        self.inp = nn.Linear(8, DIM)
        self.blocks = nn.ModuleList(Experts(first, count, group) for _ in range(2))
        self.out = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for block in self.blocks:
            h = block(h)
        return self.out(h).square().mean()


def halves() -> Moe:
    """This rank's model at EP 2. Ranks with other experts are neighbors."""
    group, _ = dist.new_subgroups(2)
    torch.manual_seed(0)
    return Moe(dist.get_rank() % 2 * EXPERTS // 2, EXPERTS // 2, group)


def twin(ranks: int, accumulation: int, *later: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and weights of plain torch in one process, on the batches of all ranks. later: of further steps"""
    torch.manual_seed(0)
    model = Moe()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step, count in enumerate([ranks] * STEPS + list(later)):
        optimizer.zero_grad()
        batches = [toy.floats(rank, step, micro) for micro in range(accumulation) for rank in range(count)]
        loss = sum((model(batch) for batch in batches), torch.zeros(())) / len(batches)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, dict(model.state_dict())


def train(engine: Any, accumulation: int, first: int = 0, steps: int = STEPS) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(first, first + steps):
        total = torch.zeros(())
        for micro in range(accumulation):
            loss = engine(toy.floats(engine.rank, step, micro))
            engine.backward(loss)
            engine.step()
            total += loss.detach() / accumulation
        dist.all_reduce(total)
        losses.append(total.item() / engine.world_size)
        norms.append(engine.global_grad_norm)
    return losses, norms


def make(model: nn.Module, stage: int, transport: str = "auto", accumulation: int = 1) -> Any:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    blocks = {"gradient_clipping": CLIP, "gradient_accumulation_steps": accumulation, "optimizer": optimizer}
    return toy.make(model, stage, transport, **blocks)


@distributed(world_size=4, transports=("shared", "gloo"))
@pytest.mark.parametrize("accumulation", [1, 2])
def test_experts_over_their_own_axis_train_as_one_process(transport: str, accumulation: int) -> None:
    losses, norms, weights = twin(4, accumulation)
    assert all(norm > CLIP for norm in norms)
    for stage in cases.stages(transport):
        engine = make(halves(), stage, transport, accumulation)
        assert sorted({unit.span[1] - unit.span[0] for unit in probe.units(engine) if "ep" in unit.name}) != []
        assert train(engine, accumulation) == (pytest.approx(losses, abs=2e-6), pytest.approx(norms, rel=1e-5)), stage
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(
                value, weights[name], rtol=0, atol=5e-6, msg=lambda m, n=name, s=stage: f"stage {s}, {n}: {m}"
            )
        engine.destroy()


def save_halves(path: Path, stage: int, transport: str) -> None:
    engine = make(halves(), stage, transport)
    train(engine, 1)
    engine.save_checkpoint(str(path), tag="x")
    engine.destroy()


def load_elsewhere(path: Path, stage: int, transport: str, split: bool) -> tuple[dict[str, Tensor], Any]:
    """The loaded states, and the losses and norms of the next step."""
    torch.manual_seed(1)
    engine = make(halves() if split else Moe(), stage, transport)
    engine.load_checkpoint(str(path), tag="x")
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    for unit in probe.units(engine):
        for name in unit.names:
            state |= {f"{name}/{key}": value for key, value in engine.optimizer_state(name).items()}
    trained = train(engine, 1, STEPS, 1)
    engine.destroy()
    return state, trained


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("stage", cases.stages("gloo"))
def test_a_checkpoint_of_experts_loads_into_other_layouts(tmp_path: Path, stage: int, transport: str) -> None:
    run(4, save_halves, tmp_path, stage, transport)
    shapes = {name: info.shape for name, info in checkpoint.load_metadata(str(tmp_path), "x").tensors.items()}
    assert shapes["model.blocks.0.up"] == (EXPERTS, DIM, 2 * DIM)
    assert shapes["optim.exp_avg.blocks.1.down"] == (2 * DIM, EXPERTS, DIM)
    _, _, weights = twin(4, 1)
    whole, _ = run(1, load_elsewhere, tmp_path, 0, transport, False)[0]
    for name, value in weights.items():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=5e-6)
    for world, split in ((4, False), (2, True), (2, False), (4, True)):
        losses, norms, _ = twin(4, 1, world)
        for rank, (state, trained) in enumerate(run(world, load_elsewhere, tmp_path, stage, transport, split)):
            assert trained == (pytest.approx(losses[-1:], abs=2e-6), pytest.approx(norms[-1:], rel=1e-5)), (world, split)
            for name, value in state.items():
                assert torch.equal(value, whole[name]), (world, split, rank, name)


@distributed(world_size=4)
def test_parts_are_joined_and_frozen(tmp_path: Path) -> None:
    engine = make(halves(), 3)
    average = ema.Ema(engine)
    train(engine, 1)
    average.update()
    state = engine.state_dict()
    engine.save_pretrained(str(tmp_path))
    written = load_file(str(tmp_path / "model.safetensors"))
    assert written.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(written[name], value), name
    handed = {name: value.clone() for name, value in engine.named_weights()}
    assert handed.keys() == state.keys() and all(torch.equal(handed[name], value) for name, value in state.items())
    engine.load_state_dict({name: value + 1 for name, value in state.items()})
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, state[name] + 1)
    shapes = {name: value.shape for name, value in state.items()}
    assert {name: value.shape for name, value in average.state_dict()["average"].items()} == shapes
    moments = engine.optimizer.state_dict()["state"].values()
    assert [each["exp_avg"].shape for each in moments] == [shapes[name] for name, _ in engine.module.named_parameters()]
    with engine.surgery():
        for param in engine.module.blocks[0].parameters():
            param.requires_grad_(False)
    before = engine.state_dict()
    train(engine, 1)
    for name, value in engine.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("blocks.0."), name
    engine.destroy()


@distributed(world_size=4)
def test_misfit_splits_are_refused() -> None:
    torch.manual_seed(0)
    model = Moe()
    with pytest.raises(ValueError, match="no dimension 3 to split into 2 parts"):
        mark_part(model.blocks[0].up, "ep", 2, dim=3)
    with pytest.raises(ValueError, match="over the axes tp and ep, not over 'dp'"):
        mark_part(model.blocks[0].up, "dp", 2)
    mark_part(model.blocks[0].up, "ep", 3)
    with pytest.raises(ValueError, match=r"split over ep by 3, which does not divide the data-parallel size \(4\); use ep 2"):
        make(model, 1)
    local = {"local_steps": {"every": 2}}
    with pytest.raises(ValueError, match=r"ep by 2, on the ranks \[0, 1\] of several replicas that slipstream\.local_steps"):
        toy.make(halves(), 1, slipstream=local)


@distributed(world_size=4, transports=("shared", "gloo"))
def test_experts_are_sharded_within_groups(transport: str) -> None:
    """With mics_shard_size 2, a group has one copy of all experts, each on one of its ranks; with 1 each rank all dense states."""
    losses, norms, weights = twin(4, 1)
    for size in (1, 2, 4):
        blocks = {"gradient_clipping": CLIP, "zero_optimization": {"mics_shard_size": size}}
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
        engine = toy.make(halves(), 3, transport, optimizer=optimizer, **blocks)
        sizes = {bool(key): (each.copies.size, each.shards.size) for key, each in engine.mesh.families.items()}
        own = max(size // 2, 1)
        assert sizes == {False: (4 // size, size), True: (2 // own, own)}
        assert train(engine, 1) == (pytest.approx(losses, abs=2e-6), pytest.approx(norms, rel=1e-5)), size
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=5e-6, msg=lambda m, n=name: f"{n}: {m}")
        engine.destroy()
