"""fp32, bf16, fp16 and autocast: overflows, loss scales, dtypes of every state."""

import collections
import dataclasses
import logging
import types
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests import cases, probe, toy
from tests.pool import distributed

STAGES = cases.STAGES


def dynamic(**options: Any) -> dict[str, Any]:
    return {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 1000, **options}


def spoiled_step(engine: Any, by: float, rank: int = 1, name: str = "blocks.1.up.weight") -> None:
    """A step with one rank's gradient of one parameter multiplied by `by`."""
    engine.watch.phase = "test"
    param = engine.module.get_parameter(name)
    handle = param.register_hook(lambda grad: grad * by if engine.rank == rank else grad)
    toy.step(engine, toy.tokens(engine.rank, 0))
    handle.remove()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@distributed(world_size=2, transports=("shared", "gloo"))
def test_an_overflow_on_one_rank_skips_all_and_names_the_parameter(bad: float, transport: str) -> None:
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger, handler = logging.getLogger("slipstream"), Keep()
    logger.addHandler(handler)
    for stage in cases.stages(transport):
        records.clear()
        engine = toy.make(
            toy.seeded(toy.Lm),
            stage,
            transport,
            fp16=dynamic(),
            gradient_clipping=1.0,
            scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.02}},
        )
        before, rate = toy.checksum(engine), engine.lr_scheduler.state_dict()
        spoiled_step(engine, bad)
        assert toy.checksum(engine) == before and engine.lr_scheduler.state_dict() == rate
        assert (engine.global_steps, engine.skipped_steps, engine.precision.loss_scale) == (1, 1, 8.0)
        assert not engine.step_applied and engine.optimizer.overflow
        said = [text for text in records if "'blocks.1.up.weight' is not finite" in text and "skipped" in text]
        assert len(said) == (engine.rank == 0), records
        toy.step(engine, toy.tokens(engine.rank, 1))
        assert engine.step_applied and toy.checksum(engine) != before
        engine.destroy()
    logger.removeHandler(handler)


@distributed(world_size=2)
def test_the_loss_scale_follows_its_rules() -> None:
    for stage in (0, 3):
        engine = toy.make(toy.seeded(toy.Lm), stage, fp16=dynamic(hysteresis=2, loss_scale_window=2, min_loss_scale=4))
        scales = []
        for bad in (1, 1, 1, float("inf"), float("inf"), float("inf"), 1, 1, 1):
            spoiled_step(engine, bad)
            scales.append(engine.precision.loss_scale)
        # two clean steps after the first double; the hysteresis of 2 swallows the first overflow; then the same again
        assert scales == [16, 16, 32, 32, 16, 8, 8, 8, 16]
        engine.destroy()


@distributed(world_size=2)
def test_the_lowest_scale_stops_the_run_with_advice() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 2, fp16=dynamic(initial_scale_power=1, min_loss_scale=1))
    spoiled_step(engine, float("inf"))
    assert engine.precision.loss_scale == 1
    with pytest.raises(OverflowError, match=r"lowest loss scale \(1\.0\).*bf16"):
        spoiled_step(engine, float("inf"))
    engine.destroy()


class Pair(NamedTuple):
    y: Tensor
    h: Tensor


@dataclasses.dataclass
class Output:
    y: Tensor
    h: Any
    name: str = "fp16"


