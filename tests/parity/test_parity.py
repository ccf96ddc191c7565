"""Every stage trains what plain torch trains: against the twin, against each other, under every optimizer."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.optim import Lamb, Lion, Muon, muon_groups
from tests import cases, probe, toy, twin
from tests.pool import distributed

Weights = dict[str, Tensor]
STAGES = (0, 1, 2, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LR, STEPS, SCALE = 1e-3, 4, 256.0
ADAMW = {"lr": LR, "weight_decay": 0.01}  # torch's default, which is the twin's
# Of the whole update, relative: a weight that rounds the other way changes the gradients that follow.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.03, "fp16": 0.01}
CLIP = 0.5  # the norm of the toy's gradient is 0.7 to 1.5


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    value: Tensor = model(batch)
    return value


def batches(world: int, accumulation: int, steps: int = STEPS) -> list[list[list[Tensor]]]:
    return [[[toy.tokens(rank, i, micro) for rank in range(world)] for micro in range(accumulation)] for i in range(steps)]


def rounded(kind: Callable[[], nn.Module], dtype: torch.dtype) -> Any:
    """Weights that `dtype` can hold, in fp32."""
    return toy.seeded(kind).to(dtype).float()


def train(engine: Any, data: list[list[list[Tensor]]]) -> tuple[Tensor, Tensor]:
    """[step, micro] losses of this rank, and norms."""
    losses, norms = [], []
    for micros in data:
        for ranks in micros:
            losses.append(toy.step(engine, ranks[engine.rank]).float())
        norms.append(engine.global_grad_norm)
    return torch.stack(losses).view(len(data), -1), torch.tensor(norms)


def masters(engine: Any) -> dict[str, Tensor]:
    """Whole, by name; what `engine.optimizer_state` gives, with one collective a unit."""
    results: dict[str, Tensor] = {}
    for unit in probe.units(engine):
        full = unit.unsharded(unit.master.whole(), bool(unit.placement.optim))
        for name, slot in zip(unit.names, unit.layout.slots, strict=True):
            results[name] = full[slice(*slot.span)].view(slot.shape)
    return results


def compare_updates(results: Weights, expected: Weights, start: nn.Module, tolerance: float, case: str) -> None:
    """Each parameter's way from its start, in the L2 norm."""
    for name, weight in start.named_parameters():
        way, error = ((value - expected[name]).norm().item() for value in (weight.detach(), results[name]))
        assert error <= tolerance * way, f"{case}: the update of {name} is off by {error:.3g} of {way:.3g}"


def compare_with_twin(transport: str, dtype: str) -> None:
    world = dist.get_world_size()
    rows = cases.pairs((1, 2), (0.0, CLIP), cases.stages(transport))
    for accumulation, clip in itertools.product((1, 2), (0.0, CLIP)):
        data = batches(world, accumulation)
        expected = twin.train(
            rounded(toy.Lm, DTYPES[dtype]), loss, data, dtype=DTYPES[dtype], clip=clip, loss_scale=SCALE if dtype == "fp16" else 1.0
        )
        assert clip == 0 or (expected.norms > clip).all(), "clipping is to clip"
        for stage in (stage for *row, stage in rows if row == [accumulation, clip]):
            case = f"stage {stage}, accumulation {accumulation}, clip {clip}"
            engine = toy.make(
                rounded(toy.Lm, DTYPES[dtype]),
                stage,
                transport,
                dtype=dtype,
                gradient_clipping=clip,
                gradient_accumulation_steps=accumulation,
                optimizer={"type": "AdamW", "params": ADAMW},
                fp16={"enabled": True, "loss_scale": SCALE} if dtype == "fp16" else None,
            )
            losses, norms = train(engine, data)
            eps = 1e-6 if dtype == "fp32" else torch.finfo(DTYPES[dtype]).eps / 4
            torch.testing.assert_close(
                losses, expected.losses[:, :, dist.get_rank()], rtol=eps, atol=0, msg=lambda m, c=case: f"{c}: losses: {m}"
            )
            torch.testing.assert_close(norms, expected.norms, rtol=10 * eps, atol=0, msg=lambda m, c=case: f"{c}: {m}")
            fp32 = masters(engine)
            compare_updates(fp32, expected.masters, rounded(toy.Lm, DTYPES[dtype]), TOLERANCE[dtype], case)
            for name, value in engine.state_dict().items():
                assert value.dtype is DTYPES[dtype]
                assert value.equal(fp32[name].to(value.dtype)), f"{case}: {name} is not its master rounded"
            engine.destroy()


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=2, transports=("shared", "gloo"), timeout=150)
def test_stages_equal_plain_torch(transport: str, dtype: str) -> None:
    compare_with_twin(transport, dtype)


