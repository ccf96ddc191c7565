"""0/1 Adam: each step is that of simulated workers and servers, with variance steps, exchanged signs and local steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.ops import onebit
from slipstream.optim import ZeroOneAdam
from slipstream.optim import onebit as optim_onebit
from slipstream.optim.onebit import Levels
from slipstream.optim.rounds import Round
from slipstream.zero.comm import ProcessGroupComm
from tests import cases, toy
from tests.dist.test_onebit import optimizer_states
from tests.pool import distributed

COUNTS = {"var_freeze_step": 5, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}
PARAMS: dict[str, Any] = {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1, **COUNTS}
ZERO_ONE = {"type": "ZeroOneAdam", "params": PARAMS}
EVERY_STEP = {"type": "ZeroOneAdam", "params": {**PARAMS, "local_step_clipper": 1}}
ROUNDS = ZeroOneAdam.rounds(COUNTS)
LR, BETA, BETA2, KEEP = 1e-2, 0.9, 0.99, 1 - 1e-2 * 0.1


def signs(x: Tensor, active: Tensor) -> Tensor:
    """+-the root mean square of the active elements of each block, rounded to bf16."""
    pad = -x.numel() % onebit.BLOCK
    y, a = (torch.cat([t.flatten(), torch.zeros(pad)]).view(-1, onebit.BLOCK) for t in (x * active, active))
    scale = (y.square().sum(1, keepdim=True) / a.sum(1, keepdim=True).clamp(min=1)).sqrt().bfloat16().float()
    return (torch.where(y >= 0, scale, -scale) * a).flatten()[: x.numel()].view(x.shape)


class Adam:
    """The moments of one tensor, and a step of AdamW whose variance has had fewer updates than its momentum."""

    def __init__(self, param: Tensor) -> None:
        self.m, self.v, self.count = torch.zeros_like(param), torch.zeros_like(param), 0

    def step(self, w: Tensor, grad: Tensor, t: int) -> None:
        self.count += 1
        self.m = BETA * self.m + (1 - BETA) * grad
        self.v = BETA2 * self.v + (1 - BETA2) * grad * grad
        root = (self.v / (1 - BETA2**self.count)).sqrt() + 1e-8
        w.mul_(KEEP).sub_(LR / (1 - BETA**t) * self.m / root)


class Twin:
    """As many models as ranks."""

    def __init__(self, ranks: int) -> None:
        self.models = [toy.seeded(toy.Lm) for _ in range(ranks)]
        params = dict(self.models[0].named_parameters())
        self.adams = {name: [Adam(param.detach()) for _ in range(ranks)] for name, param in params.items()}
        self.inverse = dict.fromkeys(params, torch.zeros(()))
        self.errors = {name: [torch.zeros(()) for _ in range(ranks + 1)] for name in params}  # the last is the server's
        self.p: dict[str, list[Tensor]] = {}
        self.u: dict[str, list[Tensor]] = {}
        self.w: dict[str, Tensor] = {}
        self.levels, self.kept, self.rates = {name: Levels.of([{}]) for name in params}, 1.0, dict.fromkeys(params, 0.0)

    def step(self, t: int) -> None:
        each = [torch.autograd.grad(model(toy.tokens(rank, t)), list(model.parameters())) for rank, model in enumerate(self.models)]
        kind, interval = ROUNDS.kind(t), ROUNDS.interval(t)
        if interval > 1:
            self.kept *= KEEP
        with torch.no_grad():
            for i, name in enumerate(self.adams):
                weights, grads = [model.get_parameter(name) for model in self.models], [grads[i] for grads in each]
                mean = torch.stack(grads).mean(0)
                if name.startswith("embedding") or kind is Round.DENSE:
                    self._dense(name, weights, grads if interval > 1 else [mean] * len(grads), t)
                    if interval > 1 and kind is Round.SIGNS:
                        average(weights)
                else:
                    self._signs(name, weights, grads, t)
        if kind is Round.SIGNS:
            self.kept, self.rates = 1.0, dict.fromkeys(self.rates, 0.0)

    def _dense(self, name: str, weights: list[Any], grads: list[Tensor], t: int) -> None:
        for adam, w, grad in zip(self.adams[name], weights, grads, strict=True):
            if p := self.p.get(name):
                adam.m = torch.where(self.inverse[name] > 0, p[0] / self.inverse[name], 0.0)
            adam.step(w, grad, t)
        self.p.pop(name, None)

    def _signs(self, name: str, weights: list[Any], grads: list[Tensor], t: int) -> None:
        if name not in self.p:
            adam, old = self.adams[name][0], self.inverse[name]
            root = (adam.v / (1 - BETA2**adam.count)).sqrt() + 1e-8
            self.inverse[name] = torch.where(adam.v > 0, 1 / root, 0.0)
            ratio = torch.where(old > 0, self.inverse[name] / old, 0.0)
            self.errors[name] = [error * ratio for error in self.errors[name]]
            self.p[name] = [adam.m * self.inverse[name]] * len(grads)
        inverse, errors, levels = self.inverse[name], self.errors[name], self.levels[name]
        if ROUNDS.kind(t) is Round.SIGNS:
            now = torch.stack([(grad * inverse).double().square().mean() for grad in grads]).mean()
            levels.add(now.view(1), torch.tensor([BETA2 ** ROUNDS.interval(t)]))
        rate = float(levels.rates()) * LR / (1 - BETA**t)
        p = [BETA * p + (1 - BETA) * grad * inverse for p, grad in zip(self.p[name], grads, strict=True)]
        x, active, kept = p, (inverse > 0).float(), KEEP
        if ROUNDS.interval(t) > 1:
            if name not in self.u:
                self.u[name], self.w[name] = [torch.zeros_like(inverse)] * len(p), weights[0].clone()
            self.u[name] = [KEEP * u + rate * one for u, one in zip(self.u[name], p, strict=True)]
            self.p[name], self.rates[name] = p, self.rates[name] * KEEP + rate
            if ROUNDS.kind(t) is Round.LOCAL:
                for w, u in zip(weights, self.u[name], strict=True):
                    w.copy_(self.kept * self.w[name] - u)
                return
            rate, kept = self.rates[name], self.kept
            x = [u / rate for u in self.u.pop(name)]
            for w in weights:
                w.copy_(self.w[name])
            del self.w[name]
        x = [one + error for one, error in zip(x, errors, strict=False)]
        sent = [signs(one, active) for one in x]
        y = torch.stack(sent).mean(0) + errors[-1]
        result = signs(y, active)
        self.errors[name] = [(one - it) * active for one, it in zip([*x, y], [*sent, result], strict=True)]
        self.p[name] = [result] * len(grads)
        for w in weights:
            w.mul_(kept).sub_(rate * result)


def average(weights: list[Any]) -> None:
    mean = torch.stack([w.detach() for w in weights]).mean(0)
    for w in weights:
        w.copy_(mean)


def compare(transport: str, ranks: int) -> None:
    twin, engine = Twin(ranks), toy.make(toy.seeded(toy.Lm), 0, transport, optimizer=ZERO_ONE)
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim_onebit, "WINDOW", 2)
        for t in range(1, 17):
            twin.step(t)
            toy.step(engine, toy.tokens(rank, t))
            expected = twin.models[rank].state_dict()
            for name, value in engine.module.named_parameters():
                message = f"step {t} {name}: "
                torch.testing.assert_close(value.detach(), expected[name], rtol=0, atol=2e-5, msg=lambda m, s=message: s + m)
    assert twin.levels["head.weight"].rates() != 1
    engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_it_is_that_of_simulated_workers(transport: str) -> None:
    compare(transport, 2)


@pytest.mark.slow
@distributed(world_size=4, transports=("gloo",))
def test_it_is_that_of_simulated_workers_on_four_ranks(transport: str) -> None:
    compare(transport, 4)


@distributed(world_size=2, transports=("shared", "gloo"))
def test_stages_have_equal_bits_without_local_steps(transport: str) -> None:
    """Also in mixed precision, with accumulated gradients and a loss scale."""
    for dtype, stages in (("fp32", cases.stages(transport)), ("bf16", (0, 3)), ("fp16", (0, 2))):
        sums = set()
        for stage in stages:
            engine = toy.make(
                toy.seeded(toy.Lm), stage, transport, dtype=dtype, optimizer=EVERY_STEP, gradient_accumulation_steps=2
            )
            for micro in range(14):
                toy.step(engine, toy.tokens(dist.get_rank(), micro))
            sums.add(int(toy.checksum(engine)))
            engine.destroy()
        assert len(sums) == 1, dtype


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@distributed(world_size=2)
def test_local_steps_in_mixed_precision_end_with_equal_weights(dtype: str) -> None:
    engine = toy.make(toy.seeded(toy.Lm), 0, dtype=dtype, optimizer=ZERO_ONE, gradient_clipping=1.0)
    losses = []
    while (engine.states.steps.done or 0) < 16:  # fp16 skips the first steps
        losses.append(float(toy.step(engine, toy.tokens(dist.get_rank(), 0))))
    sums: list[Any] = [None, None]
    dist.all_gather_object(sums, int(toy.checksum(engine)))
    assert sums[0] == sums[1] and losses[-1] < losses[0]
    engine.destroy()


@distributed(world_size=2, transports=("gloo",))
def test_what_each_round_sends(transport: str) -> None:
    """Signs: 66 bytes per 512 elements, to their owners and back. Local steps: only the verdict's few numbers."""
    engine = toy.make(toy.seeded(toy.Lm), 0, transport, optimizer=ZERO_ONE)
    launched: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        launch = ProcessGroupComm._launch
        patch.setattr(
            ProcessGroupComm,
            "_launch",
            lambda self, op, nbytes, sent=None: (launched.append((op, nbytes)), launch(self, op, nbytes, sent))[1],
        )
        for t in range(1, 17):
            launched.clear()
            toy.step(engine, toy.tokens(dist.get_rank(), t))
            data = [nbytes for op, nbytes in launched if "exchange" not in op]
            late = [unit for unit in engine.units if unit in engine.states.steps.frozen]
            if ROUNDS.kind(t) is Round.LOCAL:
                assert not data, (t, launched)
            elif t in (12, 16):
                assert sum(data) == 2 * sum(onebit.nbytes(unit.layout.numel) for unit in late), (t, launched)
    engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_saving_between_exchanges_exchanges_first(transport: str, tmp_path: Path) -> None:
    engine = toy.make(toy.seeded(toy.Lm), 0, transport, optimizer=ZERO_ONE)
    for t in range(1, 15):  # 13 and 14 are local
        toy.step(engine, toy.tokens(dist.get_rank(), t))
    sums: list[Any] = [None, None]
    dist.all_gather_object(sums, int(toy.checksum(engine)))
    assert sums[0] != sums[1] and engine.states.steps.local
    engine.save_checkpoint(str(tmp_path), tag="between")
    dist.all_gather_object(sums, int(toy.checksum(engine)))
    assert sums[0] == sums[1] and not engine.states.steps.local
    saved, weights = optimizer_states(engine), {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy()
    other = toy.make(toy.seeded(toy.Lm, 5), 0, transport, optimizer=ZERO_ONE)
    for t in range(1, 15):
        toy.step(other, toy.tokens(dist.get_rank(), 20 + t))
    other.load_checkpoint(str(tmp_path), tag="between")
    assert all(torch.equal(value, weights[name]) for name, value in other.state_dict().items())
    for name, states in optimizer_states(other).items():
        assert all(torch.equal(value, saved[name][key]) for key, value in states.items()), name
    for t in (15, 16):
        toy.step(other, toy.tokens(dist.get_rank(), t))
    dist.all_gather_object(sums, int(toy.checksum(other)))
    assert sums[0] == sums[1] and saved["head.weight"]["error"].any()
    other.destroy()


@distributed(world_size=2)
def test_a_gradient_that_is_not_finite_skips_a_local_step() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 0, optimizer=ZERO_ONE)
    for t in range(1, 14):
        toy.step(engine, toy.tokens(dist.get_rank(), t))
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    loss = engine(toy.tokens(dist.get_rank(), 14))
    engine.backward(loss * (float("inf") if dist.get_rank() else 1.0))
    engine.step()
    assert engine.overflow and all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    for t in range(14, 17):
        toy.step(engine, toy.tokens(dist.get_rank(), t))
    sums: list[Any] = [None, None]
    dist.all_gather_object(sums, int(toy.checksum(engine)))
    assert sums[0] == sums[1] and all(value.isfinite().all() for value in engine.state_dict().values())
    engine.destroy()


