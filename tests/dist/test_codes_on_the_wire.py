"""Gradients and weights in codes between ranks: each step is that of a plain model whose gradients or weights were coded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.ops import wire
from slipstream.train.planning import explain
from slipstream.train.precision import LossScaler
from slipstream.zero.reduction import ErrorFeedback
from tests import cases, toy
from tests.pool import distributed

SGD = {"type": "SGD", "params": {"lr": 1.0}}


def coded(x: Tensor, bits: int, feedback: wire.Feedback | None = None) -> Tensor:
    """Encoded and decoded: each parameter starts a block."""
    codes, out = torch.empty(wire.nbytes(x.numel(), bits), dtype=torch.uint8), torch.empty(x.numel())
    wire.encode(x.contiguous().view(-1), codes, bits, feedback)
    wire.sum_coded(out, [codes], bits)
    return out.view(x.shape)


class Twin:
    """A plain model that steps with the mean of its ranks' coded gradients."""

    def __init__(self, bits: int, ranks: int, mean_bits: int | None, beta: float | None = None) -> None:
        self.model, self.bits, self.ranks, self.mean_bits = toy.seeded(toy.Lm), bits, ranks, mean_bits
        self.beta, self.errors = beta, {}  # type: ignore[var-annotated]

    def _feedback(self, rank: int | str, param: Tensor) -> wire.Feedback | None:
        if self.beta is None:
            return None
        error = self.errors.setdefault((rank, param), torch.zeros(wire.nbytes(param.numel(), 8), dtype=torch.uint8))
        return wire.Feedback(error, self.beta)

    def step(self, step: int, micros: int = 1) -> None:
        params = list(self.model.parameters())
        totals: list[Tensor | None] = [None] * len(params)
        for rank in range(self.ranks):
            sums: list[Tensor] = []
            for micro in range(micros):
                grads = torch.autograd.grad(self.model(toy.tokens(rank, step, micro)) / micros, params)
                sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else list(grads)
            for i, (param, grad) in enumerate(zip(params, sums, strict=True)):
                value = coded(grad, self.bits, self._feedback(rank, param))
                totals[i] = value if totals[i] is None else totals[i] + value
        with torch.no_grad():
            for param, total in zip(params, totals, strict=True):
                assert total is not None
                mean = total / self.ranks
                param -= mean if self.mean_bits is None else coded(mean, self.mean_bits, self._feedback("mean", param))


def same(engine: Any, model: nn.Module) -> None:
    expected = model.state_dict()
    for name, value in engine.state_dict().items():
        assert torch.equal(value, expected[name]), name


@distributed(world_size=2, transports=("shared", "gloo"))
def test_codes_on_the_wire(transport: str) -> None:
    keys: list[tuple[int, dict[str, Any]]] = [
        (8, {"communication_data_type": "int8"}),
        (4, {"zero_optimization": {"zero_quantized_gradients": True}}),
    ]
    for stage in cases.stages(transport):
        for bits, key in keys:
            engine = toy.make(toy.seeded(toy.Lm), stage, transport, optimizer=SGD, **key)
            twin = Twin(bits, 2, None if stage else 8)
            for step in range(2):
                toy.step(engine, toy.tokens(dist.get_rank(), step))
                twin.step(step)
            same(engine, twin.model)
            engine.destroy()


@pytest.mark.slow
@distributed(world_size=4, transports=("gloo",))
def test_codes_of_four_ranks_of_clipped_bf16_and_accumulated_gradients(transport: str) -> None:
    """Stages 2 and 3 have equal bits, and int8 is close to no codes."""
    results = {}
    for codes in ("int8", None):
        for stage in (1, 2, 3):
            accumulated: dict[str, Any] = {"gradient_accumulation_steps": 2} if stage == 1 else {}
            engine = toy.make(
                toy.seeded(toy.Lm),
                stage,
                transport,
                dtype="bf16",
                communication_data_type=codes,
                gradient_clipping=0.5,
                optimizer=SGD,
                **accumulated,
            )
            for step in range(6 if stage == 1 else 3):
                batch = toy.tokens(dist.get_rank(), step // 2 if stage == 1 else step)
                toy.step(engine, batch)
            results[codes, stage] = torch.cat([value.flatten().float() for value in engine.state_dict().values()])
            engine.destroy()
    assert torch.equal(results["int8", 2], results["int8", 3])
    for stage in (1, 2):
        torch.testing.assert_close(results["int8", stage], results[None, stage], rtol=0, atol=0.01)
        assert not torch.equal(results["int8", stage], results[None, stage])


@distributed(world_size=2, transports=("shared", "gloo"))
def test_error_feedback(transport: str) -> None:
    """Errors are added in the next step, mixed by err_beta, and dropped after reset_T steps."""
    loco = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.25, "reset_T": 2}}
    for stage in (0, 2):
        engine = toy.make(toy.seeded(toy.Lm), stage, transport, optimizer=SGD, zero_optimization=loco)
        twin = Twin(4, 2, None if stage else 4, beta=0.25)
        for step in range(3):
            toy.step(engine, toy.tokens(dist.get_rank(), step))
            twin.step(step)
            if step == 1:
                twin.errors.clear()
        same(engine, twin.model)
        engine.destroy()