class Returning(nn.Module):
    def __init__(self, net: toy.Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        h = self.net.body(self.net.inp(x))
        return self.pack(self.net.out(h), h)

    def pack(self, y: Tensor, h: Tensor) -> Any:
        return y, [h, None, 3]


class ReturningPair(Returning):
    def pack(self, y: Tensor, h: Tensor) -> Any:
        return Pair(y, h)


class ReturningDataclass(Returning):
    def pack(self, y: Tensor, h: Tensor) -> Any:
        return Output(y, {"inner": h})


class ReturningDictionary(Returning):
    def pack(self, y: Tensor, h: Tensor) -> Any:
        return collections.OrderedDict(y=y, h=(h, None))


class ReturningModelOutput(Returning):
    def pack(self, y: Tensor, h: Tensor) -> Any:
        outputs = pytest.importorskip("transformers.modeling_outputs", reason="transformers is not installed")
        return outputs.BaseModelOutput(last_hidden_state=y, hidden_states=(h,))


OUTPUTS = {
    "tuple": Returning,
    "named tuple": ReturningPair,
    "dataclass": ReturningDataclass,
    "dictionary": ReturningDictionary,
    "ModelOutput": ReturningModelOutput,
}


def tensors_of(out: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(vars(out) if type(out) is Output else out) if isinstance(leaf, Tensor)]


def loss_of(out: Any) -> Tensor:
    y, h = tensors_of(out)
    return y.float().square().mean() + h.float().square().mean()


@distributed(world_size=2)
def test_gradients_do_not_depend_on_the_scale() -> None:
    """Also with a loss so large that scaling it in fp16 would overflow."""
    for stage in (1, 3):
        norms, inputs = [], []
        for scale in (1.0, 2.0**15):
            engine = toy.make(toy.seeded(toy.Net), stage, fp16={"enabled": True, "loss_scale": scale})
            x = toy.floats(engine.rank, 0).half().requires_grad_()
            out = engine(x)
            assert out.dtype is torch.float32
            out.square().mean().backward()
            engine.step()
            assert engine.step_applied and x.grad is not None
            norms.append(engine.global_grad_norm)
            inputs.append(x.grad)
            engine.destroy()
        assert norms[0] == pytest.approx(norms[1], rel=5e-3)
        torch.testing.assert_close(inputs[0], inputs[1], rtol=2e-2, atol=1e-4)


WRAPPERS: dict[str, Any] = {
    "namespace": lambda y: types.SimpleNamespace(y=y, nothing=None),
    "inside another": lambda y: types.SimpleNamespace(of=[types.SimpleNamespace(y=y)]),
    "distribution": lambda y: torch.distributions.Normal(y, 1.0),
    "defaultdict": lambda y: collections.defaultdict(list, y=y),
}
UNWRAPPERS: dict[str, Any] = {
    "namespace": lambda out: out.y,
    "inside another": lambda out: out.of[0].y,
    "distribution": lambda out: out.mean,
    "defaultdict": lambda out: out["y"] if not out["missing"] else None,
}


class Wrapped(toy.Net):
    def forward(self, x: Tensor) -> Any:
        self.made = self.wrap(super().forward(x))
        return self.made


@distributed(world_size=1)
def test_outputs_of_any_class_carry_the_scale() -> None:
    for kind in WRAPPERS:
        norms = []
        for scale in (1.0, 2.0**10):
            engine = toy.make(toy.seeded(Wrapped), 0, fp16={"enabled": True, "loss_scale": scale})
            engine.module.wrap = WRAPPERS[kind]
            out = engine(toy.floats(0, 0).half())
            assert type(out) is type(engine.module.made) and out is not engine.module.made
            UNWRAPPERS[kind](out).float().square().mean().backward()
            engine.step()
            norms.append(engine.global_grad_norm)
            with torch.no_grad():
                out = engine(toy.floats(0, 0).half())
                assert (out is engine.module.made) is (kind != "defaultdict"), "a cache stays the object that it is"
            engine.destroy()
        assert norms[0] == pytest.approx(norms[1], rel=5e-3), kind


@distributed(world_size=2)
@pytest.mark.parametrize("kind", OUTPUTS)
def test_every_kind_of_output_is_scaled(kind: str) -> None:
    """Its tensors are returned in fp32, its type and other contents unchanged; gradients equal a plain model's."""
    names = ("inp.weight", "blocks.0.up.weight", "out.bias")
    plain = OUTPUTS[kind](toy.seeded(toy.Net)).half()
    for rank in range(2):
        (1024.0 * loss_of(plain(toy.floats(rank, 0).half()))).backward()
    engine = toy.make(OUTPUTS[kind](toy.seeded(toy.Net)), 3, fp16={"enabled": True, "loss_scale": 1024.0})
    out = engine(toy.floats(engine.rank, 0).half())
    assert type(out) is type(plain(toy.floats(0, 0).half()))
    assert {tensor.dtype for tensor in tensors_of(out)} == {torch.float32} and len(tensors_of(out)) == 2
    loss_of(out).backward()
    for name in names:
        ours, expected = engine.gradient(f"net.{name}"), plain.get_parameter(f"net.{name}").grad.float() / (2 * 1024.0)
        torch.testing.assert_close(ours.float(), expected, rtol=2e-2, atol=1e-2 * float(expected.abs().max()))
    engine.step()
    assert engine.step_applied
    engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_gan_of_two_engines_in_fp16(transport: str) -> None:
    """The generator's gradient passes through the discriminator's engine, with another loss scale."""

    def run(scale_g: float, scale_d: float) -> list[Tensor]:
        engines = [
            toy.make(
                toy.seeded(toy.Net, seed),
                3,
                transport,
                fp16={"enabled": True, "loss_scale": scale},
                optimizer={"type": "SGD", "params": {"lr": 0.05}},
            )
            for seed, scale in ((0, scale_g), (1, scale_d))
        ]
        generator, discriminator = engines
        for i in range(2):
            fake = generator(toy.floats(generator.rank, i).half())
            (discriminator(fake.detach().half()).square().mean() + discriminator(toy.floats(9, i).half()).abs().mean()).backward()
            discriminator.step()
            discriminator(generator(toy.floats(generator.rank, i).half()).half()).mean().backward()
            generator.step()
            discriminator.zero_grad()
        result = [value.float() for engine in engines for value in engine.state_dict().values()]
        assert all(engine.step_applied for engine in engines)
        for engine in engines:
            engine.destroy()
        return result

    for one, other in zip(run(1.0, 1.0), run(256.0, 32.0), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)


@distributed(world_size=2)
def test_scale_is_for_losses_beside_the_outputs() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 1, fp16={"enabled": True, "loss_scale": 64.0})
    plain = toy.make(toy.seeded(toy.Lm), 1)
    for each in (engine, plain):
        penalty = each.module.head.weight.float().square().sum()
        each.scale(penalty).backward()
        torch.testing.assert_close(each.gradient("head.weight"), 2 * each.state_dict()["head.weight"].float(), rtol=2e-3, atol=1e-4)
        each.destroy()