@pytest.mark.parametrize("dtype", DTYPES if cases.EVERYTHING else ["bf16"])
@distributed(world_size=4, transports=("shared", "gloo"), timeout=150)
def test_stages_equal_plain_torch_at_world_4(transport: str, dtype: str) -> None:
    compare_with_twin(transport, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=1)
def test_one_rank_equals_plain_torch(dtype: str) -> None:
    compare_with_twin("auto", dtype)


# ---- the stages among each other


Trace = tuple[list[float], list[float], int]


def trace(stage: int, transport: str, dtype: str, accumulation: int, steps: int) -> Trace:
    engine = toy.make(
        toy.seeded(toy.Lm), stage, transport, dtype=dtype, gradient_clipping=CLIP, gradient_accumulation_steps=accumulation
    )
    losses, norms = [], []
    for i in range(steps):
        for micro in range(accumulation):
            losses.append(toy.step(engine, toy.tokens(engine.rank, i, micro)).item())
        norms.append(engine.global_grad_norm)
    weights = int(toy.checksum(engine))
    engine.destroy()
    return losses, norms, weights


@pytest.mark.parametrize("dtype", DTYPES if cases.EVERYTHING else ["fp16", "bf16"])
@distributed(world_size=2, transports=("shared", "gloo"))
def test_stages_are_bit_identical_over_many_steps(transport: str, dtype: str) -> None:
    steps = 200 if cases.EVERYTHING else 20
    first, *others = [trace(stage, transport, dtype, 1, steps) for stage in STAGES]
    assert all(other == first for other in others)
    assert first[0][-1] != first[0][0] and len(set(first[1])) > steps // 2, "something was trained"


@distributed(world_size=4, transports=("shared", "gloo"))
def test_stages_are_bit_identical_at_world_4(transport: str) -> None:
    steps = 10 if cases.EVERYTHING else 5
    first, *others = [trace(stage, transport, "bf16", 1, steps) for stage in STAGES]
    assert all(other == first for other in others)


@distributed(world_size=2, transports=("shared", "gloo"))
def test_with_accumulation_stages_are_bit_identical_in_pairs(transport: str) -> None:
    zero, one, two, three = [trace(stage, transport, "bf16", 3, 10) for stage in STAGES]
    assert zero == one and two == three
    torch.testing.assert_close(torch.tensor(zero[1]), torch.tensor(two[1]), rtol=1e-2, atol=0)


@distributed(world_size=2)
def test_transports_are_bit_identical() -> None:
    assert trace(3, "shared", "bf16", 2, 10) == trace(3, "gloo", "bf16", 2, 10)


@distributed(world_size=4, transports=("shared", "gloo"))
def test_sharding_within_pairs_equals_sharding_over_all(transport: str) -> None:
    def run(zero: dict[str, int]) -> dict[str, Tensor]:
        engine = toy.make(toy.seeded(toy.Lm), 3, transport, zero_optimization=zero, gradient_clipping=CLIP)
        train(engine, batches(4, 1))
        state: dict[str, Tensor] = engine.state_dict()
        engine.destroy()
        return state

    expected = run({})
    for name, value in run({"mics_shard_size": 2}).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-4)


# ---- optimizers


class Fromage(torch.optim.Optimizer):
    """A user's own: a step in proportion to each whole tensor's norm, which a flat range does not have."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                ratio = p.norm() / p.grad.norm().clamp(min=1e-8)
                p.sub_(p.grad, alpha=float(group["lr"] * ratio / state["steps"]))


class Matrices(nn.Module):
    """Matrices only, which is what `torch.optim.Muon` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(toy.VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.head = nn.Linear(16, toy.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), tokens[:, 1:].flatten())


Maker = Callable[[dict[str, Tensor]], torch.optim.Optimizer]


def on_all(cls: Any, **options: Any) -> Maker:
    return lambda masters: cls(masters.values(), **options)


