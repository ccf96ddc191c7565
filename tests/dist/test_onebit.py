"""1-bit Adam: warm-up equals AdamW; then each step is that of simulated workers and servers, on every stage and transport."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.checkpoint import CheckpointError
from slipstream.ops import onebit
from slipstream.optim import Lamb, OneBitAdam, OneBitLamb, resolve
from slipstream.optim import onebit as optim_onebit
from slipstream.optim.onebit import Levels, preconditioner
from slipstream.train.saving import optimizer_state
from tests import cases, toy
from tests.pool import distributed

FREEZE = 2
PARAMS: dict[str, Any] = {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1, "freeze_step": FREEZE}
ONE_BIT = {"type": "OneBitAdam", "params": PARAMS}
ONE_BIT_LAMB = {"type": "OneBitLamb", "params": PARAMS}


def padded(x: Tensor) -> Tensor:
    return torch.cat([x.flatten(), torch.zeros(-x.numel() % onebit.BLOCK)])


class Twin:
    """A plain model, trained by the gradients of all ranks: AdamW, then signs by simulated workers and servers."""

    def __init__(self, ranks: int) -> None:
        self.model, self.ranks = toy.seeded(toy.Lm), ranks
        params = dict(self.model.named_parameters())
        self.late = {name: param for name, param in params.items() if not name.startswith("embedding")}
        self.adam = torch.optim.AdamW(params.values(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
        self.count = 0
        self.states: dict[str, Any] = {}
        self.limits: dict[str, float] = {}

    def coefficient(self, param: Tensor) -> float:
        return 1.0

    def grads(self, step: int) -> dict[str, list[Tensor]]:
        params = dict(self.model.named_parameters())
        each = [torch.autograd.grad(self.model(toy.tokens(rank, step)), list(params.values())) for rank in range(self.ranks)]
        return {name: [grads[i] for grads in each] for i, name in enumerate(params)}

    def step(self, step: int, clip: float = 0.0) -> None:
        grads = self.grads(step)
        self.count += 1
        late = self.late if self.count > FREEZE else {}
        squares = torch.zeros((), dtype=torch.float64)
        for name, each in grads.items():
            if name in late:
                squares += sum(grad.double().square().sum() for grad in each) / self.ranks
            else:
                squares += torch.stack(each).mean(0).double().square().sum()
        scale = min(1.0, clip / (float(squares.sqrt()) + 1e-6)) if clip else 1.0
        for name, param in self.model.named_parameters():
            param.grad = None if name in late else torch.stack(grads[name]).mean(0) * scale
        if late and not self.states:
            self.states = {name: self._freeze(param) for name, param in late.items()}
        self.adam.step()
        for name, param in late.items():
            self._exchange(self.states[name], param, grads[name], scale)

    def _freeze(self, param: Tensor) -> dict[str, Any]:
        state = self.adam.state[param]
        inverse = padded(
            preconditioner(
                state["exp_avg_sq"],
                self.adam.param_groups[0] | {"exp_avg_mask": None, "bias_correction": True},
                FREEZE,
                frozen=True,
            )
        )
        numel = inverse.numel()
        records = torch.zeros(onebit.nbytes(numel), dtype=torch.uint8)
        first = padded(state["exp_avg"]) * inverse * 0.9
        return {
            "inverse": inverse,
            "workers": [(first.clone(), torch.zeros(numel // onebit.BLOCK)) for _ in range(self.ranks)],
            "server": (torch.zeros(numel), torch.zeros(numel // onebit.BLOCK)),
            "p": records,
            "levels": Levels.of([self.limits]),
        }

    def _exchange(self, state: dict[str, Any], param: Tensor, grads: list[Tensor], scale: float) -> None:
        sent, inverse = [], state["inverse"][: param.numel()].view(param.shape)
        now = torch.stack([(grad * inverse * scale).double().square().mean() for grad in grads]).mean()
        state["levels"].add(now.view(1), torch.tensor([0.99]))
        for (y, scales), grad in zip(state["workers"], grads, strict=True):
            records = state["p"].clone()
            onebit.worker(
                padded(grad),
                state["inverse"],
                onebit.partly(state["inverse"]),
                y,
                scales,
                records,
                beta=0.9,
                factor=(1 - 0.9) * scale,
            )
            sent.append(records)
        onebit.server(sent, state["inverse"], onebit.partly(state["inverse"]), *state["server"], state["p"], alpha=1 / self.ranks)
        p = torch.where(state["inverse"] > 0, onebit.decode(state["p"]), 0.0)[: param.numel()].view(param.shape)
        with torch.no_grad():
            lr = 1e-2 * self.coefficient(param)
            param.mul_(1 - lr * 0.1).sub_(p * (float(state["levels"].rates()) * lr / (1 - 0.9**self.count)))


class LambTwin(Twin):
    """LAMB, whose trust ratios are averaged, then signs."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.adam = Lamb(self.model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)  # type: ignore[assignment]
        self.limits = {"factor_min": 0.5, "factor_max": 4.0, "factor_threshold": 0.1}
        self.norms: dict[Tensor, float] = {}  # averages of 1 / (the norm of the update)

    def coefficient(self, param: Tensor) -> float:
        return min(max(float(param.detach().norm()) * self.norms[param], 0.01), 10.0)

    def step(self, step: int, clip: float = 0.0) -> None:
        before = {param: param.detach().clone() for param in self.model.parameters()}
        super().step(step, clip)
        for param, weight in before.items() if self.count <= FREEZE else ():
            state = self.adam.state[param]
            m, v = (state[name] / (1 - beta**self.count) for name, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.99)))
            norm = float((m / (v.sqrt() + 1e-8) + 0.1 * weight).norm())
            if weight.any():
                self.norms[param] = 0.9 * self.norms[param] + 0.1 / norm if param in self.norms else 1 / norm


