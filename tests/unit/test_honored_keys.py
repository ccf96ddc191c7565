"""Every honored key of the JSON changes what training does: one test per key, named in `config/schema.py`.

Each trains two engines (or more) that differ in that one key and sees the difference where a user would: in weights,
gradients, dtypes inside the model, batches, log lines. Those that need several ranks are in `tests/dist`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.config import DataWorld, ModelFacts, resolve
from slipstream.train.precision import MAX_SKIPPED
from tests import toy

TINY = 2.0**-14  # an update too small for a weight of 1 in fp16 and in bf16


class Dot(nn.Module):
    """The scalar product of a weight of ones with the input, so the weight's gradient is the input.

    `dtypes`: of what the forward saw (weight, input); `arrived`: the gradients that arrived at its output.
    """

    def __init__(self, numel: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))
        self.dtypes: list[tuple[torch.dtype, torch.dtype]] = []
        self.arrived: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes.append((self.weight.dtype, x.dtype))
        out = (self.weight.float() * x.float()).sum()
        if out.requires_grad:
            out.register_hook(lambda grad: self.arrived.append(float(grad)))
        return out


class Mixed(nn.Module):
    """A linear layer that notes the dtype it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.computed: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.computed.append(y.dtype)
        return y.float().square().mean()


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    """The level of the package's logger, which keys change, is the process's."""
    package = logging.getLogger("slipstream")
    level, handlers = package.level, list(package.handlers)
    package.setLevel(logging.NOTSET)
    yield
    package.setLevel(level)
    package.handlers[:] = handlers


def sgd(model: nn.Module, *, lr: float = 1.0, stage: int = 0, dtype: str = "fp32", **blocks: Any) -> Any:
    """An engine whose step is weight -= lr * gradient, unclipped unless `blocks` say so."""
    plain = {"optimizer": {"type": "SGD", "params": {"lr": lr}}, "gradient_clipping": 0.0}
    return toy.make(model, stage, dtype=dtype, **(plain | blocks))


def dot(*, steps: int = 0, x: float = 1.0, **options: Any) -> Any:
    """An engine of a `Dot`, after so many steps on `x`."""
    engine = sgd(Dot(), **options)
    for _ in range(steps):
        toy.step(engine, torch.full((2,), x))
    return engine


def weights(engine: Any) -> Tensor:
    value: Tensor = engine.state_dict()["weight"].float()
    return value


def master(engine: Any) -> float:
    return float(engine.optimizer_state("weight")["master"][0])


# ---- batches and gradients


def test_managed_gradient_accumulation() -> None:
    """Managed: step() counts and divides. Not managed: every step() is one, and the caller divides."""
    managed = dot(steps=1, gradient_accumulation_steps=2)
    assert managed.global_steps == 0 and torch.equal(weights(managed), torch.ones(2))
    toy.step(managed, torch.full((2,), 3.0))
    assert managed.global_steps == 1 and torch.equal(weights(managed), torch.full((2,), -1.0))  # 1 - (1 + 3) / 2

    own = dot(steps=1, gradient_accumulation_steps=2, managed_gradient_accumulation=False)
    assert own.global_steps == 1 and torch.equal(weights(own), torch.zeros(2))
    for x in (1.0, 3.0):
        own.backward(own(torch.full((2,), x)))
    own.step()
    assert own.global_steps == 2 and torch.equal(weights(own), torch.full((2,), -4.0))


def test_gradient_clipping() -> None:
    gradient = torch.tensor([3.0, 4.0])
    for clipping, factor in ((0.0, 1.0), (1.0, 1 / 5), (2.5, 1 / 2), (50.0, 1.0)):
        engine = sgd(Dot(), gradient_clipping=clipping)
        toy.step(engine, gradient)
        torch.testing.assert_close(weights(engine), 1 - factor * gradient)
        assert engine.global_grad_norm == 5.0  # as it was before


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_clipping_by_a_norm_that_is_not_finite_is_torch_s(bad: float) -> None:
    """An infinite norm makes finite gradients zero, NaN makes them NaN, where the step is taken all the same."""
    gradient = torch.tensor([bad, 4.0])
    engine = sgd(Dot(), gradient_clipping=1.0, slipstream={"check_grad_overflow": False})
    toy.step(engine, gradient)
    twin = nn.Parameter(torch.ones(2))
    twin.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([twin], 1.0)
    torch.testing.assert_close(weights(engine), (twin - twin.grad).detach(), equal_nan=True)