def test_errors_follow_the_loss_scale() -> None:
    feedback = wire.Feedback(torch.zeros(wire.nbytes(300, 8), dtype=torch.uint8), 0.0)
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    coded(x, 4, feedback)
    before = feedback.error.clone()
    scaler = LossScaler(None)
    scaler.changed.append(ErrorFeedback(lambda: [feedback], 10).rescale)
    scaler.set(4.0)
    twice = wire.Feedback(torch.zeros_like(before), 0.0)
    coded(x * 4, 4, twice)
    assert torch.equal(feedback.error, twice.error) and not torch.equal(before, feedback.error)


@contextmanager
def sent() -> Iterator[list[int]]:
    """The bytes that this rank sends to others in all-to-alls and all-gathers."""
    counted: list[int] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with pytest.MonkeyPatch.context() as patch:
        swap, gather = dist.all_to_all_single, getattr(dist, name)

        def swapping(out: Tensor, values: Tensor, receive: Any, send: Any, **options: Any) -> Any:
            counted.append(sum(n for rank, n in enumerate(send) if rank != dist.get_rank()))
            return swap(out, values, receive, send, **options)

        def gathering(out: Tensor, shard: Tensor, **options: Any) -> Any:
            counted.append(shard.nbytes * (dist.get_world_size() - 1))
            return gather(out, shard, **options)

        patch.setattr(dist, "all_to_all_single", swapping)
        patch.setattr(dist, name, gathering)
        yield counted


