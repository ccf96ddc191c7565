"""The optimizer of a plan, its schedule, and the recipe of the units that it updates; also without a model (`rehearse`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from slipstream.config import Plan
from slipstream.config.plan import INT4
from slipstream.ops import onebit, wire
from slipstream.optim import (
    Resolved,
    attention_heads,
    fit,
    is_elementwise,
    muon_groups,
    refuse_unshardable,
    resolve_optimizer,
    rule_of,
)
from slipstream.optim.muon import Muon
from slipstream.optim.native import Form
from slipstream.optim.onebit import mark_uncompressed
from slipstream.optim.rules import Rule
from slipstream.train import compiled
from slipstream.train.disk_space import tiers_of
from slipstream.train.precision import buffer_rule
from slipstream.train.schedules import build_scheduler, given_scheduler
from slipstream.zero.build import Recipe
from slipstream.zero.leaves import forget_kinds, mark_part, mark_rows
from slipstream.zero.placement import stage_placement

logger = logging.getLogger(__name__)

CODE_BITS: dict[torch.dtype | None, int] = {torch.int8: 8, INT4: 4}  # of gradients on the wire


def recipe_of(plan: Plan, inner: torch.optim.Optimizer | None, rule: Rule | None) -> Recipe:
    """The recipe of a plan's units for this optimizer (None: no optimizer) and its native rule (None: it has none)."""
    precision, states = plan.precision, Form.of(plan)
    placement = stage_placement(plan.zero.stage)
    coded = plan.zero.coded_weights or plan.zero.coded_frozen or precision.comm_dtype in CODE_BITS
    is_late = rule is not None and rule.late
    beside = (4, 4) if plan.local_steps.every else ()  # the weights of the last round, and their momentum
    if is_late and placement.grads:
        logger.info(
            "%s needs the gradients of each rank until the step, so stage %d keeps them whole",
            type(inner).__name__,
            plan.zero.stage,
        )
        placement = replace(placement, grads=False)
    return Recipe(
        placement=placement,
        weights_dtype=buffer_rule(precision).weights,
        master_dtype=precision.master_dtype,
        grads_dtype=precision.grad_accum_dtype,
        wire_dtype=None if precision.comm_dtype in CODE_BITS else precision.comm_dtype,
        accumulates=plan.accumulates,
        whole=inner is not None and (rule.is_whole if rule is not None else not is_elementwise(inner)),
        poison=plan.poison_released,
        align=onebit.BLOCK if is_late else wire.WIRE_BLOCK if coded else states.align,
        tiers=tiers_of(plan.offload),
        feedback=plan.zero.error_beta,
        coded_weights=plan.zero.coded_weights,
        coded_frozen=plan.zero.coded_frozen,
        state_itemsizes=beside if rule is None else (*beside, *(precision.state_dtype.itemsize for _ in rule.states)),
    )


def transport_of(plan: Plan, device: str) -> str:
    """Use gloo if weights in shared memory are evicted to disk, or poisoned at release: then other ranks cannot read them."""
    is_evicted = plan.offload.param == "nvme" and device == "cpu"
    return "gloo" if is_evicted or plan.poison_released else plan.zero.transport


def mark_kinds(model: nn.Module, plan: Plan, inner: torch.optim.Optimizer | None, rule: Rule | None) -> None:
    """Mark parameters whose gradients are communicated in a special way."""
    forget_kinds(model)
    if plan.zero.sends_rows:
        mark_rows(model)
    if inner is not None and rule is not None and rule.late:
        mark_uncompressed(model, inner)


def build_optimizer(
    named: Resolved | None, model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None
) -> tuple[torch.optim.Optimizer | None, Rule | None]:
    """The torch optimizer that holds the groups (`optimizer`, or the config's), and the native rule that steps it, if any."""
    params = list(model_parameters) if model_parameters is not None else None
    if params and isinstance(params[0], tuple):
        params = [param for _, param in params]
    wanted = params if params is not None else list(model.parameters())  # frozen ones too: they may be unfrozen later
    if isinstance(optimizer, str):
        raise ValueError(f'optimizer={optimizer!r}: a name goes into the config: {{"optimizer": {{"type": {optimizer!r}}}}}')
    if isinstance(optimizer, torch.optim.Optimizer):
        return _checked(optimizer, model, rule_of(optimizer))
    if optimizer is not None:
        made = optimizer(wanted)
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(f"the callable optimizer= returned a {type(made).__name__}, not a torch.optim.Optimizer")
        return _checked(made, model, rule_of(made))
    if named is None or not (wanted or any(True for _ in model.parameters())):
        return None, None
    if not wanted:
        raise ValueError(
            f"initialize(model_parameters=) is empty, and the config has an optimizer ({named.cls.__name__}): an iterator that was "
            "read before gives nothing; pass a list, or leave it out for all parameters of the model"
        )
    built = named.build(_in_muon_groups(model, wanted, named.per_head) if named.cls is Muon else wanted)
    return _checked(built, model, rule_of(built) if named.native else None)