@pytest.mark.parametrize("stage", [1, 2])
def test_data_types_grad_accum_dtype(stage: int) -> None:
    """1 + 2**-9 needs more bits than bf16 has."""
    norms = {}
    for dtype in (None, "fp32", "bf16"):
        block = {"data_types": {"grad_accum_dtype": dtype}}
        engine = sgd(Dot(1), stage=stage, dtype="bf16", gradient_accumulation_steps=2, **block)
        for x in (1.0, 2.0**-9):
            toy.step(engine, torch.full((1,), x))
        norms[dtype] = engine.global_grad_norm
    exact = (1 + 2.0**-9) / 2
    assert norms == {None: exact, "fp32": exact, "bf16": 0.5}


# ---- fp16


def test_fp16_enabled() -> None:
    plain, half = dot(steps=1), dot(steps=1, fp16={"enabled": True})
    assert [engine.module.dtypes[0][0] for engine in (plain, half)] == [torch.float32, torch.float16]
    assert [engine.state_dict()["weight"].dtype for engine in (plain, half)] == [torch.float32, torch.float16]
    assert [engine.module.arrived for engine in (plain, half)] == [[1.0], [65536.0]]  # the loss scale


def test_fp16_auto_cast() -> None:
    for cast, dtype in ((False, torch.float32), (True, torch.float16)):
        engine = dot(steps=1, fp16={"enabled": True, "auto_cast": cast})
        assert engine.module.dtypes == [(torch.float16, dtype)]


def test_fp16_loss_scale() -> None:
    """A gradient of 2**-26 is zero in fp16. A scale keeps it; a static one stays where it is."""
    small = 2.0**-26
    for scale, moved in ((1.0, 0.0), (128.0, small)):
        engine = dot(steps=1, x=small, lr=1024.0, dtype="fp16", fp16={"loss_scale": scale})
        assert engine.module.arrived == [scale]
        assert 1 - master(engine) == 1024 * moved
        toy.step(engine, torch.full((2,), math.inf))
        assert engine.skipped_steps == 1 and engine.precision.loss_scale == scale


@pytest.mark.parametrize("dtype, block", [("fp16", {"loss_scale": 128.0}), ("bf16", {"check_grad_overflow": True}), ("fp32", {})])
def test_skipping_for_ever_is_stopped(dtype: str, block: dict[str, Any]) -> None:
    """Where no scale can fall. A step that is applied starts the count anew."""
    engine = dot(steps=MAX_SKIPPED - 1, x=math.nan, dtype=dtype, **({dtype: block} if block else {}))
    toy.step(engine, torch.ones(2))
    assert engine.step_applied
    for _ in range(MAX_SKIPPED - 1):
        toy.step(engine, torch.full((2,), math.nan))
    with pytest.raises(OverflowError, match=f"not finite in {MAX_SKIPPED} steps in a row.*data.*module of 'weight'"):
        toy.step(engine, torch.full((2,), math.nan))


def test_overflow_is_of_the_last_boundary() -> None:
    engine = dot(dtype="fp16", fp16={"initial_scale_power": 4}, gradient_accumulation_steps=2)
    overflows = []
    for x in (1.0, 1.0, 1.0, math.inf, 1.0, 1.0):
        toy.step(engine, torch.full((2,), x))
        overflows.append(engine.optimizer.overflow)
    assert overflows == [False, False, False, True, True, False]


