"""The exact events of a step: edges of units in order, collectives of the process group with their bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import cases, probe, toy
from tests.pool import distributed

Events = list[str]
SHORT = {"<root>": "r", "blocks.0": "0", "blocks.1": "1", "blocks.2": "2"}


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Events]:
    """Record the edges that move data: `g0` gathers block 0, `f0` frees it, `R0` reduces, `S0` settles, `P0` publishes."""
    events: Events = []

    def spy(method: str, letter: str) -> None:
        original = getattr(probe.owner_of(method), method)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.state
            result = original(self, *args, **kwargs)
            if method not in ("gather", "release") or self.state is not before:
                events.append(letter + SHORT[self.name])
            return result

        monkeypatch.setattr(probe.owner_of(method), method, call)

    for method, letter in (("gather", "g"), ("release", "f"), ("reduce", "R"), ("settle", "S"), ("publish", "P")):
        spy(method, letter)
    yield events
    monkeypatch.undo()


def step(engine: Any, events: Events) -> tuple[str, str, str]:
    """The events of a forward, a backward and a step."""
    phases = []
    events.clear()
    loss = engine(toy.floats(engine.rank, 0)).square().mean()
    phases.append(" ".join(events))
    events.clear()
    loss.backward()
    phases.append(" ".join(events))
    events.clear()
    engine.step()
    phases.append(" ".join(events))
    return phases[0], phases[1], phases[2]


UPDATE = "S2 S1 S0 Sr Pr P0 P1 P2"
EVENTS = {
    0: ("", "", UPDATE),
    1: ("", "", UPDATE),
    2: ("", "R2 R1 R0 Rr", UPDATE),
    3: ("gr g0 f0 g1 f1 g2 f2 fr", "gr g2 f2 R2 g1 f1 R1 g0 f0 R0 Rr fr", UPDATE),
}


@distributed(world_size=2, transports=("shared", "gloo"))
def test_the_order_of_edges_in_every_stage(transport: str) -> None:
    with recorded(pytest.MonkeyPatch()) as events:
        for stage, expected in EVENTS.items():
            engine = toy.make(toy.seeded(toy.Net), stage, transport)
            for _ in range(2):
                assert step(engine, events) == expected, f"stage {stage}"
            assert all((unit.is_released) == (stage == 3) for unit in probe.units(engine))
            engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_the_order_under_accumulation(transport: str) -> None:
    with recorded(pytest.MonkeyPatch()) as events:
        for stage, (forward, backward, update) in EVENTS.items():
            engine = toy.make(toy.seeded(toy.Net), stage, transport, gradient_accumulation_steps=2)
            assert step(engine, events) == (forward, backward, ""), f"stage {stage}"
            assert step(engine, events) == (forward, backward, update), f"stage {stage}"
            engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_the_order_with_checkpointed_blocks(transport: str) -> None:
    """Recomputation gathers nothing twice."""
    from tests.dist.test_autograd import Checkpointed, CheckpointedReentrant

    with recorded(pytest.MonkeyPatch()) as events:
        for kind in (Checkpointed, CheckpointedReentrant):
            engine = toy.make(toy.seeded(kind), 3, transport)
            assert step(engine, events) == EVENTS[3], kind.__name__
            engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_the_order_of_evaluation(transport: str) -> None:
    with recorded(pytest.MonkeyPatch()) as events:
        engine = toy.make(toy.seeded(toy.Net), 3, transport)
        events.clear()
        with torch.no_grad():
            engine(toy.floats(engine.rank, 0))
        assert " ".join(events) == EVENTS[3][0]
        engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_no_sync_reduces_nothing(transport: str) -> None:
    with recorded(pytest.MonkeyPatch()) as events:
        for stage in (2, 3):
            engine = toy.make(toy.seeded(toy.Net), stage, transport, managed_gradient_accumulation=False)
            with engine.no_sync():
                engine(toy.floats(engine.rank, 0)).square().mean().backward()
            assert not [event for event in events if event.startswith("R")]
            _, backward, _ = step(engine, events)
            assert [event for event in backward.split() if event.startswith("R")] == ["R2", "R1", "R0", "Rr"]
            engine.destroy()


# ---- collectives


Sent = list[tuple[str, int]]  # (collective, bytes that this rank sends to others)


@contextmanager
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    """Record every collective of torch.distributed and the bytes it sends, computed from the sizes of its arguments."""
    sent: Sent = []

    def others(tensor: Tensor, group: Any) -> int:
        return tensor.nbytes * (dist.get_world_size(group) - 1)

    def all_to_all(out: Tensor, inp: Tensor, out_sizes: Any = None, in_sizes: Any = None, group: Any = None, **rest: Any) -> Any:
        own = in_sizes[dist.get_rank(group)] * inp.element_size()
        sent.append(("all_to_all", inp.nbytes - own))
        return plain["all_to_all_single"](out, inp, out_sizes, in_sizes, group=group, **rest)

    def all_gather(out: Tensor, inp: Tensor, group: Any = None, **rest: Any) -> Any:
        sent.append(("all_gather", others(inp, group)))
        return plain[gather](out, inp, group=group, **rest)

    def all_reduce(tensor: Tensor, *args: Any, group: Any = None, **rest: Any) -> Any:
        sent.append(("all_reduce", tensor.nbytes))
        return plain["all_reduce"](tensor, *args, group=group, **rest)

    def unexpected(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent.append((name, -1))
            return plain[name](*args, **kwargs)

        return call

    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    names = [name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "send"))]
    plain = {name: getattr(dist, name) for name in names if callable(getattr(dist, name))}
    for name in plain:
        monkeypatch.setattr(dist, name, unexpected(name))
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, gather, all_gather)
    yield sent
    monkeypatch.undo()


@distributed(world_size=(2, 4))
def test_counts_and_bytes_over_gloo(world_size: int) -> None:
    """The formulas: every reduce and every gather sends (N - 1) / N of the unit, and the verdict a few numbers."""
    with wire(pytest.MonkeyPatch()) as sent:
        for stage in (0, 1, 2, 3) if world_size == 2 else cases.STAGES:
            for accumulation in (1, 2):
                engine = toy.make(
                    toy.seeded(toy.Net),
                    stage,
                    "gloo",
                    dtype="bf16",
                    gradient_accumulation_steps=accumulation,
                    data_types={"grad_accum_dtype": "bf16"},
                )
                units, numel = len(probe.units(engine)), sum(unit.layout.numel for unit in probe.units(engine))
                for _ in range(3):  # ranks compare a new order of collectives, which sends more
                    sent.clear()
                    for micro in range(accumulation):
                        engine(toy.floats(engine.rank, 0, micro).bfloat16()).float().square().mean().backward()
                        engine.step()
                reductions = units * (accumulation if stage >= 2 else 1)
                gathers = {0: units, 1: units, 2: units, 3: 2 * units * accumulation}[stage]
                case = f"stage {stage}, accumulation {accumulation}"
                names = [name for name, _ in sent]
                assert (names.count("all_to_all"), names.count("all_gather")) == (reductions, gathers), case
                verdicts = [nbytes for name, nbytes in sent if name == "all_reduce"]
                assert len(verdicts) == (2 if stage >= 2 else 1) and max(verdicts) < 16384, case
                assert len(sent) == reductions + gathers + len(verdicts), case
                part = 2 * numel * (world_size - 1) // world_size
                assert sum(nbytes for _, nbytes in sent) - sum(verdicts) == part * (reductions + gathers) // units, case
                engine.destroy()


@distributed(world_size=2)
def test_shared_memory_needs_no_collectives() -> None:
    with wire(pytest.MonkeyPatch()) as sent:
        for stage in (0, 1, 2, 3):
            engine = toy.make(toy.seeded(toy.Net), stage, "shared")
            sent.clear()
            for i in range(2):
                engine(toy.floats(engine.rank, i)).square().mean().backward()
                engine.step()
            assert sent == [], f"stage {stage}"
            engine.destroy()