@distributed(world_size=2, transports=("shared", "gloo"))
def test_one_bit_adam_is_that_of_simulated_workers(transport: str) -> None:
    _compare_with_twin(Twin(2), ONE_BIT, transport)


@distributed(world_size=2, transports=("shared", "gloo"))
def test_one_bit_lamb_is_that_of_simulated_workers(transport: str) -> None:
    _compare_with_twin(LambTwin(2), ONE_BIT_LAMB, transport)


def _compare_with_twin(twin: Twin, optimizer: dict[str, Any], transport: str) -> None:
    sums = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim_onebit, "WINDOW", 2)
        for step in range(7):
            twin.step(step, clip=0.5)
        assert all(state["levels"].rates() != 1 for state in twin.states.values())
        expected = twin.model.state_dict()
        for stage in cases.stages(transport):
            engine = toy.make(toy.seeded(toy.Lm), stage, transport, optimizer=optimizer, gradient_clipping=0.5)
            for step in range(7):
                toy.step(engine, toy.tokens(dist.get_rank(), step))
            compare(engine, expected, stage)
            sums.add(int(toy.checksum(engine)))
            engine.destroy()
    assert len(sums) == 1  # stages have equal bits


def compare(engine: Any, expected: dict[str, Tensor], stage: int) -> None:
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{stage} {n}: {m}")


@pytest.mark.slow
@distributed(world_size=4, transports=("gloo",))
def test_one_bit_adam_of_accumulated_bf16_gradients_on_four_ranks(transport: str) -> None:
    """Stages have equal bits, ranks the same weights, and the loss falls as AdamW's does."""
    losses: dict[Any, float] = {}
    sums: dict[int, int] = {}
    for kind in ("OneBitAdam", "AdamW"):
        for stage in (0, 2, 3) if kind == "OneBitAdam" else (2,):
            params = {"lr": 1e-2, **({"freeze_step": 4} if kind == "OneBitAdam" else {})}
            optimizer = {"type": kind, "params": params}
            engine = toy.make(
                toy.seeded(toy.Lm), stage, transport, dtype="bf16", gradient_accumulation_steps=2, optimizer=optimizer
            )
            last = []
            for step in range(12):
                for micro in range(2):
                    last.append(float(toy.step(engine, toy.tokens(dist.get_rank(), step % 2, micro))))
            losses[kind, stage] = sum(last[-4:])
            sums[stage] = int(toy.checksum(engine))
            engine.destroy()
        if kind == "OneBitAdam":
            assert len(set(sums.values())) == 1
    assert losses["OneBitAdam", 2] < 1.1 * losses["AdamW", 2]


