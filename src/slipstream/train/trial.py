"""A trial of `slipstream tune` from the inside (config/trial.py): its speed per step, and predictions for other configurations.

Rank 0 writes a line of PROGRESS per step. All ranks end the script together, after the trial's steps or once the tuner has put the
file STOP into the folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config.plan import Plan
from slipstream.config.trial import PROGRESS, STOP, SURVEY, Trial, current, write_json
from slipstream.observe.memory import MemoryReading
from slipstream.train.engine import Engine
from slipstream.world.join import local_world_size
from slipstream.zero.trees import map_tensors

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_INTERPRETER = 400 << 20  # bytes of Python and torch
_MOST_OF_DEVICE = 0.92  # of its memory; the rest is for libraries and fragmentation


def follow_trial(model: nn.Module, plan: Plan) -> Callable[[Engine], None] | None:
    """The `Change` (changes.py) that measures a trial; None without a trial."""
    trial = current()
    if trial is None or not trial.steps:
        return None
    lean = None
    if trial.survey is not None:
        from slipstream.train.planning.dry_run import without_memory  # torch's fake tensors are slow to import

        lean = without_memory(model, device="meta")
    return lambda engine: _Follower(engine, trial, lean).connect()


class _Follower:
    def __init__(self, engine: Engine, trial: Trial, lean: nn.Module | None) -> None:
        self.engine, self.trial, self.lean = engine, trial, lean
        self.began, self.last, self.count = False, time.perf_counter(), 0
        self.is_first = engine.mesh.is_first
        self.rate: float | None = None  # learning rate of this step of a range test
        self.shares: list[float] = []  # of the parameter groups: learning rate over the first group's

    def connect(self) -> None:
        states, progress = self.engine.states, self.engine.progress
        if progress.losses is None:
            progress.losses = []
        states.before_forward(self._begin, with_kwargs=True)
        states.after_step.append(self._end_step)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before the first forward that trains: rank 0 writes the script's inputs, and the survey."""
        if self.began or not (module.training and torch.is_grad_enabled()):
            return
        self.began, batch, mesh = True, self.engine.plan.batch, self.engine.mesh
        self._set_rate()
        if not self.is_first:
            return
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
        rows = tensors[0].shape[0] if tensors and mesh.pp.size == 1 else None
        self._write({"samples": batch.train_batch_size, "micro": batch.micro_batch_size, "rows": rows, "ranks": mesh.world.size})
        if self.trial.survey is not None and self.lean is not None:
            on_meta = partial(torch.empty_like, device="meta")
            inputs, keywords = map_tensors(args, on_meta), map_tensors(dict(kwargs), on_meta)
            write_json(self.trial.folder / SURVEY, surveyed(self.engine, self.lean, inputs, keywords, self.trial.survey))
        self.last = time.perf_counter()

    def _end_step(self, _: bool) -> None:
        now, self.count, trial = time.perf_counter(), self.count + 1, self.trial
        if self.is_first:
            self._write_step(now - self.last)
        self.last = time.perf_counter()
        self._set_rate()
        if self.count >= trial.warmup + trial.steps or (self.count > trial.warmup and self._is_stopped()):
            raise SystemExit(0)

    def _set_rate(self) -> None:
        """Set the learning rate of the next step of a range test, after any schedule has set its own. Groups keep their ratios."""
        if self.trial.rates is None or self.engine.optimizer is None:
            return
        (low, high), groups = self.trial.rates, self.engine.optimizer.param_groups
        first = groups[0]["lr"]  # 0 at the start of a warmup
        self.shares = self.shares or [group["lr"] / first if first else 1.0 for group in groups]
        self.rate = low * (high / low) ** (self.count / max(1, self.trial.warmup + self.trial.steps - 1))
        for group, share in zip(groups, self.shares, strict=True):
            group["lr"] = self.rate * share

    def _write_step(self, seconds: float) -> None:
        engine = self.engine
        step = {"step": self.count, "seconds": seconds, "timed": self.count > self.trial.warmup}
        if losses := engine.progress.losses:
            step["loss"] = fmean(map(float, losses))
        if self.rate is not None:
            step["lr"] = self.rate
        self._write(step | {"memory": MemoryReading.of(engine.device).peak})

    def _write(self, line: Mapping[str, Any]) -> None:
        with open(self.trial.folder / PROGRESS, "a") as file:
            file.write(json.dumps(line) + "\n")

    def _is_stopped(self) -> bool:
        """Whether rank 0 sees the file STOP; the same on all ranks. Collective."""
        own = float(self.is_first and (self.trial.folder / STOP).exists())
        return bool(self.engine.states.world.exchange(torch.tensor([own], dtype=torch.float64)).max())


def surveyed(
    engine: Engine, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """The candidates for this engine's model and batch, on meta, as JSON values.

    wanted: `memory`, bytes per rank on top of Python and torch, or None; `host`, bytes that all ranks of a host without a GPU
    share; `disk`, a folder or None; `max_batch`, the largest global batch, reached by doubling the config's, or None
    """
    from slipstream.train.planning import calibrate, dry_run, explain, predict, propose  # torch's fake tensors are slow to import

    plan, world, device = engine.plan, engine.mesh.batch.size, engine.device.type
    if device == "cuda":
        free = int(_MOST_OF_DEVICE * torch.cuda.get_device_properties(engine.device).total_memory)
    else:
        free = wanted["host"] // local_world_size() - _INTERPRETER
    budget = wanted["memory"] or free
    folder = wanted["disk"] or plan.offload.optimizer_path or plan.offload.param_path
    note = ""
    if plan.mesh.model_size * plan.experts.size > 1:
        note = "the ranks share layers, samples or experts: memory and time are not predicted"
    explain.mark(model, plan)
    try:
        profile_of = dry_run.profiles(model, plan, world, args, kwargs)
        dtype = profile_of(plan.activations.way == "recompute", plan.batch.micro_batch_size).dtype
    except ValueError as error:
        note = note or f"only the bytes of the states are predicted: {error}"
        nothing = predict.stated(explain.parts_of(model, plan, world), 0)
        dtype, profile_of = "float32", lambda recompute, size: nothing
    rates = calibrate.rates(dtype, device, folder, {})
    rows = []
    for grown in _grown(plan, world, wanted["max_batch"]):
        for each in propose.survey(model, grown, world, device, folder, rates, profile_of, budget):
            batch = each.plan.batch
            more = dict(zip(_BATCH, (batch.train_batch_size, batch.micro_batch_size, batch.accumulation), strict=True))
            row: dict[str, Any] = {"micro": batch.micro_batch_size, "samples": batch.train_batch_size, "memory": propose.used(each)}
            row["stage"] = each.plan.zero.stage
            row |= {"changes": each.changes | (more if grown is not plan else {}), "fits": bool(note) or row["memory"] <= budget}
            rows.append(row | {"seconds": 0.0 if note else each.seconds})
    return {"note": note, "budget": budget, "candidates": rows}


def _grown(plan: Plan, world: int, most: int | None) -> Iterator[Plan]:
    """The plan, and its copies with 2, 4, ... times its global batch."""
    yield plan
    batch, times = plan.batch, 2
    while most is not None and batch.train_batch_size * times <= most:
        larger = replace(batch, train_batch_size=batch.train_batch_size * times, accumulation=batch.accumulation * times)
        yield replace(plan, batch=larger)
        times *= 2
