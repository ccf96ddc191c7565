"""The inputs of train/planning/predict.py, for an engine or for a plan and a model on meta, and its results as a table.

`of_states` reads an engine's units; `parts_of` derives them from a plan before anything is allocated. A test compares both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from slipstream.config.plan import OptimizerPlan, Plan
from slipstream.optim.onebit import rounds_of
from slipstream.optim.rounds import Round
from slipstream.optim.rules import Rule
from slipstream.train.planning import predict
from slipstream.train.planning.predict import Forecast, Line, PredictedPart, Setting, Times
from slipstream.train.recipe import CODE_BITS, mark_kinds, recipe_of, rehearse, transport_of
from slipstream.train.states import States
from slipstream.world.mesh import Axis, Differs, Family
from slipstream.zero.build import Recipe, UnitPlan, plan_units
from slipstream.zero.comm import LocalComm
from slipstream.zero.leaves import kind_of
from slipstream.zero.placement import Tier
from slipstream.zero.reduction import Coded
from slipstream.zero.shared import SharedComm
from slipstream.zero.unit import Comms, Unit
from slipstream.zero.wrap import wrap

# The number of full-size moments of optimizers without a native kernel, by lower-case class name; all others have two, like Adam.
_MOMENTS = {"nooptimizer": 0, "sgd": 0, "lion": 1, "adagrad": 1, "muon": 1, "rmsprop": 1, "adafactor": 0, "rprop": 2}

Optimizer = tuple[torch.optim.Optimizer, Rule | None]  # and its native rule


def _num_moments(inner: torch.optim.Optimizer, rule: Rule | None) -> int:
    """The number of full-size moments of an optimizer."""
    if rule is not None:
        return len(rule.states)
    name = type(inner).__name__.lower()
    return 1 if name == "sgd" and inner.defaults.get("momentum") else _MOMENTS.get(name, 2)


# -- from a plan --


def optimizer_of(plan: Plan) -> Optimizer:
    """The plan's optimizer over a model of one layer; AdamW if the plan has none."""
    inner, rule = rehearse(plan if plan.optimizer else replace(plan, optimizer=OptimizerPlan(type="AdamW", params={})))
    assert inner is not None, "the plan names an optimizer"
    return inner, rule


def mark(model: nn.Module, plan: Plan) -> None:
    """Mark parameters as `initialize` does, before `parts_of` a model that has no engine."""
    mark_kinds(model, plan, *optimizer_of(plan))


def parts_of(model: nn.Module, plan: Plan, world: int, optimizer: Optimizer | None = None) -> list[PredictedPart]:
    """The units that `initialize` would build for the model, by its own plans (zero/build.py)."""
    groups = wrap(model)
    families = {differs: _comms(plan, world, differs) for differs in {(), *(group.differs for group in groups)}}
    return [
        _part(unit.group.name, unit.group.module_name, unit.group.trainable, unit, _longest_span(unit), unit.group.kind)
        for unit in plan_units(groups, model, recipe_of(plan, *(optimizer or optimizer_of(plan))), families)
    ]


def _longest_span(unit: UnitPlan) -> int:
    """The longest share of any rank."""
    return max(stop - start for start, stop in itertools.pairwise(unit.layout.shards(unit.comms.dp.size)))


def _part(name: str, block: str, trainable: bool, unit: UnitPlan | Unit, span: int, kind: str) -> PredictedPart:
    return PredictedPart(
        name=name,
        block=block,
        trainable=trainable,
        numel=unit.layout.numel,
        span=span,
        ranks=unit.comms.dp.size,
        copies=unit.comms.dp_replicate.size,
        dtypes=unit.dtypes,
        differs=unit.comms.family.differs,
        kind=kind,
    )


