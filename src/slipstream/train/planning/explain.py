"""The inputs of train/planning/predict.py, for an engine or for a plan and a model on meta, and its results as a table.

`of_states` reads an engine's units; `parts_of` derives them from a plan before anything is allocated. A test compares both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from slipstream.config.plan import Plan
from slipstream.optim import is_elementwise
from slipstream.optim.native import Form, NativeSteps
from slipstream.optim.sharded import ShardedSteps
from slipstream.train.disk_space import tiers_of
from slipstream.train.planning import predict
from slipstream.train.planning.predict import Flow, Line, Part, Peak, Profile, Rates, Setting, Times
from slipstream.train.states import States
from slipstream.zero.layout import flat_layout, whole_layout
from slipstream.zero.leaves import named_leaves
from slipstream.zero.placement import Tier, stage_placement
from slipstream.zero.shared import SharedComm
from slipstream.zero.unit import Unit
from slipstream.zero.wrap import wrap

# The number of full-size moments by lower-case optimizer name; all others have two, like Adam.
_MOMENTS = {"nooptimizer": 0, "sgd": 0, "lion": 1, "adagrad": 1, "muon": 1, "rmsprop": 1, "adafactor": 0, "rprop": 2}


def moments_of(optimizer: str, options: Mapping[str, Any]) -> int:
    """The number of full-size moments of an optimizer."""
    name = optimizer.lower()
    return 1 if name == "sgd" and options.get("momentum") else _MOMENTS.get(name, 2)


# -- from a plan --


class Optimizer(NamedTuple):
    """The properties of an optimizer that determine sizes."""

    num_moments: int
    streams: bool  # it has a native kernel
    whole: bool  # it depends on parameters' shapes


def optimizer_of(plan: Plan) -> Optimizer:
    """The properties of the plan's optimizer; AdamW's if the plan has none."""
    from slipstream.train.initialize import rehearse

    if plan.optimizer is None:
        return Optimizer(2, streams=True, whole=False)
    inner, rule = rehearse(plan)
    assert inner is not None, "the plan names an optimizer"
    if rule is not None:
        return Optimizer(len(rule.states), streams=True, whole=rule.is_whole)
    return Optimizer(moments_of(plan.optimizer.type, plan.optimizer.params), streams=False, whole=not is_elementwise(inner))


def parts_of(model: nn.Module, plan: Plan, world: int, optimizer: Optimizer | None = None) -> list[Part]:
    """The units that `initialize` would build for the model, with their dtypes (zero/build.py)."""
    cut = whole_layout if (optimizer or optimizer_of(plan)).whole else flat_layout
    align = Form(dtype=plan.precision.state_dtype).align
    shards, params, parts = plan.zero.shard_size or world, {leaf.name: leaf.tensor for leaf in named_leaves(model)}, []
    place, precision = stage_placement(plan.zero.stage), plan.precision
    for group in wrap(model):
        shapes = [(name, tuple(params[name].shape)) for name in group.param_names]
        layout = cut(shapes, world, align)
        cuts = layout.shards(shards)
        weights = group.dtype
        if not group.exact and precision.param_dtype is not torch.float32:
            weights = precision.param_dtype
        accumulates = plan.batch.accumulation > 1 or not plan.batch.managed
        kept = precision.grad_accum_dtype or (torch.promote_types(weights, torch.float32) if accumulates else weights)
        if world > shards and precision.comm_dtype is not None:
            kept = torch.promote_types(kept, precision.comm_dtype)
        wire = precision.comm_dtype or (weights if place.grads else kept)
        if not group.trainable:
            kept = wire = weights
        parts.append(
            Part(
                name=group.name,
                block=group.module_name,
                trainable=group.trainable,
                numel=layout.numel,
                span=max(b - a for a, b in itertools.pairwise(cuts)),  # the longest of any rank
                weights=weights.itemsize,
                master=max(weights.itemsize, precision.master_dtype.itemsize) if group.trainable else weights.itemsize,
                local=kept.itemsize,
                wire=wire.itemsize,
                grads=kept.itemsize,
                casts=wire is not kept,
            )
        )
    return parts


def setting_of(plan: Plan, world: int, device: str, *, transport: str | None = None, optimizer: Optimizer | None = None) -> Setting:
    """The training setup of a plan. `transport`: the ranks' transport; None: the one they would choose if all share this host."""
    optimizer = optimizer or optimizer_of(plan)
    tiers, on_host = tiers_of(plan.offload), device == "cpu"
    private = plan.debug.poison_released or tiers.weights is Tier.DISK  # as _transport in train/initialize.py
    transport = transport or ("gloo" if private or not on_host or plan.zero.transport == "gloo" else "shared")
    return Setting(
        placement=stage_placement(plan.zero.stage),
        tiers=tiers,
        on_host=on_host,
        ranks=plan.zero.shard_size or world,
        copies=world // (plan.zero.shard_size or world),
        shared=transport == "shared" or world == 1,
        poison=plan.debug.poison_released,
        moments=(plan.precision.state_dtype.itemsize,) * optimizer.num_moments,
        coded=Form(dtype=plan.precision.state_dtype).coded,
        streams=optimizer.streams,
        chunk_numel=1 << 62 if optimizer.whole else plan.offload.chunk_numel,
        num_buffers=plan.offload.num_buffers,
        accumulation=plan.batch.accumulation,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The prediction for a run. `peak` and `times` are None if the activations are not known."""

    parts: Sequence[Part]
    setting: Setting
    profile: Profile | None
    rates: Rates | None

    @property
    def rest(self) -> tuple[Line, ...]:
        return predict.idle_memory(self.parts, self.setting)

    @property
    def peak(self) -> Peak | None:
        return None if self.profile is None else predict.peak(self.parts, self.setting, self.profile)

    @property
    def flow(self) -> Flow:
        """Of one step."""
        return predict.traffic(self.parts, self.setting).step(self.setting.accumulation)

    @property
    def times(self) -> Times | None:
        if self.profile is None or self.rates is None:
            return None
        return predict.times(self.parts, self.setting, self.profile, self.rates)


# -- of an engine --


def of_states(states: States, *args: Any, **kwargs: Any) -> Forecast:
    """The forecast of an engine; with a batch (the model's arguments), including its peak."""
    plan, world, steps = states.plan, states.mesh.batch.size, states.steps
    transport = "shared" if isinstance(states.comms.data, SharedComm) else "gloo"
    optimizer = Optimizer(_num_moments(steps), streams=isinstance(steps, NativeSteps), whole=False)  # units are cut already
    setting = setting_of(plan, world, states.device.type, transport=transport, optimizer=optimizer)
    profile = None
    if args or kwargs:
        from slipstream.train.planning.dry_run import dry_run  # torch's fake tensors are slow to import

        profile = dry_run(states.model, plan, args, kwargs, micro_batch_size=plan.batch.micro_batch_size)
    return Forecast(parts=[part_of(unit) for unit in states.units], setting=setting, profile=profile, rates=None)


def part_of(unit: Unit) -> Part:
    """The sizes of a unit."""
    dtypes = unit.dtypes
    return Part(
        name=unit.name,
        block="" if unit.block is None else unit.name.partition(" (frozen")[0],
        trainable=unit.trainable,
        numel=unit.layout.numel,
        span=unit.span[1] - unit.span[0],
        weights=dtypes.weights.itemsize,
        master=dtypes.master.itemsize,
        local=dtypes.local.itemsize,
        wire=dtypes.wire.itemsize,
        grads=dtypes.grads.itemsize,
        casts=dtypes.wire != dtypes.local,
    )


def _num_moments(steps: ShardedSteps) -> int:
    """Moments of a native rule, or of a torch optimizer by its class."""
    if steps.rule is not None:
        return len(steps.rule.states)
    return moments_of(type(steps.inner).__name__, steps.inner.defaults)


# -- as text --


def size(nbytes: float) -> str:
    if not nbytes:
        return "-"
    for name, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {name}"
    return f"{nbytes / 1024:.1f} KiB"


_STATES = ("weights", "gradients", "optimizer", "activations", "buffers")
_LINKS = {
    "wire": "sent to other ranks",
    "to_host": "device to host",
    "to_device": "host to device",
    "disk_read": "read from disk",
    "disk_written": "written to disk",
}


def table(forecast: Forecast) -> str:
    """The forecast as text: memory by state and tier, traffic by link, time by resource."""
    peak = forecast.peak
    lines = forecast.rest if peak is None else peak.lines
    num_parameters = max(sum(part.numel for part in forecast.parts), 1)
    tiers = [tier for tier in Tier if any(line.tier is tier for line in lines)] or [Tier.DEVICE]
    names = {Tier.DEVICE: "memory" if forecast.setting.on_host else "device", Tier.HOST: "host", Tier.DISK: "disk"}
    text = [f"{'per rank':<24}" + "".join(f"{names[tier]:>12}" for tier in tiers)]

    def row(name: str, chosen: Sequence[Line], remark: str) -> None:
        cells = "".join(f"{size(sum(line.nbytes for line in chosen if line.tier is tier)):>12}" for tier in tiers)
        text.append(f"  {name:<22}{cells}  {remark}".rstrip())

    for state in _STATES:
        chosen = [line for line in lines if line.state == state]
        details = ", ".join(f"{line.what} {size(line.nbytes)}" for line in chosen if line.what != state)
        if state == "activations" and peak is None:
            details = "pass a batch (the model's arguments) to predict them and the peak"
        row(state, chosen, details)
    total = f"{sum(line.nbytes for line in lines) / num_parameters:.2f} B per parameter"
    row("idle" if peak is None else "peak", lines, total if peak is None else f"in {peak.when}; {total}")
    moved = [(what, getattr(forecast.flow, link)) for link, what in _LINKS.items() if getattr(forecast.flow, link)]
    text += ["", "per step and rank"] + [f"  {what:<22}{size(nbytes):>12}" for what, nbytes in moved or [("sent or read", 0)]]
    times = forecast.times
    if times is not None:
        text += ["", "busy per step"]
        for cost in times.costs:
            amount = f"{cost.amount / 1e9:.1f} GFLOP" if cost.resource == "compute" else size(cost.amount)
            text.append(f"  {cost.resource:<22}{amount:>14}{seconds(cost.seconds):>12}")
        text.append(f"  {'step, overlapped':<22}{'':>14}{seconds(times.seconds):>12}  limited by {times.limit}")
    return "\n".join(text)


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def as_dict(forecast: Forecast) -> dict[str, Any]:
    """The forecast as JSON values: bytes and seconds."""
    peak, times = forecast.peak, forecast.times
    return {
        "memory": [line._asdict() | {"tier": line.tier.value} for line in (forecast.rest if peak is None else peak.lines)],
        "peak": None if peak is None else {"memory_bytes": peak.memory, "disk_bytes": peak.total(Tier.DISK), "when": peak.when},
        "traffic_per_step": forecast.flow._asdict(),
        "busy_per_step": None if times is None else [cost._asdict() for cost in times.costs],
        "step_seconds": None if times is None else times.seconds,
        "limited_by": None if times is None else times.limit,
    }