def test_fp16_initial_scale_power() -> None:
    for power in (0, 4, 10):
        engine = dot(steps=1, dtype="fp16", fp16={"initial_scale_power": power})
        assert engine.module.arrived == [2.0**power]


def scales(*batches: float, **block: Any) -> list[float]:
    """The loss scale after each batch; one that is infinite overflows."""
    engine = dot(dtype="fp16", fp16={"initial_scale_power": 4} | block)
    values = []
    for x in batches:
        toy.step(engine, torch.full((2,), x))
        values.append(engine.precision.loss_scale)
    return values


def test_fp16_loss_scale_window() -> None:
    """As in DeepSpeed, the first step, and the first one after an overflow, do not count."""
    assert scales(1, 1, 1, 1, loss_scale_window=2) == [16, 16, 32, 32]
    assert scales(1, 1, 1, 1, loss_scale_window=3) == [16, 16, 16, 32]
    assert scales(1, 1, math.inf, 1, 1, 1, loss_scale_window=1, hysteresis=1) == [16, 32, 16, 16, 32, 64]


def test_fp16_hysteresis() -> None:
    assert scales(math.inf, math.inf, math.inf, hysteresis=1) == [8, 4, 2]
    assert scales(math.inf, math.inf, math.inf, hysteresis=3) == [16, 16, 8]


def test_fp16_consecutive_hysteresis() -> None:
    """A clean step between two overflows gives the patience back, or not."""
    batches = (math.inf, 1.0, math.inf)
    assert scales(*batches, hysteresis=2, consecutive_hysteresis=False) == [16, 16, 8]
    assert scales(*batches, hysteresis=2, consecutive_hysteresis=True) == [16, 16, 16]


def test_fp16_min_loss_scale() -> None:
    assert scales(math.inf, math.inf, hysteresis=1, min_loss_scale=1) == [8, 4]
    with pytest.raises(OverflowError, match=r"lowest loss scale \(8\.0\)"):
        scales(math.inf, math.inf, hysteresis=1, min_loss_scale=8)


def test_fp16_master_weights_and_grads() -> None:
    """Updates that fp16 cannot hold are lost where the masters are fp16; so are gradients that accumulate."""
    for low, expected in ((False, 1 - 8 * TINY), (True, 1.0)):
        block = {"loss_scale": 1, "fp16_master_weights_and_grads": low}
        assert master(dot(steps=8, lr=TINY, dtype="fp16", fp16=block)) == expected
        engine = dot(dtype="fp16", fp16=block, gradient_accumulation_steps=2)
        for x in (1.0, 2.0**-12):
            engine.backward(engine(torch.full((2,), x)))
            engine.micro_steps += 1
        assert float(engine.gradient("weight")[0]) == (0.5 if low else 0.5 + 2.0**-13)


# ---- bf16


def test_bf16_enabled() -> None:
    plain, half = dot(steps=8, lr=TINY), dot(steps=8, lr=TINY, bf16={"enabled": True})
    assert [engine.module.dtypes[0][0] for engine in (plain, half)] == [torch.float32, torch.bfloat16]
    assert [float(weights(engine)[0]) for engine in (plain, half)] == [1 - 8 * TINY, 1.0]
    assert master(half) == 1 - 8 * TINY and half.module.arrived[0] == 1.0  # fp32 masters, no loss scale


def test_bf16_check_grad_overflow() -> None:
    for check in (True, False):
        engine = dot(steps=1, x=math.inf, dtype="bf16", bf16={"check_grad_overflow": check})
        assert engine.skipped_steps == check
        assert bool(weights(engine).isfinite().all()) is check