@distributed(world_size=2)
def test_a_gradient_that_is_not_finite_skips_the_exchange() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 1, optimizer=ONE_BIT)
    for step in range(FREEZE + 1):
        toy.step(engine, toy.tokens(dist.get_rank(), step))
    before = int(toy.checksum(engine))
    loss = engine(toy.tokens(dist.get_rank(), 9))
    engine.backward(loss * (float("inf") if dist.get_rank() else 1.0))
    engine.step()
    assert engine.overflow and int(toy.checksum(engine)) == before
    toy.step(engine, toy.tokens(dist.get_rank(), 10))
    assert int(toy.checksum(engine)) != before
    assert all(value.isfinite().all() for value in engine.state_dict().values())
    engine.destroy()


@distributed(world_size=2)
def test_masked_elements_are_not_stepped() -> None:
    model = toy.seeded(toy.Net)
    mask = torch.ones(8)
    mask[3] = 0
    groups = [
        {"params": [model.out.bias], "exp_avg_mask": mask},
        {"params": [param for param in model.parameters() if param is not model.out.bias]},
    ]
    optimizer = OneBitAdam(groups, lr=1e-2, freeze_step=1)
    engine: Any = slipstream.initialize(model=model, optimizer=optimizer, config=toy.settings(0, optimizer=None))[0]
    for step in range(4):
        if step == 1:
            before = engine.state_dict()["out.bias"].clone()
        engine.backward(engine(toy.floats(dist.get_rank(), step)).square().mean())
        engine.step()
    after = engine.state_dict()["out.bias"]
    assert after[3] == before[3] and (after != before).sum() == 7
    engine.destroy()


def test_without_an_engine_it_is_momentum_with_a_frozen_variance() -> None:
    model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    optimizer, adam = (
        OneBitAdam(model.parameters(), lr=1e-2, freeze_step=2),
        torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0),
    )
    for step in range(4):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        for each, one in ((model, optimizer), (twin, adam)):
            one.zero_grad()
            each(x).square().sum().backward()
        if step == 2:
            variance = optimizer.state[model.weight]["exp_avg_sq"].clone()
        optimizer.step()
        if step < 2:
            adam.step()
            torch.testing.assert_close(model.weight, twin.weight)
    assert torch.equal(optimizer.state[model.weight]["exp_avg_sq"], variance)


def test_without_an_engine_one_bit_lamb_is_lamb_then_momentum() -> None:
    model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    ours, plain = OneBitLamb(model.parameters(), freeze_step=3, **options), Lamb(twin.parameters(), **options)
    for step in range(5):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        for each, one in ((model, ours), (twin, plain)):
            one.zero_grad()
            each(x).square().sum().backward()
        state, weight = ours.state[model.weight], model.weight.detach().clone()
        before = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
        ours.step()
        if step < 3:
            plain.step()
            assert torch.equal(model.weight, twin.weight)
            continue
        assert model.weight.grad is not None
        assert torch.equal(state["exp_avg_sq"], before["exp_avg_sq"])
        m = 0.9 * before["exp_avg"] + 0.1 * model.weight.grad
        update = m / ((state["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8) / (1 - 0.9 ** (step + 1))
        ratio = min(float(weight.norm()) * state["mean_inverse_norm"], 10.0)
        expected = weight - 1e-2 * ratio * (float(state["last_factor"]) * update + 0.1 * weight)
        torch.testing.assert_close(model.weight.detach(), expected)


@pytest.mark.parametrize(
    ("option", "message"),
    [({"coeff_beta": 1.0}, "coeff_beta"), ({"factor_min": 2.0}, "factor_min"), ({"freeze_step": 0}, "freeze_step is 0")],
)
def test_options_of_one_bit_lamb_that_cannot_be(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OneBitLamb(nn.Linear(2, 2).parameters(), **option)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 0}}}, "freeze_step is 0"),
        ({"optimizer": {"type": "OneBitLamb", "params": {"freeze_step": 0}}}, "freeze_step is 0"),
        ({"optimizer": ONE_BIT, "slipstream": {"optimizer_states": "int8"}}, "int8"),
        (
            {"optimizer": ONE_BIT, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}},
            "drop offload",
        ),
    ],
)
def test_settings_that_it_cannot_share_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy.make(toy.seeded(toy.Lm), 1, **keys)


