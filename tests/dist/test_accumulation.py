"""Accumulation windows: managed or not, synchronized or not, with an equal number of micro-batches on every rank."""

import logging
import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.world.watch import PeerError
from slipstream.zero import memory
from tests import cases, probe, toy
from tests.pool import distributed

STAGES = (0, 1, 2, 3)


def finish(engine: Any) -> dict[str, Tensor]:
    state: dict[str, Tensor] = engine.state_dict()
    engine.destroy()
    return state


def close(engine: Any) -> None:
    """`destroy` without its fences, because the ranks are at different points."""
    probe.hooks(engine).remove()
    for unit in engine.units:
        memory.close(unit)
    probe.transport(engine).close()
    engine.watch.stop()


def same(results: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{what}: {n}: {m}")


def whole_batch(rank: int) -> dict[str, Tensor]:
    """Two steps of stage 0 on batches of four."""
    engine = toy.make(toy.seeded(toy.Lm), 0, gradient_clipping=0.5, train_micro_batch_size_per_gpu=4)
    for i in range(2):
        toy.step(engine, torch.cat([toy.tokens(rank, i, micro) for micro in range(2)]))
    return finish(engine)


@distributed(world_size=2, transports=("shared", "gloo"))
def test_two_micro_batches_are_one_batch(transport: str) -> None:
    """Managed, unmanaged, with no_sync, and with losses divided by the caller."""
    rank = dist.get_rank()
    expected = whole_batch(rank)
    ways = ("managed", "unmanaged", "no_sync", "divided", "plain")
    for stage, way in cases.every_other(cases.stages(transport), ways):
        managed = {"managed_gradient_accumulation": False} if way in ("unmanaged", "no_sync") else {}
        engine = toy.make(toy.seeded(toy.Lm), stage, transport, gradient_clipping=0.5, gradient_accumulation_steps=2, **managed)
        for i in range(2):
            first, second = toy.tokens(rank, i, 0), toy.tokens(rank, i, 1)
            if way == "managed":
                toy.step(engine, first)
                assert not engine.step_applied
                toy.step(engine, second)
            elif way == "plain":
                engine(first).backward()
                engine.step()
                engine(second).backward()
                engine.step()
            elif way == "divided":
                for batch in (first, second):
                    engine.backward(engine(batch) / 2, scale_wrt_gas=False)
                    engine.step()
            elif way == "unmanaged":
                engine.backward(engine(first) / 2)
                engine.backward(engine(second) / 2)
                engine.step()
            else:
                with engine.no_sync():
                    (engine(first) / 2).backward()
                (engine(second) / 2).backward()
                engine.step()
            assert engine.step_applied
        assert engine.global_steps == 2
        same(finish(engine), expected, f"{way}, stage {stage}")


@distributed(world_size=2, transports=("shared", "gloo"))
def test_all_of_a_window_in_no_sync(transport: str) -> None:
    rank = dist.get_rank()
    expected = whole_batch(rank)
    for stage in cases.stages(transport):
        engine = toy.make(toy.seeded(toy.Lm), stage, transport, gradient_clipping=0.5, managed_gradient_accumulation=False)
        for i in range(2):
            with engine.no_sync():
                for micro in range(2):
                    (engine(toy.tokens(rank, i, micro)) / 2).backward()
            engine.step()
        same(finish(engine), expected, f"stage {stage}")


@distributed(world_size=2, transports=("shared", "gloo"))
def test_no_sync_adds_up_in_the_accumulation_dtype(transport: str) -> None:
    for stage in cases.stages(transport):
        engine = toy.make(
            toy.seeded(toy.Net),
            stage,
            transport,
            dtype="bf16",
            managed_gradient_accumulation=False,
            data_types={"grad_accum_dtype": "fp32"},
            communication_data_type="fp32",
        )
        with engine.no_sync():
            for slope in (1.0, 2**-10, 2**-10):  # bf16 would drop the last two
                (engine(toy.floats(0, 0).bfloat16()).float().sum() * slope).backward()
            results = engine.gradient("out.bias")
        assert results.eq(4 * (1 + 2**-9)).all(), (stage, results)
        with pytest.raises(RuntimeError, match=r"engine.gradient\('out.bias'\)"):
            _ = engine.module.out.bias.grad
        engine.step()
        engine.destroy()


@distributed(world_size=2)
def test_an_unequal_number_in_no_sync_is_refused_by_rank() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 1, managed_gradient_accumulation=False)
    with engine.no_sync():
        for micro in range(1 + engine.rank):
            engine(toy.tokens(engine.rank, 0, micro)).backward()
    engine(toy.tokens(engine.rank, 0, 5)).backward()
    with pytest.raises(RuntimeError, match=r"different numbers of backward passes.*\{0: 2, 1: 3\}") as caught:
        engine.step()
    del caught
    close(engine)