def test_without_an_engine_it_is_momentum_whose_variance_has_few_updates() -> None:
    model = toy.seeded(toy.Net)
    param, adam = model.out.weight, Adam(model.out.weight.detach())
    optimizer, twin = ZeroOneAdam([param], **{**PARAMS, "betas": (BETA, BETA2)}), param.detach().clone()
    for t in range(1, 17):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(t))
        optimizer.step()
        if ROUNDS.kind(t) is Round.DENSE:
            adam.step(twin, param.grad, t)
        else:
            adam.m = BETA * adam.m + (1 - BETA) * param.grad
            twin.mul_(KEEP).sub_(LR / (1 - BETA**t) * adam.m / ((adam.v / (1 - BETA2**adam.count)).sqrt() + 1e-8))
        torch.testing.assert_close(param.detach(), twin, msg=lambda m, t=t: f"step {t}: {m}")


@pytest.mark.parametrize(
    ("stage", "params", "message"),
    [
        (1, {}, "local_step_clipper to 1, or zero_optimization.stage to 0"),
        (0, {"var_freeze_step": -1}, "var_freeze_step is -1; the variance needs"),
        (0, {"local_step_scaler": 0}, "local_step_scaler is 0; it counts steps"),
        (0, {"freeze_step": 3}, "unknown 'freeze_step'.*did you mean 'var_freeze_step'"),
    ],
)
def test_settings_that_cannot_be_are_refused(stage: int, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy.make(toy.seeded(toy.Lm), stage, optimizer={"type": "ZeroOneAdam", "params": params})