def test_slipstream_check_grad_overflow(caplog: pytest.LogCaptureFixture) -> None:
    """fp32, where plain PyTorch trains on with NaN for ever: that is told ever more rarely, with its count."""
    for check, counts in ((True, [1, 2, 3, 4, 5]), (False, [1, 2, 4])):
        caplog.clear()
        engine = dot(steps=5, x=math.nan, slipstream={"check_grad_overflow": check})
        assert engine.skipped_steps == 5 * check and engine.nonfinite_steps == 5 and engine.overflow is check
        assert bool(weights(engine).isfinite().all()) is check
        what = "skipped" if check else "applied anyway"
        assert [f"'weight' is not finite (the first such parameter); step {what} ({n} so far)" for n in counts] == [
            message.partition("gradient of ")[2] for message in caplog.messages if "not finite" in message
        ]


def test_an_overflow_tells_the_old_and_the_new_loss_scale(caplog: pytest.LogCaptureFixture) -> None:
    ways = {"initial_scale_power": 4}, {"loss_scale": 128.0}
    lines = [
        ["stays 16 (fp16.hysteresis: it falls after 1 more)", "16 -> 8", "8 -> 4"],
        ["stays 128 (fp16.loss_scale is static)"] * 3,
    ]
    for block, expected in zip(ways, lines, strict=True):
        caplog.clear()
        dot(steps=3, x=math.inf, dtype="fp16", fp16=block)
        assert [message.partition("loss scale ")[2] for message in caplog.messages if "skipped" in message] == expected


@pytest.mark.parametrize(
    "dtype, block", [("bf16", {"torch_autocast": {"enabled": True}}), ("fp16", {"fp16": {"enabled": True, "auto_cast": True}})]
)
def test_inputs_of_another_dtype_get_a_hint(dtype: str, block: dict[str, Any]) -> None:
    """Beside torch's own words; what the hint says works, and errors about anything else get none."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    kinds: tuple[Callable[[], nn.Module], ...] = (lambda: nn.Linear(4, 4), lambda: nn.LayerNorm(4), lambda: nn.GRU(4, 4))
    for kind in kinds:
        engine = sgd(kind(), dtype=dtype)
        with pytest.raises((RuntimeError, ValueError), match="type") as raised:
            engine(torch.ones(2, 4))
        (hint,) = raised.value.__notes__
        assert f"weights are {half} and it was given torch.float32: cast with .to({half}), or set " in hint
        engine(torch.ones(2, 4, dtype=half))
        sgd(kind(), **block)(torch.ones(2, 4))
    for wrong in (torch.ones(2, 5, dtype=half), torch.ones(2, 5)):
        with pytest.raises(RuntimeError) as raised:
            sgd(nn.Sequential(nn.Flatten(), nn.Unflatten(1, (2, 2))), dtype=dtype)(wrong)
        assert not hasattr(raised.value, "__notes__")
    with pytest.raises(RuntimeError) as raised:
        sgd(nn.Embedding(4, 4), dtype=dtype)(torch.ones(2))
    assert not hasattr(raised.value, "__notes__")


def test_parameters_of_an_iterator_that_was_read_are_missed() -> None:
    model = nn.Linear(2, 2)
    trained = filter(lambda param: param.requires_grad, model.parameters())
    assert sum(param.numel() for param in trained) == 6
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD"}}
    with pytest.raises(ValueError, match=r"model_parameters=\) is empty, and the config has an optimizer \(SGD\)"):
        slipstream.initialize(model=model, model_parameters=trained, config=config)


def test_an_optimizer_of_frozen_parameters_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for trainable, num_warnings in (((True, True), 0), ((False, True), 0), ((False, False), 1)):
        caplog.clear()
        model = nn.Sequential(*(nn.Linear(2, 2).requires_grad_(flag) for flag in trainable))
        sgd(model)
        warnings = [message for message in caplog.messages if "none of the 4 parameters of SGD requires a gradient" in message]
        assert len(warnings) == num_warnings


def test_bf16_master_weights_and_grads() -> None:
    for low, expected in ((False, 1 - 8 * TINY), (True, 1.0)):
        block = {"bf16_master_weights_and_grads": low}
        assert master(dot(steps=8, lr=TINY, dtype="bf16", bf16=block)) == expected
        engine = dot(dtype="bf16", bf16=block, gradient_accumulation_steps=2)
        for x in (1.0, 2.0**-9):
            engine.backward(engine(torch.full((2,), x)))
            engine.micro_steps += 1
        assert float(engine.gradient("weight")[0]) == (0.5 if low else 0.5 + 2.0**-10)


@pytest.mark.parametrize("optimizer", ["AdamW", "Lion"])
def test_bf16_optimizer_states(optimizer: str) -> None:
    """Half the bytes: by the native AdamW and by any torch optimizer."""
    for low, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        named = {"type": optimizer, "params": {"lr": 1e-2}}
        engine = sgd(Dot(), dtype="bf16", bf16={"bf16_optimizer_states": low}, optimizer=named)
        for x in (0.1, 0.3):
            toy.step(engine, torch.full((2,), x))
        states = engine.optimizer_state("weight")
        assert {states[name].dtype for name in states if name != "master"} == {dtype}


# ---- other precision


def test_torch_autocast_enabled() -> None:
    for enabled, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        engine = sgd(Mixed(), torch_autocast={"enabled": enabled})
        toy.step(engine, torch.ones(2, 4))
        assert engine.module.computed == [dtype]
        assert engine.state_dict()["linear.weight"].dtype is torch.float32


def test_torch_autocast_dtype() -> None:
    for name, dtype, scale in (("bf16", torch.bfloat16, 1.0), ("fp16", torch.float16, 65536.0)):
        engine = sgd(Mixed(), torch_autocast={"enabled": True, "dtype": name})
        toy.step(engine, torch.ones(2, 4))
        assert engine.module.computed == [dtype] and engine.precision.loss_scale == scale


def test_data_types_param_dtype() -> None:
    for name, dtype in ((None, torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)):
        engine = dot(steps=1, data_types={"param_dtype": name})
        assert engine.module.dtypes[0][0] is dtype


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("saved", torch.full((4,), 0.1))
        self.register_buffer("derived", torch.full((4,), 0.1), persistent=False)
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))
        self.register_buffer("codes", torch.zeros(4, dtype=torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float().square().mean()


class Routed(nn.Module):
    """Its class names buffers, as transformers' do; its child names one more, for itself, and one for fp16 alone."""

    _keep_in_fp32_modules_strict = ("bias*1",)

    class Child(nn.Module):
        _keep_in_fp32_modules_strict = ("scale",)
        _keep_in_fp32_modules = ("shift",)

        def __init__(self) -> None:
            super().__init__()
            for name in ("bias_1", "scale", "shift", "plain"):
                self.register_buffer(name, torch.full((2,), 1.001))

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.child = nn.Linear(2, 2), self.Child()
        self.register_buffer("scale", torch.full((2,), 1.001))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float().square().mean()