def _in_muon_groups(model: nn.Module, wanted: Sequence[Any], per_head: bool) -> list[dict[str, Any]]:
    bare = [param for param in wanted if isinstance(param, torch.Tensor)]
    groups = [group for group in wanted if isinstance(group, Mapping)] + ([{"params": bare}] if bare else [])
    if per_head and any(group.get("use_muon") and "heads" not in group for group in groups):
        raise ValueError(
            "optimizer.params.per_head_muon divides the groups that initialize makes, and one of model_parameters= has its own "
            "use_muon: give that group heads=, or drop one of the two"
        )
    return muon_groups(model.named_parameters(remove_duplicate=False), groups, attention_heads(model) if per_head else None)


def _checked(optimizer: torch.optim.Optimizer, model: nn.Module, rule: Rule | None) -> tuple[torch.optim.Optimizer, Rule | None]:
    refuse_unshardable(optimizer)
    if any(param.dtype is torch.float64 for param in model.parameters()):
        rule = None  # the native kernels compute in fp32
    uncorrected = any(group.get("bias_correction") is False for group in optimizer.param_groups)
    if uncorrected and rule is None and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(
            f"{type(optimizer).__name__} with bias_correction=false needs the native kernel, which does not support float64 "
            f"parameters; make the model float32, or drop the option"
        )
    of_model = {id(param) for param in model.parameters()}
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in of_model:
                raise ValueError(
                    f"optimizer group {i} holds a parameter of shape {tuple(param.shape)} that is not the model's; create the "
                    f"optimizer after the model has its final parameters"
                )
    return optimizer, rule


def warn_of_frozen(optimizer: torch.optim.Optimizer | None) -> None:
    """A warning, not an error: a surgery can add adapters, and the training loop can unfreeze parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]] if optimizer is not None else []
    if optimizer is not None and not any(param.requires_grad for param in params):
        logger.warning(
            "none of the %d parameters of %s requires a gradient, so engine.step() will change nothing: call requires_grad_(True) "
            "on the parameters to train, add adapters in `with engine.surgery():`, or build the engine without an optimizer",
            len(params),
            type(optimizer).__name__,
        )


def scheduler_of(plan: Plan, lr_scheduler: Any, inner: torch.optim.Optimizer | None) -> Any:
    if lr_scheduler is None and plan.scheduler is None:
        return None
    if inner is None:
        name = "lr_scheduler=" if plan.scheduler is None else f"the config's scheduler ({plan.scheduler.type})"
        raise ValueError(f"{name} has no optimizer; pass one as optimizer= or set it in the config, or drop the scheduler")
    if lr_scheduler is None and plan.scheduler is not None:
        return build_scheduler(plan.scheduler.type, plan.scheduler.params, inner)
    return given_scheduler(lr_scheduler, inner)


def rehearse(plan: Plan) -> tuple[torch.optim.Optimizer | None, Rule | None]:
    """Build the plan's optimizer and scheduler over a one-layer model; raises ValueError if `initialize` would refuse it."""
    compiled.check(plan.compile)
    model = torch.nn.Linear(1, 1)
    if plan.mesh.tp > 1:
        mark_part(next(model.parameters()), "tp", plan.mesh.tp)  # some of the model's weights will be parts
    named = resolve_optimizer(plan.optimizer.type, plan.optimizer.params) if plan.optimizer else None
    inner, rule = build_optimizer(named._replace(per_head=False) if named else None, model, None, None)
    if inner is not None:
        fit.refuse(plan, inner, rule)
    if plan.scheduler is not None and None in plan.scheduler.params.values():  # the training loop sets steps and rate
        numbers = {name: 1 << 30 if value is None else value for name, value in plan.scheduler.params.items()}
        build_scheduler(plan.scheduler.type, numbers, inner or torch.optim.AdamW(model.parameters()))
    else:
        scheduler_of(plan, None, inner)
    return inner, rule