def optimizer_states(engine: Any) -> dict[str, dict[str, Tensor]]:
    gathered = {}
    for unit in engine.units:
        for i, name in enumerate(unit.names):
            gathered[name] = optimizer_state.of_parameters(unit, [i], engine.states.steps)[i]
    return gathered


@distributed(world_size=2, transports=("shared", "gloo"))
def test_checkpoints_keep_momentum_variance_and_the_mean_error(transport: str, tmp_path: Path) -> None:
    """A run goes on at any stage with equal bits; all ranks then have the mean of their errors."""
    _save_and_go_on(ONE_BIT, transport, tmp_path)


@distributed(world_size=2)
def test_checkpoints_of_one_bit_lamb(tmp_path: Path) -> None:
    _save_and_go_on(ONE_BIT_LAMB, "shared", tmp_path)


def _save_and_go_on(optimizer: dict[str, Any], transport: str, tmp_path: Path) -> None:
    engine = toy.make(toy.seeded(toy.Lm), 1, transport, optimizer=optimizer)
    for step in range(FREEZE + 2):
        toy.step(engine, toy.tokens(dist.get_rank(), step))
    engine.save_checkpoint(str(tmp_path), tag="late")
    saved = optimizer_states(engine)
    assert saved["head.weight"]["error"].any() and "error" not in saved["embedding.weight"]
    engine.destroy()
    sums = set()
    for stage in cases.stages(transport):
        other = toy.make(toy.seeded(toy.Lm, 5), stage, transport, optimizer=optimizer)
        if stage == 0:  # it is late itself, and has to forget its own errors
            for step in range(FREEZE + 1):
                toy.step(other, toy.tokens(dist.get_rank(), 20 + step))
        other.load_checkpoint(str(tmp_path), tag="late")
        for name, states in optimizer_states(other).items():
            for key, value in states.items():
                torch.testing.assert_close(
                    value, saved[name][key], rtol=1e-6, atol=1e-9, msg=lambda m, k=f"{name} {key}": f"{k}: {m}"
                )
        toy.step(other, toy.tokens(dist.get_rank(), 7))
        assert set(frozen_units(other)) == {False, True}
        sums.add(int(toy.checksum(other)))
        other.destroy()
    assert len(sums) == 1


def frozen_units(engine: Any) -> list[bool]:
    """Whether each unit's variance is frozen."""
    return [unit in engine.states.steps.frozen for unit in engine.units]


@distributed(world_size=2)
def test_the_phase_follows_the_loaded_steps(tmp_path: Path) -> None:
    engine = toy.make(toy.seeded(toy.Lm), 1, optimizer=ONE_BIT)
    toy.step(engine, toy.tokens(dist.get_rank(), 0))
    engine.save_checkpoint(str(tmp_path), tag="warm")
    for step in range(3):
        toy.step(engine, toy.tokens(dist.get_rank(), step))
    assert any(frozen_units(engine))
    engine.load_checkpoint(str(tmp_path), tag="warm")
    assert not any(frozen_units(engine))
    toy.step(engine, toy.tokens(dist.get_rank(), 1))
    assert not any(frozen_units(engine))
    toy.step(engine, toy.tokens(dist.get_rank(), 2))
    assert any(frozen_units(engine))
    engine.destroy()


def zero_biases() -> toy.Lm:
    model = toy.Lm()
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(param)
    return model


