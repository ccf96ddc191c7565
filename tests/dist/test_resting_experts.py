"""Experts that no token uses rest (`rest_unused_experts`), at every stage and place, and their offloaded states stay put."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream import optim
from slipstream.checkpoint import CheckpointError
from slipstream.moe import MoE
from slipstream.ops.disk import Disk
from tests import cases, toy
from tests.dist.test_moe import CLIP, foreign, foreign_batch
from tests.pool import distributed

DIM, EXPERTS = 16, 4
USED = ((0, 1), (1, 1), (2, 0))  # by the tokens of two ranks in each step; nothing uses the last expert
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": torch.optim.AdamW,
    "Lion": optim.Lion,
    "SGD": torch.optim.SGD,
    "Lamb": optim.Lamb,
    "NAdam": torch.optim.NAdam,
}


def options(kind: str) -> dict[str, Any]:
    others = {"SGD": {"momentum": 0.9}, "AdamW": {"eps": 1e-5}}  # with 1e-8, rounding chooses small steps
    return {"lr": 1e-2, "weight_decay": 0.1} | others.get(kind, {})


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 24, bias=False), nn.Linear(24, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Linear(*size, bias=False) for size in ((DIM, 24), (DIM, 24), (24, DIM)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Listed(nn.Module):
    """Each token goes to the expert that its first features name."""

    def __init__(self, expert: Callable[[], nn.Module] = Mlp) -> None:
        super().__init__()
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = x[:, :EXPERTS].argmax(1), torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            out[chosen == expert] = self.experts[expert](x[chosen == expert])
        return out


class Stacked(MoE):
    def __init__(self, expert: Callable[[], nn.Module] | None = None, size: int = 24) -> None:
        super().__init__(DIM, expert, EXPERTS, k=1, expert_size=size)
        with torch.no_grad():
            self.router.weight.copy_(30 * torch.eye(EXPERTS, DIM))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)[0]


class Whole(nn.Module):
    """`Gated` experts as transformers 5 has them, with all tokens for each."""

    def __init__(self, num: int = EXPERTS) -> None:
        super().__init__()
        self.experts: Any = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(num, 48, DIM))
        self.experts.down_proj = nn.Parameter(torch.randn(num, DIM, 24))

    def forward(self, x: Tensor) -> Tensor:
        gates, values = torch.einsum("td,efd->etf", x, self.experts.gate_up_proj).chunk(2, -1)
        return torch.einsum("etf,edf->td", F.silu(gates) * values, self.experts.down_proj)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "list": Listed,
    "gated list": lambda: Listed(Gated),
    "whole": Whole,
    "whole, one more": lambda: Whole(EXPERTS + 1),
    "stack": Stacked,
    "one by one": lambda: Stacked(lambda: nn.Sequential(Mlp(), nn.LayerNorm(DIM))),
    "of 256": lambda: Stacked(size=DIM),
    "large": lambda: Stacked(size=4096),
}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.out = LAYERS[kind](), nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.out.weight.dtype)
        return self.out(x + self.layer(x)).float().square().mean()


def build(kind: str) -> Any:
    return toy.seeded(lambda: Model(kind))


def batch(rank: int, step: int, used: tuple[int, ...] = ()) -> Tensor:
    """Six tokens of the expert that a rank uses in a step, or of these."""
    x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(100 * step + rank))
    x[:, :EXPERTS] = F.one_hot(torch.tensor(used or USED[step][rank : rank + 1]), EXPERTS).float().repeat(6, 1)[:6]
    return x


def expert_of(name: str) -> int | None:
    """The expert whose parameter in a list this is."""
    place = name.partition("experts.")[2].partition(".")[0]
    return int(place) if place.isdigit() else None


def is_stack(name: str) -> bool:
    return ".experts." in name and expert_of(name) is None


def twin(kind: str, optimizer: str, steps: int = len(USED)) -> tuple[list[float], dict[str, Tensor]]:
    """Plain torch. An expert of a list has no gradient; unused tensors of a stack, and of its states, are put back after a step."""
    model = build(kind)
    made = OPTIMIZERS[optimizer](model.parameters(), **options(optimizer))
    norms = []
    for step in range(steps):
        made.zero_grad()
        sum((model(batch(rank, step)) for rank in range(2)), torch.zeros(())).div(2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        unused = [expert for expert in range(EXPERTS) if expert not in USED[step]]
        before = {}
        for name, param in model.named_parameters():
            if is_stack(name):
                kept = {key: value[unused].clone() for key, value in made.state[param].items() if value.shape == param.shape}
                before[param] = (param.detach()[unused].clone(), kept)
        made.step()
        with torch.no_grad():
            for param, (values, states) in before.items():
                param[unused] = values
                for key, value in made.state[param].items():
                    if value.shape == param.shape:
                        value[unused] = states.get(key, torch.zeros(()))
    return norms, dict(model.state_dict())


def make(kind: str, stage: int, ep: int, optimizer: str = "AdamW", *, rests: bool = True, **blocks: Any) -> Any:
    blocks = {"gradient_clipping": CLIP, "optimizer": {"type": optimizer, "params": options(optimizer)}} | blocks
    return toy.make(build(kind), stage, **resting(ep, rests=rests, **blocks))


def resting(ep: int, *, rests: bool = True, **blocks: Any) -> dict[str, Any]:
    ours = {"rest_unused_experts": rests} | blocks.get("slipstream", {})
    return {"expert_parallel": {"enabled": True, "autoep_size": ep}} | blocks | {"slipstream": ours}


def train(engine: Any, steps: tuple[int, ...] = (0, 1, 2)) -> list[float]:
    norms = []
    for step in steps:
        toy.step(engine, batch(engine.mesh.batch.index, step))
        norms.append(engine.global_grad_norm)
    return norms


def trained(*args: Any, **blocks: Any) -> tuple[list[float], dict[str, Tensor]]:
    engine = make(*args, **blocks)
    norms, state = train(engine), {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy()
    return norms, state


def assert_same(state: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in state.items():
        assert torch.equal(value, other[name]), name


def assert_close(state: dict[str, Tensor], other: dict[str, Tensor], atol: float = 1e-6) -> None:
    for name, value in other.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("kind", ["list", "stack", "one by one"])
def test_experts_without_tokens_rest_as_parameters_without_a_gradient(transport: str, kind: str) -> None:
    norms, expected = twin(kind, "AdamW")
    for ep in (1, 2):
        results = [trained(kind, stage, ep, slipstream={"transport": transport}) for stage in cases.stages(transport)]
        assert results[0][0] == pytest.approx(norms, rel=1e-5)
        assert_close(results[0][1], expected)
        for _, state in results[1:]:
            assert_same(state, results[0][1])


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("kind", "optimizer"), [("stack", "Lion"), ("stack", "SGD"), ("stack", "Lamb"), ("list", "Lamb"), ("list", "NAdam")]
)
def test_experts_rest_under_other_optimizers(kind: str, optimizer: str) -> None:
    """Native kernels, norms of whole tensors, and an optimizer of torch."""
    if kind == "stack" and optimizer == "Lamb":
        kind = "of 256"  # its norms need tensors of so many elements
    _, expected = twin(kind, optimizer)
    for ep, stage in ((1, 1), (2, 3)):
        assert_close(trained(kind, stage, ep, optimizer)[1], expected, atol=2e-6)


@pytest.mark.disk
@distributed(world_size=2)
@pytest.mark.parametrize("kind", ["list", "stack"])
def test_experts_rest_wherever_their_states_are(kind: str, tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    for dtype in ("fp32", "bf16"):
        resident = trained(kind, 3, 2, dtype=dtype)[1]
        for zero in (
            {"offload_optimizer": {"device": "cpu"}},
            {"offload_optimizer": disk | {"ratio": 0.5}},
            {"offload_optimizer": disk, "offload_param": disk},
        ):
            assert_same(trained(kind, 3, 2, dtype=dtype, zero_optimization=zero)[1], resident)


@distributed(world_size=2)
@pytest.mark.parametrize(
    "blocks",
    [
        {"tensor_parallel": {"autotp_size": 2}, "train_micro_batch_size_per_gpu": 4},
        {"dtype": "fp16"},
        {"dtype": "bf16", "slipstream": {"optimizer_states": "int8"}},
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "slipstream": {"stochastic_rounding": True},
        },
        {"gradient_accumulation_steps": 2},
    ],
    ids=["tp", "fp16", "int8", "stochastic", "accumulation"],
)
@pytest.mark.parametrize("kind", ["Mixtral", "ours"])
def test_an_experts_weights_move_exactly_in_steps_with_tokens(kind: str, blocks: dict[str, Any]) -> None:
    """By the counts of all ranks. Weight decay would move the others."""
    sliced = "tensor_parallel" in blocks
    for stage, ep in ((1, 2), (3, 1)) if cases.EVERYTHING else ((1, 2),) if kind == "Mixtral" else ((3, 1),):
        adamw = {"type": "AdamW", "params": options("AdamW")}
        model = mixtral() if kind == "Mixtral" else build("of 256")
        engine = toy.make(model, stage, optimizer=adamw, **resting(1 if sliced else ep, **blocks))
        states = [rows_of(engine)]
        moved = set()
        for step in range(2):
            for micro in range(engine.plan.batch.accumulation):
                index = engine.mesh.batch.index
                inputs = foreign_batch("", index, 4 * step + micro) if kind == "Mixtral" else batch(index, step)
                loss = engine(**inputs).loss if isinstance(inputs, dict) else engine(inputs)
                engine.backward(loss)
                engine.step()
            states.append(rows_of(engine))
            for name, load in engine.expert_load().items():
                for stack in (stack for stack in states[0] if stack.startswith(name)):
                    for expert, routes in enumerate(load.routes):
                        same = torch.equal(states[-2][stack][expert], states[-1][stack][expert])
                        assert same is (routes == 0), (stack, expert, routes)
                        moved.add(same)
        assert moved == {True, False}
        engine.destroy()


def mixtral() -> Any:
    """Of so many experts that some get no token."""
    model = foreign("Mixtral")
    config = type(model.config)(**model.config.to_dict() | {"num_local_experts": 32, "num_experts_per_tok": 1})
    torch.manual_seed(1)
    return type(model)(config)


def rows_of(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.state_dict().items() if is_stack(name)}


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """The bytes that disks read and write."""
    counts, patch = {"read": 0, "write": 0}, pytest.MonkeyPatch()

    def counting(name: str) -> None:
        move = getattr(Disk, name)

        def count(disk: Disk, parts: Any) -> Any:
            counts[name] += sum(tensor.nbytes for _, tensor in parts)
            return move(disk, parts)

        patch.setattr(Disk, name, count)

    counting("read")
    counting("write")
    with patch.context():
        yield counts
    patch.undo()


@pytest.mark.disk
@distributed(world_size=2)
@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_the_disk_moves_the_states_of_used_experts(dtype: str, tmp_path: Path) -> None:
    """In whole pages of 4096 elements; moments, and in bf16 masters, in fp32."""
    per_expert, slack, moved = 3 * DIM * 4096, 20 * 4096, {}
    nbytes = 12 if dtype == "bf16" else 8
    for rests, used in ((False, (1,)), (True, (0, 1, 2, 3)), (True, (1,)), (True, (0, 3))):
        zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
        engine = make("large", 1, 2, rests=rests, dtype=dtype, zero_optimization=zero)
        toy.step(engine, batch(engine.rank, 0, used))
        with counted() as counts:
            toy.step(engine, batch(engine.rank, 1, used))
            engine.states.settle()
        total = torch.tensor(list(counts.values()))
        dist.all_reduce(total)
        moved[rests, used] = total.tolist()
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.destroy()
        if rests:
            resident = make("large", 3, 2, dtype=dtype)
            for step in range(2):
                toy.step(resident, batch(resident.rank, step, used))
            assert_same(resident.state_dict(), state)
            resident.destroy()
    assert moved[True, (0, 1, 2, 3)] == moved[False, (1,)]
    for used in ((1,), (0, 3)):
        for direction in moved[True, used]:
            assert len(used) * per_expert * nbytes <= direction <= (len(used) * per_expert + slack) * nbytes, (used, moved)


@distributed(world_size=2)
@pytest.mark.parametrize("kind", ["list", "stack"])
def test_checkpoints_have_the_steps_of_experts(kind: str, tmp_path: Path) -> None:
    """A run that is resumed is the one that was not, and at another size it is close."""
    engine = make(kind, 3, 2)
    train(engine, (0, 1))
    engine.save_checkpoint(str(tmp_path), tag="two")
    train(engine, (2,))
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy()
    for stage, ep in ((3, 2), (0, 2), (1, 1)):
        engine = make(kind, stage, ep)
        engine.load_checkpoint(str(tmp_path), tag="two")
        train(engine, (2,))
        (assert_same if ep == 2 else assert_close)(engine.state_dict(), expected)
        engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("kind", ["list", "stack"])
def test_experts_of_a_forward_that_is_not_counted_do_not_rest(kind: str) -> None:
    """Of a model in eval mode, which has gradients all the same."""
    engine = make(kind, 1, 2)
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    for is_training in (False, True):
        engine.train(is_training)
        toy.step(engine, batch(engine.rank, 0))
        after = {name: value.clone() for name, value in engine.state_dict().items()}
        same = [
            torch.equal(before[name][row], after[name][row])
            for name in before
            for row in ([EXPERTS - 1] if is_stack(name) else [slice(None)] if expert_of(name) == EXPERTS - 1 else [])
            if name.endswith("weight")
        ]
        assert same == [is_training] * len(same) and same
        before = after
    engine.destroy()


class Outside(nn.Module):
    """A layer whose list is in a container without a forward, so that no layer calls the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"experts": nn.ModuleList(Mlp() for _ in range(EXPERTS))})

    def forward(self, x: Tensor) -> Tensor:
        expert = int(x[0, :EXPERTS].argmax())
        out: Tensor = self.parts["experts"][expert](x)  # type: ignore[index]
        return out


