"""`deepspeed.runtime.pipe.schedule`: instructions per step, matched between neighbors."""

from __future__ import annotations

from collections import Counter
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
    for name, remedy in (("Anything", "engine.schedule"), ("DualPipeVSchedule", 'slipstream.pipeline.schedule "v"')):
        with pytest.raises(ImportError, match=f"is not built yet.*{remedy}"):
            exec(f"from deepspeed.runtime.pipe.schedule import {name}")


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