@distributed(world_size=2, transports=("gloo",))
def test_bytes_of_codes(transport: str) -> None:
    """A gradient takes 4 bits and a weight 8, with 16 bits for each 256 of them."""
    numel = 256 * 1024
    for stage, loco in ((0, None), (0, {}), (2, None), (3, None)):
        quantized = {"zero_quantized_gradients": True, "zero_quantized_weights": stage == 3}
        quantized |= {} if loco is None else {"zeropp_loco_param": loco}
        engine = toy.make(nn.Linear(1024, 256, bias=False), stage, transport, optimizer=SGD, zero_optimization=quantized)
        with sent() as counted:
            engine.backward(engine(torch.randn(2, 1024)).square().mean())
            engine.step()
        half, scales = numel // 2, numel // 2 // 256 * 2
        gradients, eight = half // 2 + scales, half + scales
        mean = eight if loco is None else gradients
        expected = {0: [gradients, mean], 2: [gradients, 4 * half], 3: [eight, eight, gradients]}[stage]
        assert counted == expected
        engine.destroy()
    for stage in (1, 2):
        weights = {"zero_quantized_gradients": True, "zero_quantized_weights": True}
        engine = toy.make(
            nn.Linear(1024, 256, bias=False), stage, transport, dtype="bf16", optimizer=SGD, zero_optimization=weights
        )
        with sent() as counted:
            engine.backward(engine(torch.randn(2, 1024).bfloat16()).square().mean())
            engine.step()
        assert counted == [half // 2 + scales, eight]
        assert 0 <= explain.of_states(engine.states).flow.wire - sum(counted) < 16
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_units_of_different_sizes_share_their_buffers(transport: str) -> None:
    """Every unit's mean comes back through a buffer that is as long as the longest unit's."""
    model = nn.Sequential(nn.Linear(8, 2048), nn.Sequential(nn.Linear(2048, 64), nn.Linear(64, 64)), nn.Linear(64, 8))
    for stage in cases.stages(transport):
        engine = toy.make(copy.deepcopy(model), stage, transport, optimizer=SGD, communication_data_type="int4")
        for step in range(2):
            engine.backward(engine(toy.floats(dist.get_rank(), step)).square().mean())
            engine.step()
        assert len({int(each) for each in sums_of(engine)}) == 1
        engine.destroy()


@distributed(world_size=2, transports=("gloo",))
def test_weights_in_codes(transport: str) -> None:
    """The forward computes with decoded weights; reads, writes and saves have the exact ones."""
    engine = toy.make(toy.seeded(toy.Lm), 3, transport, optimizer=SGD, zero_optimization={"zero_quantized_weights": True})
    plain, exact = toy.seeded(toy.Lm), toy.seeded(toy.Lm)
    with torch.no_grad():
        for param in plain.parameters():
            param.copy_(coded(param, 8))
    for train in (True, False):
        engine.train(train)
        batch = toy.tokens(dist.get_rank(), 0)
        assert torch.equal(engine(batch).detach(), plain(batch).detach())
    same(engine, exact)
    first = engine.module.blocks[0].up.weight
    with slipstream.zero.gathered(first):
        first.data[0, 0] = 3.0
    with torch.no_grad():
        exact.blocks[0].up.weight[0, 0] = 3.0
    same(engine, exact)
    engine.train()
    for step in range(2):
        toy.step(engine, toy.tokens(dist.get_rank(), step))
    assert len({int(each) for each in sums_of(engine)}) == 1
    state = engine.state_dict()
    engine.destroy()
    for name, param in engine.module.named_parameters():
        assert torch.equal(param.detach(), state[name]), name


@pytest.mark.parametrize("kind", ["AdamW", "OneBitAdam"])
@distributed(world_size=2, transports=("gloo",))
def test_updates_in_codes(transport: str, kind: str, tmp_path: Path) -> None:
    """Replicated weights move by the codes of their differences to the masters; a save publishes the masters."""
    optimizer = {"type": kind, "params": {"lr": 1e-2, **({"freeze_step": 2} if kind == "OneBitAdam" else {})}}

    def make(stage: int) -> Any:
        blocks = {"optimizer": optimizer, "zero_optimization": {"zero_quantized_weights": True}}
        return toy.make(toy.seeded(toy.Lm), stage, transport, dtype="bf16", **blocks)

    def train(engine: Any, *steps: int) -> int:
        for step in steps:
            toy.step(engine, toy.tokens(dist.get_rank(), step))
        assert len({int(each) for each in sums_of(engine)}) == 1
        return int(toy.checksum(engine))

    sums = []
    for stage in (1, 2):
        engine = make(stage)
        params = dict(engine.module.named_parameters())
        for step in range(4):
            before = {name: param.detach().float() for name, param in params.items()}
            train(engine, step)
            of_engine = masters(engine)
            for name, param in params.items():
                change = coded(of_engine[name].bfloat16().float() - before[name], 8)
                assert torch.equal(param.detach(), (before[name] + change).bfloat16()), (stage, step, name)
        assert any(not torch.equal(param.detach(), of_engine[name].bfloat16()) for name, param in params.items())
        engine.save_checkpoint(str(tmp_path), tag=f"stage{stage}")
        assert all(torch.equal(param.detach(), of_engine[name].bfloat16()) for name, param in params.items())
        sums.append(train(engine, 4, 5))
        engine.destroy()
        again = make(3 - stage)
        again.load_checkpoint(str(tmp_path), tag=f"stage{stage}")
        sums.append(train(again, 4, 5))
        again.destroy()
    assert len(set(sums)) == (1 if kind == "AdamW" else 2), sums  # a load begins with the mean of the ranks' errors


def masters(engine: Any) -> dict[str, Tensor]:
    wholes = {unit: unit.unsharded(unit.master.whole(), sharded=True) for unit in engine.units}
    return {slot.name: wholes[unit][slice(*slot.span)].view(slot.shape) for unit in engine.units for slot in unit.layout.slots}


def sums_of(engine: Any) -> list[Tensor]:
    sums = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, toy.checksum(engine))
    return sums


@distributed(world_size=2)
def test_codes_of_shared_weights_change_nothing() -> None:
    results = []
    for quantized in (True, False):
        engine = toy.make(toy.seeded(toy.Lm), 3, "shared", zero_optimization={"zero_quantized_weights": quantized})
        toy.step(engine, toy.tokens(dist.get_rank(), 0))
        results.append(int(toy.checksum(engine)))
        engine.destroy()
    assert results[0] == results[1]


@distributed(world_size=2)
def test_a_gradient_that_is_not_finite_skips_its_step_only() -> None:
    """Its codes are NaN also between parameters, and nothing of them is left in the next step."""
    for stage in (0, 1, 3):
        engine = toy.make(toy.seeded(toy.Lm), stage, optimizer=SGD, communication_data_type="int4")
        before = int(toy.checksum(engine))
        loss = engine(toy.tokens(dist.get_rank(), 0))
        engine.backward(loss * (float("inf") if dist.get_rank() else 1.0))
        engine.step()
        assert engine.overflow and int(toy.checksum(engine)) == before
        toy.step(engine, toy.tokens(dist.get_rank(), 1))
        assert not engine.overflow and int(toy.checksum(engine)) != before
        engine.destroy()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"communication_data_type": "int8", "zero_optimization": {"zero_quantized_gradients": True}}, "4-bit codes, but"),
        ({"zero_optimization": {"zeropp_loco_param": {}}}, "zeropp_loco_param is error feedback for quantized gradients"),
        ({"communication_data_type": "int5"}, "communication_data_type"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy.make(toy.seeded(toy.Lm), 0, **keys)