OPTIM = torch.optim
DECAY = {"lr": LR, "weight_decay": 0.1}
# by name in the config: (type, params, the same on unsharded tensors)
NAMED: dict[str, tuple[str, dict[str, Any], Maker]] = {
    "AdamW": ("AdamW", DECAY, on_all(OPTIM.AdamW, **DECAY)),
    "Adam with L2": ("Adam", {**DECAY, "adam_w_mode": False}, on_all(OPTIM.Adam, **DECAY)),
    "SGD": ("SGD", {**DECAY, "momentum": 0.9}, on_all(OPTIM.SGD, **DECAY, momentum=0.9)),
    "Adagrad": ("Adagrad", DECAY, on_all(OPTIM.Adagrad, **DECAY)),
    "RMSprop": ("RMSprop", {"lr": LR, "momentum": 0.5}, on_all(OPTIM.RMSprop, lr=LR, momentum=0.5)),
    "Adafactor": ("Adafactor", DECAY, on_all(OPTIM.Adafactor, **DECAY)),
    "Lion": ("Lion", DECAY, on_all(Lion, **DECAY)),
    "LAMB": ("Lamb", DECAY, on_all(Lamb, **DECAY)),
}
# by callable
CALLABLE: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.optim.Optimizer]]] = {
    "torch.optim.Muon": (Matrices, lambda params: OPTIM.Muon(params, lr=LR, weight_decay=0.1)),
    "a user's": (toy.Lm, lambda params: Fromage(params)),
    "several in one": (toy.Lm, lambda params: toy.Lookahead(list(params))),
    "amsgrad": (toy.Lm, lambda params: OPTIM.AdamW(params, lr=LR, amsgrad=True)),
    "NAdam": (toy.Lm, lambda params: OPTIM.NAdam(params, lr=LR, decoupled_weight_decay=True)),
}


def check(engine: Any, start: nn.Module, expected: twin.Run, data: Any, case: str) -> None:
    losses, norms = train(engine, data)
    torch.testing.assert_close(losses, expected.losses[:, :, engine.rank], rtol=1e-5, atol=0, msg=lambda m: f"{case}: {m}")
    torch.testing.assert_close(norms, expected.norms, rtol=1e-5, atol=0, msg=lambda m: f"{case}: {m}")
    compare_updates(engine.state_dict(), expected.weights, start, 1e-3, case)
    engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("name", NAMED)
def test_named_optimizers_equal_the_unsharded(name: str) -> None:
    kind, params, maker = NAMED[name]
    data = batches(2, 1)
    expected = twin.train(toy.seeded(toy.Lm), loss, data, optimizer=maker, clip=CLIP)
    for stage in STAGES if cases.EVERYTHING else (STAGES[list(NAMED).index(name) % 3], 3):  # 3 for all, the others by turns
        engine = toy.make(
            toy.seeded(toy.Lm),
            stage,
            "gloo" if stage == 3 else "shared",
            gradient_clipping=CLIP,
            optimizer={"type": kind, "params": params},
        )
        check(engine, toy.seeded(toy.Lm), expected, data, f"{name}, stage {stage}")


def muon(masters: dict[str, Tensor]) -> torch.optim.Optimizer:
    return Muon(muon_groups(masters.items()), lr=LR, eps=1e-8)


@distributed(world_size=2, transports=("shared", "gloo"))
def test_muon_equals_the_unsharded(transport: str) -> None:
    data = batches(2, 1)
    expected = twin.train(toy.seeded(toy.Lm), loss, data, optimizer=muon)
    for stage in cases.stages(transport):
        engine = toy.make(toy.seeded(toy.Lm), stage, transport, optimizer={"type": "Muon", "params": {"lr": LR, "eps": 1e-8}})
        check(engine, toy.seeded(toy.Lm), expected, data, f"Muon, stage {stage}")


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("name", CALLABLE)
def test_brought_optimizers_equal_the_unsharded(name: str, transport: str) -> None:
    kind, call = CALLABLE[name]
    data = batches(2, 1)
    expected = twin.train(toy.seeded(kind), loss, data, optimizer=lambda masters: call(masters.values()))
    for stage in cases.stages(transport):
        engine, *_ = slipstream.initialize(
            model=toy.seeded(kind), optimizer=call, config=toy.settings(stage, transport, optimizer=None)
        )
        check(engine, toy.seeded(kind), expected, data, f"{name}, stage {stage}")
