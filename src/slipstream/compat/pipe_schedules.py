"""`deepspeed.runtime.pipe.schedule`: DeepSpeed's schedules as generators of instructions.

For scripts that read or extend them. Slipstream's own pipelines follow `slipstream.parallel.schedule`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, TypeVar

from slipstream.compat.runtime_utils import call_to_str

T = TypeVar("T", bound="PipeInstruction")

# -- instructions --


class PipeInstruction:
    """One instruction to a stage. Keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class BufferOpInstruction(PipeInstruction):
    """An instruction on the buffer number `buffer_id`."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


def _kind(name: str, base: type[T], meaning: str) -> type[T]:
    return type(name, (base,), {"__doc__": meaning, "__module__": __name__})


OptimizerStep = _kind("OptimizerStep", PipeInstruction, "Step the optimizer and clear the gradients.")
ReduceGrads = _kind("ReduceGrads", PipeInstruction, "Reduce the gradients over the data-parallel ranks of the stage.")
ReduceTiedGrads = _kind("ReduceTiedGrads", PipeInstruction, "Sum the gradients of tied modules over their stages.")
LoadMicroBatch = _kind("LoadMicroBatch", BufferOpInstruction, "Take the next micro-batch from the data iterator.")
ForwardPass = _kind("ForwardPass", BufferOpInstruction, "Run the stage.")
BackwardPass = _kind("BackwardPass", BufferOpInstruction, "Run the stage's backward and accumulate gradients.")
SendActivation = _kind("SendActivation", BufferOpInstruction, "Send the stage's outputs to the next stage.")
RecvActivation = _kind("RecvActivation", BufferOpInstruction, "Receive the outputs of the previous stage.")
SendGrad = _kind("SendGrad", BufferOpInstruction, "Send the gradients of the stage's inputs to the previous stage.")
RecvGrad = _kind("RecvGrad", BufferOpInstruction, "Receive the gradients of the stage's outputs from the next stage.")


# -- schedules --


class PipeSchedule(ABC):
    """The steps of stage `stage_id`: lists of instructions. All stages can be synchronized between two steps."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = self.num_micro_batches = micro_batches
        self.stages = self.num_stages = stages
        self.stage_id = self.stage = stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.is_first_stage, self.is_last_stage = stage_id == 0, stage_id == stages - 1
        self._iterator: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """The number of buffers that the stage needs."""
        return self.micro_batches

    def __iter__(self) -> PipeSchedule:
        self._iterator = self.steps()
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self._iterator is None:
            self._iterator = self.steps()
        return next(self._iterator)

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """The buffer of a micro-batch: buffers take turns."""
        assert self._valid_micro_batch(micro_batch_id)
        return micro_batch_id % self.num_pipe_buffers()


class DataParallelSchedule(PipeSchedule):
    """Gradient accumulation on one stage."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for i in range(self.micro_batches):
            step: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            yield step + ([ReduceGrads(), OptimizerStep()] if i == self.micro_batches - 1 else [])

    def num_pipe_buffers(self) -> int:
        return 1


class InferenceSchedule(PipeSchedule):
    """Forwards only: in step t, stage s runs micro-batch t - s and sends the one before it."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for t in range(self.micro_batches + self.stages - 1):
            micro = t - self.stage_id
            runs, current, other = self._valid_micro_batch(micro), (t + self.stage_id) % 2, (t + self.stage_id + 1) % 2
            exchange: list[PipeInstruction] = []
            if runs and not self.is_first_stage:
                exchange.append(RecvActivation(current))
            if self._valid_micro_batch(micro - 1) and not self.is_last_stage:
                exchange.append(SendActivation(other))
            if self.stage_id % 2 == 0:  # neighbors match: one sends first, the other receives first
                exchange.reverse()
            load = [LoadMicroBatch(current)] if runs and (self.is_first_stage or self.is_last_stage) else []
            yield [*load, *exchange, *([ForwardPass(current)] if runs else [])]

    def num_pipe_buffers(self) -> int:
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B. Stage s of p runs the forward of micro-batch k in step 2k + s, and its backward in step 2k + 2p - 1 - s."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        total = 2 * (self.micro_batches + self.stages - 1)
        for t in range(total):
            micro, is_forward = self._step_to_micro_batch(t)
            before, _ = self._step_to_micro_batch(t - 1)  # of the other kind
            step: list[PipeInstruction] = []
            if is_forward and not self.is_first_stage:
                step += [*self._of(before, SendGrad), *self._of(micro, RecvActivation)]
            elif not is_forward and not self.is_last_stage:
                step += [*self._of(micro, RecvGrad), *self._of(before, SendActivation)]
            if is_forward and (self.is_first_stage or self.is_last_stage):
                step += self._of(micro, LoadMicroBatch)
            step += self._of(micro, ForwardPass if is_forward else BackwardPass)
            if t == total - 1:
                step += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield step

    def _of(self, micro: int, kind: type[BufferOpInstruction]) -> list[BufferOpInstruction]:
        """The instruction for a micro-batch; none for a number outside the batch."""
        return [kind(self._buffer_idx(micro))] if self._valid_micro_batch(micro) else []

    def num_pipe_buffers(self) -> int:
        """The number of micro-batches that the stage has between forward and backward, at least two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """The micro-batch of a step, which may be outside the batch, and whether the step is a forward."""
        if step_id % 2 == self.stage_id % 2:
            return (step_id - self.stage_id) // 2, True
        return (step_id + self.stage_id + 1) // 2 - self.stages, False
