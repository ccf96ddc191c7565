"""`deepspeed.runtime.pipe.schedule`: instructions per step, matched between neighbors."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.compat import pipe_schedules as schedule
from tests.unit.test_compat import deepspeed  # noqa: F401 (fixture)

SIZES = [(1, 1), (4, 1), (1, 3), (3, 3), (8, 3), (10, 4), (2, 5)]


def names(steps: Any) -> list[str]:
    return [" ".join(repr(instruction).replace("buffer_id=", "") for instruction in step) for step in steps]


@pytest.mark.usefixtures("deepspeed")
def test_scripts_import_it_from_deepspeed() -> None:
    from deepspeed.runtime.pipe import schedule as served

    assert served.TrainSchedule is schedule.TrainSchedule
    with pytest.raises(ImportError, match="is not built yet"):
        exec("from deepspeed.runtime.pipe.schedule import Anything")


def test_instructions_have_names_arguments_and_attributes() -> None:
    instruction = schedule.SendActivation(3, phase=1)
    assert (instruction.name, instruction.kwargs, instruction.buffer_id) == ("SendActivation", {"buffer_id": 3, "phase": 1}, 3)  # type: ignore[attr-defined]
    assert repr(instruction) == "SendActivation(buffer_id=3, phase=1)"
    assert repr(schedule.OptimizerStep()) == "OptimizerStep()"
    assert isinstance(instruction, schedule.BufferOpInstruction)
    assert not isinstance(schedule.ReduceGrads(), schedule.BufferOpInstruction)


def test_places_of_a_stage() -> None:
    first, middle, last = (schedule.TrainSchedule(micro_batches=4, stages=3, stage_id=stage) for stage in range(3))
    assert [each.is_first_stage for each in (first, middle, last)] == [True, False, False]
    assert [each.is_last_stage for each in (first, middle, last)] == [False, False, True]
    assert (middle.stage, middle.num_stages, middle.num_micro_batches) == (1, 3, 4)
    assert (middle.prev_stage, middle.next_stage) == (0, 2)
    assert [each.num_pipe_buffers() for each in (first, middle, last)] == [3, 2, 2]


def test_two_stages_in_full() -> None:
    assert names(schedule.TrainSchedule(2, 2, 0)) == [
        "LoadMicroBatch(0) ForwardPass(0)",
        "SendActivation(0)",
        "LoadMicroBatch(1) ForwardPass(1)",
        "RecvGrad(0) SendActivation(1) BackwardPass(0)",
        "",
        "RecvGrad(1) BackwardPass(1) ReduceTiedGrads() ReduceGrads() OptimizerStep()",
    ]
    assert names(schedule.TrainSchedule(2, 2, 1)) == [
        "",
        "RecvActivation(0) LoadMicroBatch(0) ForwardPass(0)",
        "BackwardPass(0)",
        "SendGrad(0) RecvActivation(1) LoadMicroBatch(1) ForwardPass(1)",
        "BackwardPass(1)",
        "SendGrad(1) ReduceTiedGrads() ReduceGrads() OptimizerStep()",
    ]
    assert names(schedule.DataParallelSchedule(2, 1, 0)) == [
        "LoadMicroBatch(0) ForwardPass(0) BackwardPass(0)",
        "LoadMicroBatch(0) ForwardPass(0) BackwardPass(0) ReduceGrads() OptimizerStep()",
    ]
    assert names(schedule.InferenceSchedule(2, 2, 0)) == [
        "LoadMicroBatch(0) ForwardPass(0)",
        "LoadMicroBatch(1) SendActivation(0) ForwardPass(1)",
        "SendActivation(1)",
    ]
    assert names(schedule.InferenceSchedule(2, 2, 1)) == [
        "",
        "LoadMicroBatch(0) RecvActivation(0) ForwardPass(0)",
        "LoadMicroBatch(1) RecvActivation(1) ForwardPass(1)",
    ]


@pytest.mark.parametrize(("micro_batches", "stages"), SIZES)
@pytest.mark.parametrize("kind", [schedule.TrainSchedule, schedule.InferenceSchedule])
def test_neighbors_send_and_receive_in_the_same_step(kind: type[schedule.PipeSchedule], micro_batches: int, stages: int) -> None:
    trains = kind is schedule.TrainSchedule
    rows = [list(kind(micro_batches, stages, stage)) for stage in range(stages)]
    assert {len(row) for row in rows} == {(2 if trains else 1) * (micro_batches + stages - 1)}
    for stage, row in enumerate(rows):
        count = Counter(type(instruction) for step in row for instruction in step)
        assert count[schedule.ForwardPass] == micro_batches
        assert count[schedule.BackwardPass] == trains * micro_batches
        assert count[schedule.LoadMicroBatch] == (micro_batches if stage in (0, stages - 1) else 0)
        assert count[schedule.OptimizerStep] == trains
        buffers = kind(micro_batches, stages, stage).num_pipe_buffers()
        full: set[int] = set()  # buffers between forward and backward
        for instruction in (instruction for step in row for instruction in step):
            if isinstance(instruction, schedule.BufferOpInstruction):
                buffer: int = instruction.buffer_id  # type: ignore[attr-defined]
                assert 0 <= buffer < buffers
                if trains and isinstance(instruction, schedule.ForwardPass):
                    assert buffer not in full
                    full.add(buffer)
                elif isinstance(instruction, schedule.BackwardPass):
                    full.remove(buffer)
        if stage + 1 < stages:
            for step, other in zip(row, rows[stage + 1], strict=True):
                ours, its = Counter(map(type, step)), Counter(map(type, other))
                assert ours[schedule.SendActivation] == its[schedule.RecvActivation]
                assert ours[schedule.RecvGrad] == its[schedule.SendGrad]


def test_a_schedule_can_be_extended_and_read_twice() -> None:
    class Mine(schedule.PipeSchedule):
        def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
            yield [schedule.LoadMicroBatch(self._buffer_idx(2))]

    ours = Mine(micro_batches=3, stages=1, stage_id=0)
    assert names(ours) == names(ours) == ["LoadMicroBatch(2)"]
    assert repr(next(iter(ours))) == "[LoadMicroBatch(buffer_id=2)]"
    assert ours.num_pipe_buffers() == 3


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 2), (1, 5), (2, 4), (2, 7), (3, 6), (4, 8), (4, 13)])
def test_dual_pipe_v_runs_to_its_end(stages: int, micro_batches: int, forward_only: bool) -> None:
    """CommitP2P waits until the neighbors have posted the other side. Nothing is computed before its input is there."""
    orders = [list(schedule.DualPipeVSchedule(micro_batches, stages, rank, forward_only)) for rank in range(stages)]
    streams = [deque(instruction for step in order for instruction in step) for order in orders]
    posted: dict[tuple[int, int, str], list[int]] = defaultdict(list)  # (sender, receiver, side) -> micro-batches
    waits: list[list[tuple[tuple[int, int, str], int, tuple[Any, ...]]]] = [[] for _ in range(stages)]
    facts: list[set[tuple[Any, ...]]] = [set() for _ in range(stages)]  # (what, stage, micro-batch)
    last = 2 * stages - 1
    other_side = {"sent": "received", "received": "sent"}

    def run(rank: int, instruction: Any) -> bool:
        name = instruction.name
        if name == "CommitP2P":
            for (source, target, channel), i, fact in waits[rank]:
                kind, side = channel.split()
                if len(posted[source, target, f"{kind} {other_side[side]}"]) <= i:
                    return False
                facts[rank].add(fact)
            waits[rank].clear()
            return True
        if not isinstance(instruction, schedule.BufferOpInstruction):
            return True
        micro = instruction.buffer_id % micro_batches  # type: ignore[attr-defined]
        phase = instruction.buffer_id // micro_batches  # type: ignore[attr-defined]
        stage = last - rank if phase else rank
        assert instruction.kwargs.get("phase", 0) == phase
        if name == "LoadMicroBatch":
            facts[rank].add(("forward", -1, micro))
        elif name == "ForwardPass":
            assert ("forward", stage - 1, micro) in facts[rank]
            facts[rank].add(("forward", stage, micro))
        elif name == "BackwardPass":
            assert ("forward", stage, micro) in facts[rank]
            assert stage == last or ("backward", stage + 1, micro) in facts[rank]
            facts[rank].add(("backward", stage, micro))
        else:
            kind, side = "forward" if "Act" in name else "backward", "sent" if name.startswith("Send") else "received"
            other = stage + (1 if (kind == "forward") == (side == "sent") else -1)
            peer = min(other, last - other)
            assert 0 <= other <= last and peer != rank
            assert side == "received" or (kind, stage, micro) in facts[rank]
            pair = (rank, peer) if side == "sent" else (peer, rank)
            key = (*pair, f"{kind}{min(stage, other)} {side}")
            fact = (kind, other, micro) if side == "received" else ("sent",)
            waits[rank].append((key, len(posted[key]), fact))
            posted[key].append(micro)
        return True

    progress = True
    while progress:
        progress = False
        for rank, stream in enumerate(streams):
            while stream and run(rank, stream[0]):
                stream.popleft()
                progress = True
    assert not any(streams)
    assert not any(waits)
    for (source, target, channel), micros in posted.items():
        kind, side = channel.split()
        assert micros == posted[source, target, f"{kind} {other_side[side]}"]
    for rank, order in enumerate(orders):
        count = Counter(instruction.name for step in order for instruction in step)
        assert count["ForwardPass"] == 2 * micro_batches
        assert count["BackwardPass"] == (0 if forward_only else 2 * micro_batches)
        assert count["OptimizerStep"] == (0 if forward_only else 1)
        assert schedule.DualPipeVSchedule(micro_batches, stages, rank).num_pipe_buffers() == 2 * micro_batches


def test_dual_pipe_v_needs_two_micro_batches_for_each_stage() -> None:
    with pytest.raises(ValueError, match="at least 8 micro-batches, not 7: set gradient_accumulation_steps to 8 or more"):
        schedule.DualPipeVSchedule(7, 4, 0)