def test_data_types_keep_in_fp32_modules() -> None:
    """Buffers whose names match keep their values; "auto" and nothing mean what the model's class says, unless all have a dtype."""
    for weights, types, expected in (
        ("bf16", {}, {"child.bias_1", "child.scale"}),
        ("bf16", {"keep_in_fp32_modules": "auto"}, {"child.bias_1", "child.scale"}),
        ("fp16", {}, {"child.bias_1", "child.scale", "child.shift"}),
        ("bf16", {"keep_in_fp32_modules": []}, set()),
        ("bf16", {"keep_in_fp32_modules": ["child.p*n", "shift"]}, {"child.plain", "child.shift"}),
        ("bf16", {"buffer_dtype": "bf16"}, set()),
        ("bf16", {"buffer_dtype": "bf16", "keep_in_fp32_modules": "plain"}, {"child.plain"}),
        ("fp32", {"keep_in_fp32_modules": []}, {"scale", *(f"child.{name}" for name in ("bias_1", "scale", "shift", "plain"))}),
    ):
        engine = toy.make(Routed(), 3, dtype=weights, data_types=types)
        buffers = dict(engine.module.named_buffers())
        assert {name for name, buffer in buffers.items() if buffer.dtype is torch.float32} == expected, (weights, types)
        assert all((buffer == 1.001).all() for name, buffer in buffers.items() if name in expected)
        engine.destroy()
    with pytest.raises(ValueError, match=r"keep_in_fp32_modules \(\['\(bias'\]\): no regular expression"):
        toy.make(Routed(), 3, dtype="bf16", data_types={"keep_in_fp32_modules": ["(bias"]})


