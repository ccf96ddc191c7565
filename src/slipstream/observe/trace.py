"""Traces of some steps by torch.profiler, in which phases, units and waits for other ranks have names.

A trace is a file per rank, `FOLDER/rank-0.json`, for https://ui.perfetto.dev or chrome://tracing. On a GPU there is also
`rank-0.pickle`, the history of its memory, for https://pytorch.org/memory_viz.

[Note: Names in the backward] A unit's range in the backward starts at the gradient of its output. It ends at the gradient of its
input, or when the next unit starts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

logger = logging.getLogger(__name__)


class Trace:
    """The trace of one engine's steps on this rank."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.plan = engine, engine.plan.trace
        self.path = Path(self.plan.folder) / f"rank-{engine.rank}"
        self._profile: Any = None
        self._handles: list[Any] = []
        self._backward: Any = None  # the range of a unit's backward

    def follow(self) -> None:
        """Start or stop the trace; called before the first step and after each."""
        first, end = self.plan.steps
        step = self.engine.global_steps
        if self._profile is None and first <= step < end:
            self.start()
        elif self._profile is not None and step >= end:
            self.close()

    def start(self) -> None:
        on_gpu = self.engine.device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
        self._profile.__enter__()
        if on_gpu:
            torch.cuda.memory._record_memory_history()
        self.engine.progress.around.append(self._phase)
        self.engine.watch.around.append(self._wait)
        blocks = {unit.block: unit.name.partition(" (")[0] for unit in self.engine.units if unit.block is not None}
        for block, name in blocks.items():
            self._name(block, name)

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        with record_function(phase):
            try:
                yield
            finally:
                self._end_backward()

    def _wait(self, operation: str) -> Any:
        return record_function(f"wait: {operation} ({self.engine.watch.unit or '-'})")

    def _name(self, block: nn.Module, name: str) -> None:
        running: list[Any] = []

        def enter(module: nn.Module, args: Any) -> None:
            running.append(record_function(f"forward of {name}"))
            running[-1].__enter__()
            self._on_gradient(args, lambda _: self._end_backward(name))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if running:
                running.pop().__exit__(None, None, None)
            self._on_gradient(output, lambda _: self._begin_backward(name))

        self._handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave, always_call=True)]

    def _on_gradient(self, values: Any, call: Any) -> None:
        for value in values if isinstance(values, (tuple, list)) else (values,):
            if isinstance(value, Tensor) and value.requires_grad and value.grad_fn is not None:
                value.register_hook(call)
                return

    def _begin_backward(self, name: str) -> None:
        self._end_backward()
        self._backward = name, record_function(f"backward of {name}")
        self._backward[1].__enter__()

    def _end_backward(self, name: str | None = None) -> None:
        if self._backward is not None and name in (None, self._backward[0]):
            self._backward[1].__exit__(None, None, None)
            self._backward = None

    def close(self) -> None:
        if self._profile is None:
            return
        self._end_backward()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.engine.progress.around.remove(self._phase)
        self.engine.watch.around.remove(self._wait)
        traced, self._profile, on_gpu = self._profile, None, self.engine.device.type == "cuda"
        traced.__exit__(None, None, None)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(f"{self.path}.json")
            if on_gpu:
                torch.cuda.memory._dump_snapshot(f"{self.path}.pickle")
        except (OSError, RuntimeError) as error:  # torch's own error for a file that cannot be opened
            logger.warning("the trace %s.json is not written: %s", self.path, error)
            return
        finally:
            if on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
        logger.info("trace of steps %d to %d: %s.json", *self.plan.steps, self.path)


def trace_steps(engine: Any) -> None:
    """Trace the steps of an engine that its plan names."""
    trace = engine.states.resources["trace"] = Trace(engine)
    engine.states.after_step.append(lambda _: trace.follow())
    trace.follow()