def _comms(plan: Plan, world: int, differs: Differs) -> Comms:
    """Transports of a family in a world of `world` ranks, only for their sizes: they send nothing."""
    parts_of_whole, is_apart = math.prod(split.size for split in differs), plan.local_steps.every > 0
    replicas = world // parts_of_whole
    block = plan.zero.shard_size or (plan.mesh.sp * plan.mesh.tp if is_apart else world)
    shards = max(block // parts_of_whole, 1)

    def comm(name: str, size: int) -> LocalComm:
        return LocalComm(Axis(name, None, tuple(range(size)), 0, size), predict.META)

    unreduced, reduced = (replicas // shards, 1) if is_apart else (1, replicas // shards)  # copies that a step reduces
    dp, copies, data = comm("dp", shards), comm("dp_replicate", reduced), comm("both", replicas)
    parts = tuple(comm(split.axis, split.size).axis for split in differs)
    family = Family(differs, parts, data.axis, copies.axis, dp.axis, comm("apart", unreduced).axis)
    bits = CODE_BITS.get(plan.precision.comm_dtype)
    coded = Coded(dp, family.weight, bits) if bits and shards > 1 else None
    return Comms(family=family, dp=dp, dp_replicate=copies, data=data, weights=dp, coded=coded)


def setting_of(plan: Plan, world: int, device: str, *, optimizer: Optimizer | None = None) -> Setting:
    """The training setup of a plan, with the transport that ranks would choose if all share this host."""
    inner, rule = optimizer or optimizer_of(plan)
    recipe, on_host = recipe_of(plan, inner, rule), device == "cpu"
    shared = world == 1 or (on_host and transport_of(plan, device) != "gloo")
    replicas = world // (plan.zero.shard_size or plan.mesh.sp * plan.mesh.tp) if plan.local_steps.every else 1
    return _setting(plan, recipe, inner, rule, on_host=on_host, shared=shared, replicas=replicas)


def _setting(
    plan: Plan, recipe: Recipe, inner: torch.optim.Optimizer, rule: Rule | None, *, on_host: bool, shared: bool, replicas: int
) -> Setting:
    return Setting(
        plan=plan,
        recipe=recipe,
        on_host=on_host,
        shared=shared,
        replicas=replicas,
        num_moments=_num_moments(inner, rule),
        streams=rule is not None,
        rounds=rounds_of(inner) if rule is not None and rule.late else None,
    )


# -- of an engine --


def of_states(states: States, *args: Any, **kwargs: Any) -> Forecast:
    """The forecast of an engine. Given a batch (the model's arguments), it includes the peak."""
    plan, data, steps = states.plan, states.comms.data, states.steps
    on_host, shared = states.device.type == "cpu", data.size == 1 or isinstance(data, SharedComm)
    replicas = states.mesh.num_apart
    setting = _setting(plan, states.recipe, steps.inner, steps.rule, on_host=on_host, shared=shared, replicas=replicas)
    profile = None
    if args or kwargs:
        from slipstream.train.planning.dry_run import dry_run  # torch's fake tensors are slow to import

        profile = dry_run(states.model, plan, args, kwargs, micro_batch_size=plan.batch.micro_batch_size)
    return Forecast.of([part_of(unit) for unit in states.units], setting, profile)


def part_of(unit: Unit) -> PredictedPart:
    block = "" if unit.block is None else unit.name.partition(" (")[0]
    return _part(unit.name, block, unit.trainable, unit, unit.span[1] - unit.span[0], kind_of(unit.model_params[0]))


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
_KINDS = {Round.SIGNS: "step of signs", Round.LOCAL: "local step"}


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
    return "\n".join([*text, *_traffic_rows(forecast), *_time_rows(forecast.times)])


def _traffic_rows(forecast: Forecast) -> list[str]:
    flow = forecast.flow
    moved = [(what, getattr(flow, link)) for link, what in _LINKS.items() if getattr(flow, link)]
    text = ["", "per step and rank", *(f"  {what:<22}{size(nbytes):>12}" for what, nbytes in moved or [("sent or read", 0)])]
    text += [f"  {f'sent, {_KINDS[kind]}':<22}{size(later.wire):>12}" for kind, later in forecast.later.items() if flow.wire]
    if every := forecast.setting.plan.local_steps.every:
        text += [f"  {f'sent, every {every} steps':<22}{size(predict.round_nbytes(forecast)):>12}"]
    rows = sum(part.sent_nbytes(part.numel) for part in forecast.parts if part.dtypes.row)
    return [*text, "  Rows are counted as if all have values; only those that have are sent."] if rows and flow.wire else text


def _time_rows(times: Times | None) -> list[str]:
    if times is None:
        return []
    rows = ["", "busy per step"]
    for cost in times.costs:
        amount = f"{cost.amount / 1e9:.1f} GFLOP" if cost.resource == "compute" else size(cost.amount)
        rows.append(f"  {cost.resource:<22}{amount:>14}{seconds(cost.seconds):>12}")
    return [*rows, f"  {'step, overlapped':<22}{'':>14}{seconds(times.seconds):>12}  limited by {times.limit}"]


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def traffic_text(forecast: Forecast) -> str:
    """The bytes that a rank sends, in one line; "" if none."""
    sent = forecast.flow.wire
    text = [f"each rank sends {size(sent)} per step"] if sent else []
    text += [f"{size(later.wire)} per {_KINDS[kind]}" for kind, later in forecast.later.items() if sent]
    if (every := forecast.setting.plan.local_steps.every) and (nbytes := predict.round_nbytes(forecast)):
        text += [f"each rank sends {size(nbytes)} every {every} steps"]
    return ", ".join(text)


def as_dict(forecast: Forecast) -> dict[str, Any]:
    """The forecast as JSON values: bytes and seconds."""
    peak, times = forecast.peak, forecast.times
    return {
        "memory": [line._asdict() | {"tier": line.tier.value} for line in (forecast.rest if peak is None else peak.lines)],
        "peak": None if peak is None else {"memory_bytes": peak.memory, "disk_bytes": peak.total(Tier.DISK), "when": peak.when},
        "traffic_per_step": forecast.flow._asdict(),
        "round_bytes": predict.round_nbytes(forecast) if forecast.setting.plan.local_steps.every else 0,
        "traffic_per_later_step": {kind.value: flow._asdict() for kind, flow in forecast.later.items()},
        "busy_per_step": None if times is None else [cost._asdict() for cost in times.costs],
        "step_seconds": None if times is None else times.seconds,
        "limited_by": None if times is None else times.limit,
    }