def test_data_types_buffer_dtype() -> None:
    """All buffers of numbers; without the key, saved ones follow the weights."""
    narrow, wide = torch.bfloat16, torch.float32
    for weights, stated, expected in (
        ("bf16", None, (narrow, wide)),
        ("bf16", "fp32", (wide, wide)),
        ("bf16", "bf16", (narrow, narrow)),
        ("fp32", "fp16", (torch.float16,) * 2),
        ("fp32", None, (wide, wide)),
    ):
        engine = toy.make(Buffered(), 3, dtype=weights, data_types={"buffer_dtype": stated})
        model = engine.module
        assert (model.saved.dtype, model.derived.dtype) == expected
        assert model.number.dtype is torch.int64 and model.codes.dtype is torch.float8_e4m3fn
        with engine.surgery():
            model.register_buffer("late", torch.ones(2))
        assert model.late.dtype is expected[0]
        engine.destroy()


# ---- activations


class Counting(nn.Module):
    """Three blocks that count their forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.runs = [0, 0, 0]
        for i, block in enumerate(self.blocks):
            own = block.forward

            def forward(x: Tensor, i: int = i, own: Any = own) -> Tensor:
                self.runs[i] += 1
                return own(x).exp()

            block.forward = forward

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def runs(**blocks: Any) -> list[int]:
    """Of each block in one step."""
    engine = sgd(toy.seeded(Counting), **blocks)
    toy.step(engine, torch.ones(2, 4))
    counts: list[int] = engine.module.runs
    return counts


def test_slipstream_activations(caplog: pytest.LogCaptureFixture) -> None:
    """What "offload" does on a CUDA device is in `tests/unit/test_activation.py`."""
    for way, expected in (("keep", 1), ("recompute", 2), ("offload", 1)):
        assert runs(slipstream={"activations": way}) == [expected] * 3
    (warning,) = [message for message in caplog.messages if "no effect" in message]
    assert "slipstream.activations = offload" in warning


def test_number_checkpoints() -> None:
    for number, expected in ((None, [1, 1, 1]), (0, [1, 1, 1]), (1, [2, 1, 1]), (2, [2, 2, 1]), (3, [2, 2, 2]), (9, [2, 2, 2])):
        assert runs(activation_checkpointing={"number_checkpoints": number}) == expected
    assert runs(activation_checkpointing={"number_checkpoints": 1}, slipstream={"activations": "recompute"}) == [2, 1, 1]


def test_cpu_checkpointing(caplog: pytest.LogCaptureFixture) -> None:
    """It asks for recomputing; where the inputs wait is in `tests/unit/test_activation.py`."""
    assert runs(activation_checkpointing={"cpu_checkpointing": False}) == [1, 1, 1]
    assert runs(activation_checkpointing={"cpu_checkpointing": True}) == [2, 2, 2]
    (warning,) = [message for message in caplog.messages if "no effect" in message]
    assert "activation_checkpointing.cpu_checkpointing" in warning


def test_synchronize_checkpoint_boundary() -> None:
    """The calls themselves are counted in `tests/unit/test_activation.py`."""
    for device, ask, way, expected in (
        ("cuda", True, "recompute", True),
        ("cuda", False, "recompute", False),
        ("cuda", True, "keep", False),
        ("cpu", True, "recompute", False),
    ):
        raw = toy.settings(0, activation_checkpointing={"synchronize_checkpoint_boundary": ask}, slipstream={"activations": way})
        plan = resolve(raw, world=DataWorld(ranks=1), facts=ModelFacts(device_type=device, supports_bf16=True))
        assert plan.activations.synchronize is expected
        assert any("synchronize_checkpoint_boundary has no effect" in note for note in plan.notes) is (ask and not expected)


def test_profile(caplog: pytest.LogCaptureFixture) -> None:
    for ask in (False, True):
        caplog.clear()
        logging.getLogger("slipstream").setLevel(logging.NOTSET)
        caplog.set_level(logging.INFO, "slipstream")
        runs(activation_checkpointing={"profile": ask, "number_checkpoints": 3})
        timed = [message for message in caplog.messages if "recompute" in message and message.startswith("step 1:")]
        assert len(timed) == ask and all("checkpointed forward" in message for message in timed)


# ---- what is said


def lines(caplog: pytest.LogCaptureFixture, start: str, **blocks: Any) -> list[str]:
    """The log lines of four steps that begin with `start`."""
    caplog.clear()
    logging.getLogger("slipstream").setLevel(logging.NOTSET)
    dot(steps=4, **blocks)
    return [message for message in caplog.messages if message.startswith(start)]


def test_steps_per_print(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, "step") == []
    assert [line.split(",")[0] for line in lines(caplog, "step", steps_per_print=2)] == ["step 2", "step 4"]
    assert [line.split(",")[0] for line in lines(caplog, "step", steps_per_print=3)] == ["step 3"]
    assert lines(caplog, "step", steps_per_print="inf") == []


def test_wall_clock_breakdown(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, "step", wall_clock_breakdown=False) == []
    logged = lines(caplog, "step", wall_clock_breakdown=True)
    assert len(logged) == 4 and all(f"{part} " in line for line in logged for part in ("forward", "backward", "step"))


def test_dump_state(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, "key", dump_state=False) == []
    (table,) = lines(caplog, "key", dump_state=True)
    assert "zero_optimization.stage" in table and "optimizer.params.lr" in table


def test_log_level(caplog: pytest.LogCaptureFixture) -> None:
    """One warning when it starts, one information per step."""
    verbose = {"steps_per_print": 1, "zero_optimization": {"reduce_bucket_size": 7}}
    for level, warnings, steps in ((None, 1, 4), ("info", 1, 4), ("warning", 1, 0), ("error", 0, 0)):
        block = {} if level is None else {"log_level": level}
        assert len(lines(caplog, "step", **verbose, **block)) == steps
        assert sum("reduce_bucket_size" in message for message in caplog.messages) == warnings


# ---- data


def loader(samples: int, **blocks: Any) -> Any:
    config = toy.settings(0, **blocks)
    return slipstream.initialize(model=Dot(), config=config, training_data=torch.arange(samples))[2]


def test_dataloader_drop_last() -> None:
    for drop, sizes in ((False, [2, 2, 1]), (True, [2, 2])):
        batches = loader(5, dataloader_drop_last=drop)
        assert len(batches) == len(sizes) and [len(batch) for batch in batches] == sizes


def test_slipstream_seed() -> None:
    def order(seed: int) -> list[int]:
        return torch.cat(list(loader(32, slipstream={"seed": seed}))).tolist()

    assert order(0) != order(1) and order(1) == order(1) and sorted(order(1)) == list(range(32))


# ---- debugging


class Stale(nn.Module):
    """Blocks of which the first keeps a tensor of its weights longer than it may."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.alias: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.alias = self.blocks[0].weight.detach() if self.blocks[0].weight.dim() == 2 else None
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_slipstream_poison_released() -> None:
    """Weights that were released read as NaN, and nothing that is right reads them."""
    losses = {}
    for poison in (False, True):
        engine = sgd(toy.seeded(Stale), stage=3, lr=0.1, slipstream={"poison_released": poison})
        losses[poison] = [float(toy.step(engine, torch.ones(2, 4))) for _ in range(3)]
        assert bool(engine.module.alias.isnan().all()) is poison
    assert losses[False] == losses[True] and losses[True][2] < losses[True][0]