class Dtypes(nn.Module):
    """Records the dtypes of its computations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.seen += [x.dtype, out.dtype, self.linear.weight.dtype]
        return out


@distributed(world_size=2, transports=("shared", "gloo"))
def test_torch_autocast(transport: str) -> None:
    def plain() -> list[Tensor]:
        model = toy.seeded(Dtypes)
        for rank in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(toy.floats(rank, 0)).float().square().mean()
            (loss / 2).backward()
        return [p.grad for p in model.parameters()]

    for stage in cases.stages(transport):
        model = toy.seeded(Dtypes)
        engine = toy.make(model, stage, transport, torch_autocast={"enabled": True, "dtype": "bfloat16"})
        engine(toy.floats(engine.rank, 0)).float().square().mean().backward()
        assert model.seen == [torch.float32, torch.bfloat16, torch.float32]
        for name, expected in zip(("linear.weight", "linear.bias"), plain(), strict=True):
            torch.testing.assert_close(engine.gradient(name), expected, rtol=1e-5, atol=1e-6)
        engine.destroy()


@distributed(world_size=2)
def test_fp16_auto_cast_casts_the_inputs() -> None:
    model = toy.seeded(Dtypes)
    engine = toy.make(model, 1, fp16={"enabled": True, "auto_cast": True})
    engine(toy.floats(engine.rank, 0))
    assert model.seen == [torch.float16] * 3
    engine.destroy()


Shown = dict[str, torch.dtype]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES: dict[str, tuple[dict[str, Any], Shown]] = {
    "fp32": ({}, {"weights": F32, "master": F32, "grads": F32, "exp_avg": F32}),
    "bf16": ({"bf16": {"enabled": True}}, {"weights": BF16, "master": F32, "grads": BF16, "exp_avg": F32}),
    "fp16": ({"fp16": {"enabled": True}}, {"weights": F16, "master": F32, "grads": F16, "exp_avg": F32}),
    "bf16, accumulating": (
        {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2},
        {"weights": BF16, "master": F32, "grads": F32, "exp_avg": F32},
    ),
    "bf16, accumulating in bf16": (
        {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2, "data_types": {"grad_accum_dtype": "bf16"}},
        {"weights": BF16, "master": F32, "grads": BF16, "exp_avg": F32},
    ),
    "bf16, gradients in fp32": (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        {"weights": BF16, "master": F32, "grads": F32, "exp_avg": F32},
    ),
    "bf16 masters": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {"weights": BF16, "master": BF16, "grads": BF16, "exp_avg": F32},
    ),
    "bf16 states": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        {"weights": BF16, "master": BF16, "grads": BF16, "exp_avg": BF16},
    ),
    "fp32 over a bf16 wire": (
        {"communication_data_type": "bf16"},
        {"weights": F32, "master": F32, "grads": F32, "exp_avg": F32, "wire": BF16},
    ),
    "bf16 over an fp32 wire": (
        {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
        {"weights": BF16, "master": F32, "grads": BF16, "exp_avg": F32, "wire": F32},
    ),
}


@pytest.mark.parametrize("name", CASES)
@distributed(world_size=2)
def test_states_are_kept_as_the_config_says(name: str) -> None:
    """Checks the dtypes, training in them, and equality of the stages."""
    config, expected = CASES[name]
    sums = set()
    for stage in STAGES:
        engine = toy.make(toy.seeded(toy.Lm), stage, gradient_clipping=1.0, **config)
        losses = [toy.step(engine, toy.tokens(engine.rank, 0)).item() for _ in range(8)]
        unit = probe.units(engine)[0]
        assert unit.grads is not None
        results = {"weights": unit.full.dtype, "master": unit.master.dtype, "grads": unit.grads.dtype, "wire": unit.dtypes.wire}
        pieces = probe.pieces(engine, unit)
        results["exp_avg"] = probe.moments(engine, unit, pieces[0])["exp_avg"].dtype
        assert {key: results[key] for key in expected} == expected, f"stage {stage}"
        assert losses[-1] < losses[0]
        sums.add(int(toy.checksum(engine)))
        engine.destroy()
    if engine.plan.batch.accumulation == 1:
        assert len(sums) == 1, "stages are bit-identical"


@distributed(world_size=2, transports=("shared", "gloo"))
def test_a_bf16_wire_rounds_and_an_fp32_wire_does_not(transport: str) -> None:
    for stage in cases.stages(transport, (0, 2, 3)):
        grads = {}
        for wire in (None, "bf16"):
            engine = toy.make(toy.seeded(toy.Lm), stage, transport, communication_data_type=wire)
            engine(toy.tokens(engine.rank, 0)).backward()
            probe.finish_window(engine)
            grads[wire] = probe.units(engine)[0].grads.whole().clone()
            engine.zero_grad()
            engine.destroy()
        assert not grads[None].equal(grads["bf16"]), f"stage {stage}: the wire is bf16"
        torch.testing.assert_close(grads[None], grads["bf16"], rtol=1e-2, atol=1e-3)


@distributed(world_size=2)
def test_bf16_may_check_for_overflow() -> None:
    for stage in (0, 3):
        engine = toy.make(toy.seeded(toy.Lm), stage, bf16={"enabled": True, "check_grad_overflow": True})
        before = toy.checksum(engine)
        spoiled_step(engine, float("nan"))
        assert engine.skipped_steps == 1 and toy.checksum(engine) == before
        engine.destroy()


@distributed(world_size=2)
def test_all_ranks_agree_after_an_overflow() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 3, fp16=dynamic())
    for i in range(6):
        spoiled_step(engine, float("inf") if i in (1, 4) else 1.0, rank=i % 2)
        sums = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
        dist.all_gather(sums, toy.checksum(engine))
        assert sums[0] == sums[1]
    assert engine.skipped_steps == 2
    engine.destroy()