@distributed(world_size=2, transports=("shared", "gloo"))
def test_micro_batches_may_differ_in_size(transport: str) -> None:
    """The mean is over ranks, as usual; the test checks that nothing hangs and that all ranks agree."""
    for stage in cases.stages(transport):
        engine = toy.make(toy.seeded(toy.Lm), stage, transport, gradient_accumulation_steps=2)
        for size in (1, 2):
            toy.step(engine, toy.tokens(engine.rank, 0)[: size if engine.rank else 3 - size])
        sums = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
        dist.all_gather(sums, toy.checksum(engine))
        assert sums[0] == sums[1] and engine.global_steps == 1
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2, transports=("shared", "gloo"))
def test_an_unequal_number_is_refused_by_rank(stage: int, transport: str) -> None:
    if transport == "shared" and stage >= 2:
        pytest.skip("in test_failures.py, in processes of its own: a backward that raised keeps its mappings alive")
    engine = toy.make(
        toy.seeded(toy.Lm),
        stage,
        transport,
        managed_gradient_accumulation=False,
        slipstream={"transport": transport, "timeout_s": 60},
    )
    start = time.monotonic()
    with pytest.raises((RuntimeError, PeerError)) as caught:
        for micro in range(1 + engine.rank):
            engine(toy.tokens(engine.rank, 0, micro)).backward()
        engine.step()
    assert time.monotonic() - start < 30
    story = str(caught.value)
    named = (
        ("{0: 1, 1: 2}",),
        ("rank", "phase", "\n0 ", "\n1 "),
        ("different numbers of micro-batches", "rank 0 is in", "rank 1 is in"),
    )
    assert any(all(text in story for text in texts) for texts in named), story
    del caught  # its traceback references the engine
    dist.barrier()  # not destroy(), which would add an exchange
    close(engine)


@distributed(world_size=2)
def test_one_window_takes_one_kind_of_loss() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 2, gradient_accumulation_steps=2)
    engine.backward(engine(toy.tokens(engine.rank, 0)))
    engine.step()
    with pytest.raises(ValueError, match="scale_wrt_gas"):
        engine.backward(engine(toy.tokens(engine.rank, 0)), scale_wrt_gas=False)
    engine.zero_grad()
    engine.backward(engine(toy.tokens(engine.rank, 0)), scale_wrt_gas=False)
    engine.destroy()


@distributed(world_size=2)
def test_counters() -> None:
    engine = toy.make(toy.seeded(toy.Lm), 2, gradient_accumulation_steps=3)
    for micro in range(7):
        loss = engine(toy.tokens(engine.rank, 0, micro))
        torch.testing.assert_close(engine.backward(loss), loss.detach() / 3)
        assert engine.at_boundary is (micro % 3 == 2)
        engine.step()
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (7, 2, 24)
    engine.destroy()


@distributed(world_size=1)
def test_a_loop_that_steps_once_a_window_is_warned() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("slipstream").addHandler(handler)
    for stage in (0, 3):
        engine = toy.make(toy.seeded(toy.Lm), stage, gradient_accumulation_steps=2)
        for i in range(4):
            for micro in range(2):
                engine.backward(engine(toy.tokens(0, i, micro)))
            engine.step()
        idle = toy.make(toy.seeded(toy.Lm), stage)
        if stage == 0:
            grads = torch.autograd.grad(idle(toy.tokens(0, 0, 0)), [*idle.parameters()])
            for param, grad in zip(idle.parameters(), grads, strict=True):
                param.grad = grad
            idle.step()
            assert len(messages) == 1, "the script has set gradients"
            norm = torch.stack([grad.float().norm() for grad in grads]).norm().item()
            assert math.isclose(idle.global_grad_norm, norm, rel_tol=1e-3), "and the update uses them"
        idle.step()
        idle.step()
        assert len(messages) == 2, messages
        assert "4 backward passes in a window of 2 micro-batches: call engine.step() after each" in messages[0]
        assert "engine.step() without a backward" in messages[1]
        messages.clear()
        chosen = toy.make(toy.seeded(toy.Lm), stage, gradient_accumulation_steps=2)
        for micro in range(4):
            chosen.set_boundary(micro == 3)
            toy.step(chosen, toy.tokens(0, 0, micro))
        assert chosen.step_applied and not messages, "a longer window by hand is no mistake"
        for each in (engine, idle, chosen):
            each.destroy()
    logging.getLogger("slipstream").removeHandler(handler)


@distributed(world_size=2)
def test_a_boundary_by_hand() -> None:
    """As accelerate calls it."""
    engine = toy.make(toy.seeded(toy.Lm), 2, gradient_accumulation_steps=4)
    applied = []
    for micro in range(3):
        engine.set_boundary(micro == 2)
        toy.step(engine, toy.tokens(engine.rank, 0, micro))
        applied.append(engine.step_applied)
    assert applied == [False, False, True]
    engine.destroy()


@distributed(world_size=2)
def test_zero_grad_drops_a_window() -> None:
    for stage in STAGES:
        engine, other = (toy.make(toy.seeded(toy.Lm), stage) for _ in range(2))
        engine.backward(engine(toy.tokens(engine.rank, 5)))
        engine.zero_grad()
        for each in (engine, other):
            toy.step(each, toy.tokens(engine.rank, 0))
        assert toy.checksum(engine) == toy.checksum(other)
        engine.destroy()
        other.destroy()