def test_a_tensor_of_zeros_has_no_ratio_in_a_checkpoint(tmp_path: Path) -> None:
    """1-bit LAMB: the first step of a bias records none."""
    optimizer = {"type": "OneBitLamb", "params": {"lr": 1e-2, "freeze_step": 1}}
    engine = toy.make(toy.seeded(zero_biases), 1, optimizer=optimizer)
    toy.step(engine, toy.tokens(0, 0))
    engine.save_checkpoint(str(tmp_path), tag="t")
    toy.step(engine, toy.tokens(0, 1))
    expected = int(toy.checksum(engine))
    engine.destroy()
    engine = toy.make(toy.seeded(zero_biases, 3), 1, optimizer=optimizer)
    engine.load_checkpoint(str(tmp_path), tag="t")
    toy.step(engine, toy.tokens(0, 1))
    assert int(toy.checksum(engine)) == expected
    engine.destroy()


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam"])
@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_unit_that_starts_late_is_dense_first(kind: str, transport: str) -> None:
    """Its variance would be 0 otherwise: after as many dense steps as the others had, it exchanges signs."""
    counts = (
        {"var_freeze_step": 6, "var_update_scaler": 3, "local_step_clipper": 1} if kind == "ZeroOneAdam" else {"freeze_step": 3}
    )
    optimizer = {"type": kind, "params": {"lr": 1e-2, "betas": [0.9, 0.99], **counts}}
    sums = set()
    for stage in (1, 3):
        model = toy.seeded(toy.Lm)
        model.blocks[0].requires_grad_(False)
        engine = toy.make(model, stage, transport, optimizer=optimizer)
        for step in range(8):
            toy.step(engine, toy.tokens(dist.get_rank(), step))
        with engine.surgery():
            model.blocks[0].requires_grad_(True)
        moved, signs, before = [], [], engine.state_dict()["blocks.0.up.weight"].clone()
        for step in range(8, 14):
            toy.step(engine, toy.tokens(dist.get_rank(), step))
            after = engine.state_dict()["blocks.0.up.weight"].clone()
            moved.append(float((after - before).norm()))
            late = [unit for unit in engine.units if "blocks.0.up.weight" in unit.names]
            signs.append(late[0] in engine.states.steps.frozen)
            before = after
        assert signs == [False] * 3 + [True] * 3 and max(moved) < 3 * min(moved), moved
        sums.add(int(toy.checksum(engine)))
        engine.destroy()
    assert len(sums) == 1


@distributed(world_size=2)
def test_a_parameter_that_stops_or_starts_in_its_unit(tmp_path: Path) -> None:
    """One that has no gradients keeps the others' phase, also after a load; one that gets them first is trained densely."""
    model = toy.seeded(toy.Lm)
    engine = toy.make(model, 1, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-2, "betas": [0.9, 0.99], "freeze_step": 3}})
    model.head.bias.requires_grad_(False)

    def step(index: int) -> bool:
        toy.step(engine, toy.tokens(dist.get_rank(), index))
        return all(unit in engine.states.steps.frozen for unit in engine.units if "head.weight" in unit.names)

    assert [step(i) for i in range(5)] == [False] * 3 + [True] * 2
    engine.save_checkpoint(str(tmp_path), tag="t")
    engine.load_checkpoint(str(tmp_path), tag="t")
    assert step(5)
    model.head.bias.requires_grad_(True)
    moved = []
    for i in range(6, 12):
        before = engine.state_dict()["head.bias"].clone()
        step(i)
        moved.append(float((engine.state_dict()["head.bias"] - before).norm()))
    assert min(moved) > 0 and max(moved) < 4 * min(moved), moved
    engine.destroy()


@distributed(world_size=2)
def test_a_new_mask_is_followed() -> None:
    model = toy.seeded(toy.Net)
    mask, bias = torch.ones(8), model.out.bias
    groups = [{"params": [bias], "exp_avg_mask": None}, {"params": [p for p in model.parameters() if p is not bias]}]
    optimizer = OneBitAdam(groups, lr=1e-3, freeze_step=3)
    engine: Any = slipstream.initialize(model=model, optimizer=optimizer, config=toy.settings(0, optimizer=None))[0]
    stepped = []
    for step in range(8):
        if step == 5:
            mask[2] = 0
            optimizer.param_groups[0]["exp_avg_mask"] = mask
        if step == 7:
            mask[2:4] = torch.tensor([1.0, 0.0])
        before = engine.state_dict()["out.bias"].clone()
        engine.backward(engine(toy.floats(dist.get_rank(), step)).square().mean())
        engine.step()
        stepped.append((engine.state_dict()["out.bias"] != before).tolist())
    assert all(stepped[4]) and stepped[5] == stepped[6] == [i != 2 for i in range(8)] and stepped[7] == [i != 3 for i in range(8)]
    engine.destroy()


