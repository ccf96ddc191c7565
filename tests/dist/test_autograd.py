"""All autograd features of a model also work with the engine: every scenario against plain data parallelism."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import cases, toy
from tests.pool import distributed
from tests.toy import floats

STAGES, STEPS, CLIP = (0, 1, 2, 3), cases.STEPS, 0.5
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}

# ---- models


class Twice(toy.Net):
    def body(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(block(h))
        return h


class Reused(toy.Net):
    def body(self, h: Tensor) -> Tensor:
        for k in (0, 1, 2, 0, 1):
            h = self.blocks[k](h)
        return h


class Skipping(toy.Net):
    def forward(self, x: Tensor, skip: int = -1) -> Tensor:
        h = self.inp(x)
        for k, block in enumerate(self.blocks):
            if k != skip:
                h = block(h)
        out: Tensor = self.out(h)
        return out


class Checkpointed(toy.Net):
    order, reentrant = (0, 1, 2), False

    def body(self, h: Tensor) -> Tensor:
        for k in self.order:
            h = checkpoint(self.blocks[k], h, use_reentrant=self.reentrant)
        return h


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedReused(Checkpointed):
    order = (0, 1, 2, 0, 1)


class CheckpointedReusedReentrant(CheckpointedReused):
    reentrant = True


class CheckpointedInside(toy.Net):
    """Uses parameters of a block outside the block's own forward."""

    def body(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + checkpoint(lambda z, b=block: b.down(torch.relu(b.up(z))), h, use_reentrant=False)
        return h


class Tied(toy.Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.second = nn.Linear(8, 16, bias=False)
        self.second.weight = self.inp.weight

    def forward(self, x: Tensor) -> Any:
        return self.out(self.body(self.inp(x) + self.second(x)))


class TiedReused(Reused):
    """A block ends its backward while that of the next one, which reads one of its weights, has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Direct(toy.Net):
    def forward(self, x: Tensor) -> Any:
        h = self.body(self.inp(x))
        h = h + F.linear(h, self.blocks[1].down.weight @ self.blocks[1].up.weight)
        return self.out(h) + self.blocks[0].up.weight.norm()


class ZeroSize(toy.Net):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.blocks[1].nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.nothing.sum() + self.blocks[1].nothing.sum()


class PartlyFrozen(toy.Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[0].up.weight.requires_grad_(False)
        self.inp.bias.requires_grad_(False)


class Buffered(toy.Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.norm(x)) * self.scale


class MixedDtypes(toy.Net):
    def __init__(self) -> None:
        super().__init__()
        self.out.double()
        self.blocks[1].double()

    def body(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        return self.blocks[2](self.blocks[1](h.double()).float()).double()

    def forward(self, x: Tensor) -> Any:
        return self.out(self.body(self.inp(x))).float()


@dataclasses.dataclass
class Output:
    y: Tensor
    h: Tensor
    nothing: object = None


class Pair(NamedTuple):
    y: Tensor
    h: Tensor


class Structured(toy.Net):
    def pack(self, y: Tensor, h: Tensor) -> Any:
        return {"y": y, "h": [h, None], "n": 3}

    def forward(self, x: Tensor) -> Any:
        h = self.body(self.inp(x))
        return self.pack(self.out(h), h)


class StructuredTuple(Structured):
    def pack(self, y: Tensor, h: Tensor) -> Any:
        return y, (h, None)


class StructuredDataclass(Structured):
    def pack(self, y: Tensor, h: Tensor) -> Any:
        return Output(y, h)


class StructuredNamed(Structured):
    def pack(self, y: Tensor, h: Tensor) -> Any:
        return Pair(y, h)


# ---- scenarios: one step's forwards and backwards, with an engine or with the plain model

Step = Callable[[Any, int, int], None]


class Scenario(NamedTuple):
    step: Step
    kind: Callable[[], nn.Module] = toy.Net
    same_gathers: bool = True  # on all ranks; otherwise gloo cannot match the collectives of stage 3


def plain(m: Any, r: int, i: int) -> None:
    m(floats(r, i)).square().mean().backward()


def two_forwards(m: Any, r: int, i: int) -> None:
    (m(floats(r, i)).square().mean() + m(floats(r, i, 1)).abs().mean()).backward()


def two_backwards(m: Any, r: int, i: int) -> None:
    m(floats(r, i)).square().mean().backward()
    m(floats(r, i, 1)).abs().mean().backward()


def interleaved(m: Any, r: int, i: int) -> None:
    first, second = m(floats(r, i)), m(floats(r, i, 1))
    first.square().mean().backward()
    second.abs().mean().backward()


def retained(m: Any, r: int, i: int) -> None:
    out = m(floats(r, i))
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def non_scalar(m: Any, r: int, i: int) -> None:
    out = m(floats(r, i))
    out.backward(torch.full_like(out, 0.01))


def several_losses(m: Any, r: int, i: int) -> None:
    out = m(floats(r, i))
    torch.autograd.backward([out.square().mean(), out[0].abs().mean()])


def evaluation_between(m: Any, r: int, i: int) -> None:
    with torch.no_grad():
        m(floats(r, i, 5))
    plain(m, r, i)
    with torch.no_grad():
        m(floats(r, i, 5))


def evaluation_between_halves(m: Any, r: int, i: int) -> None:
    out = m(floats(r, i))
    with torch.no_grad():
        m(floats(r, i, 5))
    out.square().mean().backward()


def evaluation_on_one_rank(m: Any, r: int, i: int) -> None:
    plain(m, r, i)
    if r == 0:
        with torch.no_grad():
            m(floats(r, i, 5))


def forward_before_step(m: Any, r: int, i: int) -> None:
    plain(m, r, i)
    m(floats(r, i, 5))


def part_before_step(m: Any, r: int, i: int) -> None:
    plain(m, r, i)
    getattr(m, "module", m).inp(floats(r, i, 5))


def unused_alike(m: Any, r: int, i: int) -> None:
    m(floats(r, i), skip=i % 3).square().mean().backward()


def unused_by_rank(m: Any, r: int, i: int) -> None:
    m(floats(r, i), skip=(r + i) % 3).square().mean().backward()


def forward_without_backward(m: Any, r: int, i: int) -> None:
    m(floats(r, i, 7))
    plain(m, r, i)


def dictionary(m: Any, r: int, i: int) -> None:
    out = m(floats(r, i))
    (out["y"].square().mean() + out["h"][0].abs().mean()).backward()


def pair(m: Any, r: int, i: int) -> None:
    out = m(floats(r, i))
    (out[0].square().mean() + out[1][0].abs().mean()).backward()


def attributes(m: Any, r: int, i: int) -> None:
    out = m(floats(r, i))
    (out.y.square().mean() + out.h.abs().mean()).backward()


def gradient_penalty(m: Any, r: int, i: int) -> None:
    x = floats(r, i).requires_grad_()
    out = m(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.square().mean() + (grad.norm() - 1).square()).backward()


def adversarial(m: Any, r: int, i: int) -> None:
    x = floats(r, i).requires_grad_()
    (slope,) = torch.autograd.grad(m(x).square().mean(), x)
    plain(lambda x: m(x + slope.sign()), r, i)


def input_gradient(m: Any, r: int, i: int) -> None:
    x = floats(r, i).requires_grad_()
    m(x).square().mean().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def block_by_itself(m: Any, r: int, i: int) -> None:
    module = getattr(m, "module", m)
    with torch.no_grad():
        module.blocks[0](torch.randn(2, 16))
        module.inp(torch.randn(2, 8))
    plain(m, r, i)


def exception_in_forward(m: Any, r: int, i: int) -> None:
    with contextlib.suppress(RuntimeError):
        m(torch.randn(4, 7))
    plain(m, r, i)


SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(plain),
    "two forwards, one backward": Scenario(two_forwards),
    "two backwards": Scenario(two_backwards),
    "forwards, then backwards": Scenario(interleaved),
    "a retained graph": Scenario(retained),
    "a loss that is no scalar": Scenario(non_scalar),
    "several losses": Scenario(several_losses),
    "evaluation between": Scenario(evaluation_between),
    "evaluation before backward": Scenario(evaluation_between_halves),
    "evaluation on rank 0 only": Scenario(evaluation_on_one_rank, same_gathers=False),
    "a forward without backward": Scenario(forward_without_backward),
    "an exception in forward": Scenario(exception_in_forward),
    "unused parameters": Scenario(unused_alike, Skipping),
    "unused parameters by rank": Scenario(unused_by_rank, Skipping, same_gathers=False),
    "a block called twice": Scenario(plain, Twice),
    "blocks reused across depth": Scenario(plain, Reused),
    "checkpoint": Scenario(plain, Checkpointed),
    "checkpoint, reentrant": Scenario(plain, CheckpointedReentrant),
    "checkpoint of reused blocks": Scenario(plain, CheckpointedReused),
    "checkpoint of reused blocks, reentrant": Scenario(plain, CheckpointedReusedReentrant),
    "checkpoint inside blocks": Scenario(plain, CheckpointedInside),
    "tied": Scenario(plain, Tied),
    "tied, and reused across depth": Scenario(plain, TiedReused),
    "parameters used directly": Scenario(plain, Direct),
    "used directly, two graphs at once": Scenario(interleaved, Direct),
    "used directly, a retained graph": Scenario(retained, Direct),
    "used directly, evaluation before backward": Scenario(evaluation_between_halves, Direct),
    "used directly, a forward without backward": Scenario(forward_without_backward, Direct),
    "used directly, a forward before the step": Scenario(forward_before_step, Direct),
    "a part of the model before the step": Scenario(part_before_step),
    "zero-size parameters": Scenario(plain, ZeroSize),
    "frozen": Scenario(plain, PartlyFrozen),
    "buffers": Scenario(plain, Buffered),
    "mixed dtypes": Scenario(plain, MixedDtypes),
    "a dictionary": Scenario(dictionary, Structured),
    "a tuple": Scenario(pair, StructuredTuple),
    "a dataclass": Scenario(attributes, StructuredDataclass),
    "a named tuple": Scenario(attributes, StructuredNamed),
    "a gradient penalty": Scenario(gradient_penalty),
    "a gradient of an input before the backward": Scenario(adversarial),
    "the gradient of an input": Scenario(input_gradient),
    "a block by itself": Scenario(block_by_itself),
}


def plain_torch(scenario: Scenario) -> tuple[dict[str, Tensor], float]:
    """Plain data parallelism: `Scenario.step` on the bare model, gradients averaged by hand."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = toy.seeded(scenario.kind)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, **SGD)
    for i in range(STEPS):
        scenario.step(model, rank, i)
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= world
        norm = nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norm.item()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_gradient_for_the_caller_is_no_backward(transport: str) -> None:
    """`autograd.grad`, on one rank too, is neither counted nor reduced, and is no obstacle to a surgery."""
    for stage in (0, 2):
        engine = toy.make(toy.seeded(toy.Net), stage, transport, gradient_accumulation_steps=2)
        weight = engine.module.out.weight
        for micro in range(4):
            x = floats(engine.rank, micro).requires_grad_()
            for wanted in (x, weight) if engine.rank == 0 else ():
                torch.autograd.grad(engine(x).square().mean(), wanted)
            assert engine.backwards == micro % 2
            if micro == 2:
                with engine.surgery():
                    pass
            engine.backward(engine(x).square().mean())
            engine.step()
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("name", SCENARIOS)
def test_equals_plain_torch(name: str, transport: str) -> None:
    scenario = SCENARIOS[name]
    expected, norm = plain_torch(scenario)
    stages = cases.stages(transport, STAGES if scenario.same_gathers or transport == "shared" else (0, 1, 2))
    for stage in cases.by_turns(stages, list(SCENARIOS).index(name) // 2):
        engine = toy.make(
            toy.seeded(scenario.kind), stage, transport, gradient_clipping=CLIP, optimizer={"type": "SGD", "params": SGD}
        )
        for i in range(STEPS):
            scenario.step(engine, engine.rank, i)
            engine.step()
        state = engine.state_dict()
        assert state.keys() == expected.keys()
        for key, value in state.items():
            torch.testing.assert_close(
                value, expected[key], rtol=0, atol=3e-6, msg=lambda m, s=stage, k=key: f"stage {s}: {k}: {m}"
            )
        assert engine.global_grad_norm == pytest.approx(norm, rel=1e-5), f"stage {stage}"
        engine.destroy()