class Inside(nn.Module):
    """A layer of two experts whose shared branch is a layer of four."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(DIM, None, 2, k=1, expert_size=24, shared=Stacked())

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


@distributed(world_size=1)
def test_no_expert_that_is_used_rests() -> None:
    """Called from outside of its layer, and in a layer inside of another one."""
    model = build("list")
    model.layer = Outside()
    engine = toy.make(model, 1, **resting(1))
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    toy.step(engine, batch(0, 0))
    after = engine.state_dict()
    used = [name for name in before if name.endswith(f"experts.{USED[0][0]}.up.weight")]
    assert used and not any(torch.equal(after[name], before[name]) for name in used)
    engine.destroy()
    model = build("list")
    model.layer = Inside()
    engine = toy.make(model, 1, **resting(1))
    name = "layer.moe.shared.experts.stack.expert.down.weight"
    before = {name: engine.state_dict()[name].clone()}
    toy.step(engine, batch(0, 0))
    moved = [not torch.equal(*pair) for pair in zip(engine.state_dict()[name], before[name], strict=True)]
    assert moved == [expert == USED[0][0] for expert in range(EXPERTS)]
    engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("kind", "optimizer", "blocks", "match"),
    [
        ("stack", "NAdam", {}, "rest_unused_experts needs a native kernel for stacks of experts, and NAdam"),
        ("stack", "OneBitAdam", {}, "OneBitAdam exchanges what it makes of the gradients of all experts"),
        ("stack", "AdamW", {"slipstream": {"local_steps": {"every": 4}}}, "local_steps is not supported with .*rest_unused"),
        (
            "stack",
            "AdamW",
            {"bf16": {"enabled": True}, "slipstream": {"optimizer_states": "int8"}},
            "tensors of 384 elements, .* by 256",
        ),
        ("stack", "AdamW", {"expert_parallel": {}}, "set expert_parallel.enabled to true"),
        ("none", "AdamW", {}, "the config sets slipstream.rest_unused_experts, and Net has no layers of experts"),
    ],
)
def test_what_cannot_rest_is_refused(kind: str, optimizer: str, blocks: dict[str, Any], match: str) -> None:
    named = {"type": optimizer, "params": {"lr": 1e-2} | ({"freeze_step": 4} if "OneBit" in optimizer else {})}
    with pytest.raises(ValueError, match=match):
        toy.make(toy.Net() if kind == "none" else build(kind), 0, **resting(1, **{"optimizer": named} | blocks))


@distributed(world_size=2)
def test_what_a_surgery_adds_rests_or_is_refused() -> None:
    engine = make("of 256", 1, 1, dtype="bf16", slipstream={"optimizer_states": "int8"})
    with pytest.raises(ValueError, match="tensors of 384 elements"), engine.surgery():
        engine.module.layer = Stacked()
    engine.destroy()
    engine = make("of 256", 3, 1)
    with engine.surgery():
        engine.module.layer = Stacked(size=32)
    before = rows_of(engine)
    toy.step(engine, batch(engine.rank, 0))
    for name, rows in rows_of(engine).items():
        assert [torch.equal(*pair) for pair in zip(rows, before[name], strict=True)] == [False, False, True, True], name
    engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("NAdam", marks=pytest.mark.slow)])
def test_a_stack_takes_what_is_wanted_of_a_list_whose_experts_rested(optimizer: str, tmp_path: Path) -> None:
    """Its experts have taken different numbers of steps; NAdam of torch has no state of the last one, which took none."""
    blocks = {"optimizer": {"type": optimizer, "params": options(optimizer)}}
    engine = make("gated list", 1, 1, optimizer)
    train(engine)
    engine.save_checkpoint(str(tmp_path), tag="list")
    saved = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy()

    def of_expert(i: int, *names: str) -> Tensor:
        return torch.cat([saved[f"layer.experts.{i}.{name}.weight"] for name in names])

    expected = {name: value for name, value in saved.items() if expert_of(name) is None}
    expected["layer.experts.gate_up_proj"] = torch.stack([of_expert(i, "w1", "w3") for i in range(EXPERTS)])
    expected["layer.experts.down_proj"] = torch.stack([of_expert(i, "w2") for i in range(EXPERTS)])

    def load(kind: str, **wanted: Any) -> None:
        """What is excluded, or does not fit, keeps the model's values."""
        engine = toy.make(build(kind), 3, **blocks)
        before = {name: value.clone() for name, value in engine.state_dict().items() if ".experts." in name}
        engine.load_checkpoint(str(tmp_path), tag="list", **wanted)
        loads_experts = wanted.keys() == {"load_optimizer_states"}
        assert_same(dict(engine.state_dict()), expected if loads_experts else expected | before)
        toy.step(engine, batch(engine.rank, 0))
        engine.destroy()

    load("whole", load_optimizer_states=False)
    load("whole", exclude=["layer.experts*"])
    load("whole", exclude=["layer.experts.gate_up_proj", "layer.experts.down_proj"])
    for wanted in ({"load_module_strict": False}, {"exclude": ["layer.experts*"]}):
        load("whole, one more", **wanted)
        load("whole, one more", load_optimizer_states=False, **wanted)
    for kind, words in (
        ("whole", r"experts.gate_up_proj' have taken different numbers of steps.*load_optimizer_states=False skips it"),
        ("whole, one more", r"has 5 experts, and the files lack .*\.4\.w1\.weight'.*; load_module_strict=False, or exclude="),
    ):
        engine = toy.make(build(kind), 1, **blocks)
        with pytest.raises(CheckpointError, match=words):
            engine.load_checkpoint(str(tmp_path), tag="list")
        engine.destroy()
