"""Find the fastest configuration that fits a memory budget. Deterministic; pure except for the dry runs.

The search varies the ZeRO stage, recompute, offload of optimizer and weights and their shares, the split of the global batch into
micro-batches and, if nothing else fits, the chunks in which optimizer states pass through memory. It keeps all other settings of
the config. Results of training do not change beyond rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch.nn as nn

from slipstream.config.plan import OffloadPlan, Plan
from slipstream.config.trial import nested
from slipstream.train.planning import predict
from slipstream.train.planning.explain import optimizer_of, parts_of, seconds, setting_of, size
from slipstream.train.planning.predict import Forecast, Peak, Profile, Rates
from slipstream.zero.placement import Tier

_SHARES = (1.0, 0.75, 0.5, 0.25)  # on disk
_CHUNKS = ((1 << 19, 4), (1 << 17, 2))  # elements per chunk, number of buffers
_BUFFERS = 4  # the default of offload_optimizer.buffer_count
_ALIKE = 0.02  # step times closer than this are equal: the smaller change of the config wins

Device = Literal["none", "cpu", "nvme"]


class Proposal(NamedTuple):
    changes: dict[str, Any]  # of the config, by dotted key
    plan: Plan
    forecast: Forecast
    peak: Peak
    seconds: float  # of a step


class Least(NamedTuple):
    """The configuration that needs least memory, if none fits."""

    proposal: Proposal
    budget: int
    num_tried: int

    def __str__(self) -> str:
        peak = self.proposal.peak
        most = sorted((line for line in peak.lines if line.tier is not Tier.DISK), key=lambda line: -line.nbytes)[:3]
        reasons = ", ".join(f"{line.what} {size(line.nbytes)}" for line in most)
        return (
            f"nothing fits into {size(self.budget)}: of {self.num_tried} configurations tried, the smallest needs "
            f"{size(used(self.proposal))}, mostly for {reasons} (in {peak.when})"
        )


def choose(tried: Sequence[Proposal], budget: int) -> list[Proposal] | Least:
    """Return the configurations of `survey` that fit, fastest first, or the one that needs least memory."""
    fitting = [proposal for proposal in tried if used(proposal) <= budget]
    return sorted(fitting, key=_rank) or Least(min(tried, key=used), budget, len(tried))


def survey(
    model: nn.Module,
    plan: Plan,
    world: int,
    device: str,
    folder: str | None,
    rates: Rates,
    profile_of: Callable[[bool, int], Profile],
    budget: int,
) -> list[Proposal]:
    """Try configurations; returns also those above the budget.

    folder      a folder on a disk for offload; None: no disk
    profile_of  (recompute, micro-batch size) -> profile of a micro-batch
    budget      bytes per rank, of the device if it is not the host, on top of the memory of Python and torch
    """
    tried = list[Proposal]()
    counts: dict[tuple[int, bool, OffloadPlan], Forecast] = {}
    optimizer = optimizer_of(plan)

    def proposed(changed: Plan) -> Proposal:
        setting = setting_of(changed, world, device, optimizer=optimizer)
        key = changed.zero.stage, changed.batch.accumulation > 1, changed.offload  # the states depend on nothing else
        if key not in counts:
            counts[key] = Forecast.of(parts_of(model, changed, world, optimizer), setting)
        profile = profile_of(changed.activations.way == "recompute", changed.batch.micro_batch_size)
        forecast = dataclasses.replace(counts[key], setting=setting, profile=profile, rates=rates)
        seconds = predict.times(forecast, profile, rates).seconds
        return Proposal(_changes(plan, changed), changed, forecast, predict.peak(forecast, profile), seconds)

    for variant in _variants(plan, model, world, device, folder if optimizer[1] is not None else None):
        for changed in _chunks(variant, device):
            tried.append(proposed(changed))
            if used(tried[-1]) <= budget:
                break  # smaller chunks are only for configurations that do not fit
    return tried


def used(proposal: Proposal) -> int:
    """Bytes of a rank that count against the budget."""
    return proposal.peak.memory if proposal.forecast.setting.on_host else proposal.peak.total(Tier.DEVICE)


def _rank(proposal: Proposal) -> tuple[int, int, int]:
    return round(math.log(proposal.seconds) / _ALIKE), len(proposal.changes), proposal.peak.memory


def _variants(plan: Plan, model: nn.Module, world: int, device: str, folder: str | None) -> Iterator[Plan]:
    """All candidate plans, with the chunks of the config."""
    total = plan.batch.train_batch_size // world
    sizes = [size for size in range(1, total + 1) if total % size == 0]
    stages: set[Literal[0, 1, 2, 3]] = {plan.zero.stage}
    if plan.zero.shard_size is None:
        stages |= {0, 3} if world == 1 else {0, 1, 2, 3}
    numel = sum(param.numel() for param in model.parameters()) // (plan.zero.shard_size or world)
    here: tuple[Device, ...] = ("none", "cpu") if device != "cpu" else ("none",)  # on CPU, "cpu" is the same as "none"
    optimizers: list[tuple[Device, float]] = [(each, 1.0) for each in here]
    weights: list[tuple[Device, int]] = [(each, 0) for each in here]
    if folder is not None:
        optimizers += [("nvme", share) for share in _SHARES]
    if folder is not None and device == "cpu" and plan.zero.transport != "shared":
        weights += [("nvme", round(numel * (1 - share))) for share in _SHARES]
    ways: tuple[Literal["keep", "recompute"], ...] = ("keep", "recompute")
    for stage in sorted(stages):
        moved = itertools.product(optimizers, weights if stage == 3 else weights[:1])
        for ((optimizer, ratio), (param, kept)), way, micro in itertools.product(moved, ways, sizes):
            yield dataclasses.replace(
                plan,
                batch=dataclasses.replace(plan.batch, micro_batch_size=micro, accumulation=total // micro),
                zero=dataclasses.replace(plan.zero, stage=stage),
                activations=dataclasses.replace(plan.activations, way=way),
                offload=dataclasses.replace(
                    plan.offload,
                    optimizer=optimizer,
                    optimizer_path=folder,
                    ratio=ratio,
                    param=param,
                    param_path=folder,
                    max_in_cpu=kept,
                ),
            )


def _chunks(plan: Plan, device: str) -> Iterator[Plan]:
    """A plan and, if its optimizer states stream, variants with smaller chunks."""
    yield plan
    offload = plan.offload
    if offload.optimizer == "nvme" or (offload.optimizer == "cpu" and device != "cpu"):
        for numel, buffers in _CHUNKS:
            if numel < offload.chunk_numel:
                changed = dataclasses.replace(offload, chunk_numel=numel, num_buffers=min(buffers, offload.num_buffers))
                yield dataclasses.replace(plan, offload=changed)


def _changes(plan: Plan, changed: Plan) -> dict[str, Any]:
    """The changes of the config, by dotted key."""
    before, after = plan.offload, changed.offload
    changes: dict[str, Any] = {}
    if changed.zero.stage != plan.zero.stage:
        changes["zero_optimization.stage"] = changed.zero.stage
    ratio = before.ratio if before.optimizer == "nvme" else 1.0
    if (after.optimizer, after.ratio, after.num_buffers) != (before.optimizer, ratio, before.num_buffers):
        changes["zero_optimization.offload_optimizer"] = (
            {"device": "nvme", "nvme_path": after.optimizer_path, "ratio": after.ratio}
            if after.optimizer == "nvme"
            else {"device": after.optimizer}
        ) | ({} if after.num_buffers == _BUFFERS else {"buffer_count": after.num_buffers})
    if after.chunk_numel != before.chunk_numel:
        changes["zero_optimization.sub_group_size"] = after.chunk_numel
    if (after.param, after.max_in_cpu) != (before.param, before.max_in_cpu if before.param == "nvme" else 0):
        changes["zero_optimization.offload_param"] = (
            {"device": "nvme", "nvme_path": after.param_path, "max_in_cpu": after.max_in_cpu}
            if after.param == "nvme"
            else {"device": after.param}
        )
    if changed.activations.way != plan.activations.way:
        changes["slipstream.activations"] = changed.activations.way
    if changed.batch != plan.batch:
        changes["train_micro_batch_size_per_gpu"] = changed.batch.micro_batch_size
        changes["gradient_accumulation_steps"] = changed.batch.accumulation
    return changes


# -- as text --


def table(result: list[Proposal] | Least, budget: int, most: int) -> str:
    """The result as text: up to `most` proposals, and the fastest one's changes as JSON."""
    if isinstance(result, Least):
        return f"{result}\nits changes of the config:\n{lines(result.proposal.changes)}"
    number = f"{len(result)} configurations, fastest first" if len(result) > 1 else "one configuration"
    head = f"fits into {size(budget)}, on top of Python and torch: {number}"
    rows = [f"  {'step':>10}{'peak':>12}{'disk':>12}  change"]
    for each in result[:most]:
        text = ", ".join(_short(key, value) for key, value in each.changes.items()) or "nothing"
        disk = each.peak.total(Tier.DISK)
        rows.append(f"  {seconds(each.seconds):>10}{size(used(each)):>12}{size(disk):>12}  {text}")
    changes = result[0].changes
    fastest = ["changes of the config for the fastest:", lines(changes)] if changes else ["the fastest is the config as it is"]
    return "\n".join([head, *rows, "", *fastest])


def _short(key: str, value: Any) -> str:
    name = key.rsplit(".", 1)[-1]
    if not isinstance(value, dict):
        return f"{name} {value}"
    share = [f"{part} {value[part]:g}" for part in ("ratio", "max_in_cpu", "buffer_count") if value.get(part, 1.0) not in (0, 1.0)]
    return " ".join([name, value["device"], *share])


def lines(changes: dict[str, Any]) -> str:
    """The changes as JSON."""
    return json.dumps(nested(changes), indent=2)