def test_groups_that_freeze_in_different_steps_are_refused() -> None:
    model = toy.seeded(toy.Lm)
    own, others = list(model.head.parameters()), [*model.embedding.parameters(), *model.blocks.parameters()]
    for options, is_refused in (({"freeze_step": 9}, True), ({"freeze_step": 9, "non_freeze": True}, False)):
        optimizer = OneBitAdam([{"params": own, **options}, {"params": others}], freeze_step=2)
        config = toy.settings(1, optimizer=None)
        if is_refused:
            with pytest.raises(ValueError, match=r"OneBitAdam change to signs in different steps.*freeze=2.*freeze=9"):
                slipstream.initialize(model=model, optimizer=optimizer, config=config)
        else:
            engine: Any = slipstream.initialize(model=model, optimizer=optimizer, config=config)[0]
            for step in range(3):
                toy.step(engine, toy.tokens(0, step))
            assert any(frozen_units(engine))
            engine.destroy()


def test_after_the_freeze_a_checkpoint_needs_its_states(tmp_path: Path) -> None:
    """Signs of gradients over a variance of 0 would be noise. What is refused changes nothing; a new run is dense first."""
    engine = toy.make(toy.seeded(toy.Lm), 1, optimizer=ONE_BIT)
    for step in range(3):
        toy.step(engine, toy.tokens(0, step))
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    engine = toy.make(toy.seeded(toy.Lm, 1), 1, optimizer=ONE_BIT)
    before = toy.checksum(engine)
    with pytest.raises(CheckpointError, match=r"of step 3, and OneBitAdam exchanges signs after 2,.*load_module_only=True begins"):
        engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert engine.global_steps == 0 and torch.equal(toy.checksum(engine), before)
    engine.load_checkpoint(str(tmp_path), load_module_only=True)
    toy.step(engine, toy.tokens(0, 0))
    assert not any(frozen_units(engine))
    engine.destroy()


def test_what_the_log_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That the norm has another meaning, that weights loaded before the freeze train densely, which options have no effect."""
    resolve.say_no_effect.cache_clear()
    caplog.set_level("INFO", "slipstream")
    optimizer = {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 2, "comm_backend_name": "nccl"}}
    engine = toy.make(toy.seeded(toy.Lm), 1, optimizer=optimizer)
    for step in range(5):
        engine.save_checkpoint(str(tmp_path), tag=str(step))
        toy.step(engine, toy.tokens(0, step))
    engine.load_checkpoint(str(tmp_path), tag="1", load_optimizer_states=False)
    engine.destroy()
    said = [record for record in caplog.records if record.name.startswith("slipstream")]
    once = (
        "from step 3 on.*the root of the mean over ranks",
        "so the next 2 steps are dense",
        "'nccl' of OneBitAdam has no effect",
    )
    for pattern in once:
        assert len([record for record in said if re.search(pattern, record.getMessage())]) == 1, pattern
    warnings = [record.getMessage() for record in said if record.levelname == "WARNING"]
    assert any("no effect" in text for text in warnings) and any("are dense" in text for text in warnings)


@distributed(world_size=2)
def test_stages_treat_a_tied_embedding_alike() -> None:
    """In the first stage it is an embedding, in the last the head: both send it as rows, or they would wait for each other."""
    transformers = pytest.importorskip("transformers")

    def train(**blocks: Any) -> list[float]:
        torch.manual_seed(3)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes))
        config = toy.settings(0, gradient_accumulation_steps=2, slipstream={"mesh": {"pp": 2}, "timeout_s": 30}, **blocks)
        engine, *_ = slipstream.initialize(model=model, config=config)
        ids = torch.randint(64, (2, 2, 8), generator=torch.Generator().manual_seed(1))
        losses = [float(engine.train_batch(iter([{"input_ids": each, "labels": each} for each in ids]))) for _ in range(5)]
        engine.destroy()
        return losses

    rate = {"lr": 1e-2}
    plain = train(optimizer={"type": "AdamW", "params": rate})
    assert train(optimizer={"type": "AdamW", "params": rate}, sparse_gradients=True) == plain
    signs = train(optimizer={"type": "OneBitAdam", "params": rate | {"freeze_step": 2}})
    assert signs[:3] == pytest.approx(plain[:3], rel=1e-6) and signs[4] < signs[2]
