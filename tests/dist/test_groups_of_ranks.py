"""Groups of ranks (ZeRO++): weights and codes of gradients cross groups once a step; the bits of weights do not change."""

from __future__ import annotations

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
from slipstream.zero import build
from slipstream.zero.shared import SharedComm
from tests import probe, toy
from tests.cases import EVERYTHING
from tests.dist.test_codes_on_the_wire import SGD, coded
from tests.pool import distributed

GROUP = 2


@contextmanager
def hosts_of_two() -> Iterator[None]:
    """Two ranks share a host's memory; four do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "hosts_agree", lambda axis: axis.size <= GROUP)
        yield


def trained(transport: str, zero: dict[str, Any], stage: int = 3, **keys: Any) -> Tensor:
    """Losses and a checksum of training, with an evaluation and a write of a weight between steps."""
    engine = toy.make(toy.seeded(toy.Lm), stage, transport, zero_optimization=zero, gradient_clipping=0.5, **keys)
    losses = []
    for step in range(6):
        losses.append(toy.step(engine, toy.tokens(dist.get_rank(), step)))
        if step == 2:
            with torch.no_grad():
                engine.eval()
                losses.append(engine(toy.tokens(dist.get_rank(), 0)))
                engine.train()
        if step == 3:
            weight = engine.module.blocks[0].up.weight
            with slipstream.zero.gathered(weight):
                weight.data[0, 0] = 3.0
    for unit in probe.units(engine):
        assert (unit.memory.kept is not None) == (stage == 3 and "zero_hpz_partition_size" in zero)
    result = torch.stack([*losses, toy.checksum(engine).double()])
    engine.destroy()
    return result


@distributed(world_size=4, transports=("gloo",))
@pytest.mark.parametrize("keys", [{}, {"zero_quantized_weights": True}], ids=["exact", "codes"])
def test_groups_of_ranks(transport: str, keys: dict[str, Any]) -> None:
    """Weights of groups have the bits of weights without groups, over gloo and, by turns, over gloo between hosts that share
    memory."""
    grouped = {**keys, "zero_hpz_partition_size": GROUP}
    for more in ({}, {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}})[0 if EVERYTHING else 1 :]:
        plain = trained(transport, keys, **more)
        if EVERYTHING or keys:
            assert torch.equal(plain, trained(transport, grouped, **more))
        if EVERYTHING or not keys:
            with hosts_of_two():
                assert torch.equal(plain, trained("auto", grouped, **more))


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes that this rank sends to ranks of its own group and of others, in all-to-alls and all-gathers."""
    sent = {"own": 0, "other": 0}
    name, me = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor", dist.get_rank()

    def add(group: Any, lengths: list[int]) -> None:
        for place, nbytes in enumerate(lengths):
            rank = dist.get_global_rank(group, place)
            if rank != me:
                sent["own" if rank // GROUP == me // GROUP else "other"] += nbytes

    with pytest.MonkeyPatch.context() as patch:
        swap, gather = dist.all_to_all_single, getattr(dist, name)

        def swapping(out: Tensor, values: Tensor, receive: Any, send: Any, *, group: Any, **options: Any) -> Any:
            add(group, send)
            return swap(out, values, receive, send, group=group, **options)

        def gathering(out: Tensor, shard: Tensor, *, group: Any, **options: Any) -> Any:
            add(group, [shard.nbytes] * dist.get_world_size(group))
            return gather(out, shard, group=group, **options)

        patch.setattr(dist, "all_to_all_single", swapping)
        patch.setattr(dist, name, gathering)
        yield sent


@distributed(world_size=4, transports=("gloo",))
def test_bytes_across_groups(transport: str) -> None:
    """ZeRO++ sends less than 1/3.8 of ZeRO-3's bytes across two groups; `explain` tells what a ring of all sends."""
    numel, steps = 256 * 1024, 2
    everything = {"zero_quantized_gradients": True, "zero_quantized_weights": True, "zero_hpz_partition_size": GROUP}
    sent = {}
    for name, zero in {"ZeRO-3": {}, "hpZ": {"zero_hpz_partition_size": GROUP}, "ZeRO++": everything}.items():
        model = nn.Sequential(nn.Linear(1024, 256, bias=False))
        engine = toy.make(model, 3, transport, dtype="bf16", optimizer=SGD, zero_optimization=zero)
        with counted() as sent[name]:
            for _ in range(steps):
                engine.backward(engine(torch.randn(2, 1024, dtype=torch.bfloat16)).square().mean())
                engine.step()
        forecast = explain.of_states(engine.states)
        assert explain.parts_of(engine.module, engine.plan, 4) == list(forecast.parts)
        kept = [line.nbytes for line in forecast.rest if line.what == "kept of other groups"]
        memory = sum(unit.memory.kept.tensor.nbytes for unit in probe.units(engine) if unit.memory.kept)
        assert memory == sum(kept) == {"ZeRO-3": 0, "hpZ": numel, "ZeRO++": wire.nbytes(numel // 2, 8)}[name]
        if zero:  # within a group of two and across two groups, a ring sends what counts here
            assert forecast.flow.wire == (sent[name]["own"] + sent[name]["other"]) // steps
        engine.destroy()
    weights, codes8, codes4 = numel // 4 * 2, wire.nbytes(numel // 4, 8), wire.nbytes(numel // 4, 4)  # of a quarter
    assert sent["ZeRO-3"] == {"own": steps * 3 * weights, "other": steps * 6 * weights}
    assert sent["hpZ"] == {"own": steps * (2 * 2 + 1) * weights, "other": steps * (1 + 2) * weights}
    assert sent["ZeRO++"] == {"own": steps * (4 * codes8 + 2 * codes4), "other": steps * (codes8 + codes4)}
    assert sent["ZeRO-3"]["other"] / sent["ZeRO++"]["other"] > 3.8 * 2


@distributed(world_size=4, transports=("gloo",))
@pytest.mark.parametrize("beta", [None, 0.5], ids=["plain", "feedback"])
def test_gradients_in_codes_of_groups(transport: str, beta: float | None) -> None:
    """Every gradient is coded on its rank, and every group's sum before it leaves the group."""
    twin, errors = toy.seeded(toy.Lm), {}  # type: ignore[var-annotated]
    zero: dict[str, Any] = {"zero_quantized_gradients": True, "zero_hpz_partition_size": GROUP}
    if beta is not None:
        zero["zeropp_loco_param"] = {"err_beta": beta}
    engines = [toy.make(toy.seeded(toy.Lm), stage, transport, optimizer=SGD, zero_optimization=zero) for stage in (1, 3)]
    with hosts_of_two():
        engines.append(toy.make(toy.seeded(toy.Lm), 2, "auto", optimizer=SGD, zero_optimization=zero))
        assert all(isinstance(comm, SharedComm) for comm, _ in engines[-1].states.slots.numels)
    for step in range(2):
        params = list(twin.parameters())
        sums: list[list[Tensor]] = []
        for group in range(2):
            parts = [torch.autograd.grad(twin(toy.tokens(rank, step)), params) for rank in (2 * group, 2 * group + 1)]
            for rank, part in enumerate(parts):
                kept = [
                    None
                    if beta is None
                    else wire.Feedback(
                        errors.setdefault((group, rank, i), torch.zeros(wire.nbytes(grad.numel(), 8), dtype=torch.uint8)), beta
                    )
                    for i, grad in enumerate(part)
                ]
                parts[rank] = tuple(coded(grad, 4, feedback) for grad, feedback in zip(part, kept, strict=True))
            sums.append([coded(a + b, 4) for a, b in zip(*parts, strict=True)])
        with torch.no_grad():
            for param, one, other in zip(params, *sums, strict=True):
                param -= (one + other) / 4
        for engine in engines:
            toy.step(engine, toy.tokens(dist.get_rank(), step))
    for engine in engines:
        for name, value in engine.state_dict().items():
            assert torch.equal(value, twin.state_dict()[name]), name
        engine.destroy()


@distributed(world_size=4, transports=("gloo",))
def test_replicated_gradients_in_codes_of_groups(transport: str) -> None:
    """Stage 0: the mean comes back in codes of 8 bits, the same on all ranks."""
    zero = {"zero_quantized_gradients": True, "zero_hpz_partition_size": GROUP}
    engine = toy.make(toy.seeded(toy.Lm), 0, transport, optimizer=SGD, zero_optimization=zero)
    sharded = toy.make(toy.seeded(toy.Lm), 1, transport, optimizer=SGD, zero_optimization=zero)
    for each in (engine, sharded):
        toy.step(each, toy.tokens(dist.get_rank(), 0))
    sums = [torch.zeros((), dtype=torch.int64) for _ in range(4)]
    dist.all_gather(sums, toy.checksum(engine))
    assert len({int(each) for each in sums}) == 1
    first, state = toy.seeded(toy.Lm).state_dict(), sharded.state_dict()
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, first[name] - coded(first[name] - state[name], 8), rtol=0, atol=1e-6)
    for each in (engine, sharded):
        each.destroy()


@pytest.mark.disk
@distributed(world_size=4, transports=("gloo",))
def test_groups_of_frozen_slept_and_unfrozen_weights(transport: str, tmp_path: Path) -> None:
    """Kept weights of frozen blocks never cross again; sleep and surgery keep them right."""
    results = []
    for zero in ({}, {"zero_hpz_partition_size": GROUP}):
        model = toy.seeded(toy.Lm)
        for param in model.blocks[0].parameters():
            param.requires_grad_(False)
        engine = toy.make(model, 3, transport, zero_optimization=zero)
        for step in range(5):
            if step == 2:
                engine.sleep(device="disk", path=str(tmp_path))
                engine.wake()
            if step == 3:
                with engine.surgery():
                    for param in model.blocks[0].parameters():
                        param.requires_grad_(True)
            toy.step(engine, toy.tokens(dist.get_rank(), step))
        results.append(toy.checksum(engine))
        engine.destroy()
    assert torch.equal(*results)


@distributed(world_size=4, transports=("shared",))
def test_groups_in_shared_memory_change_nothing(transport: str) -> None:
    engine = toy.make(toy.seeded(toy.Lm), 3, transport, zero_optimization={"zero_hpz_partition_size": GROUP})
    toy.step(engine, toy.tokens(dist.get_rank(), 0))
    assert all(unit.memory.kept is None for unit in probe.units(engine))
    engine.destroy()
