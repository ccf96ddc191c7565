"""Settings that an optimizer does not support: one row each. config/refusals.py has the combinations of settings alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from slipstream.config.plan import Plan
from slipstream.config.refusals import Refusal, matching
from slipstream.optim.native import Form
from slipstream.optim.onebit import all_rounds, rounds_of
from slipstream.optim.resolve import is_elementwise
from slipstream.optim.rules import Rule
from slipstream.zero.leaves import cuts_of_tensors, is_stack


class OptimizerCase:
    """A plan and the optimizer that updates its states, for the rows below. rule: its native kernel, if any. added: parameters that
    a surgery adds."""

    def __init__(self, plan: Plan, optimizer: torch.optim.Optimizer, rule: Rule | None, added: Iterable[Tensor] = ()) -> None:
        self.plan, self.offload, self.precision, self.rule = plan, plan.offload, plan.precision, rule
        self.name, self.is_late = type(optimizer).__name__, rule is not None and rule.late
        self.steps_locally = self.is_late and rounds_of(optimizer).longest > 1
        self.differing = sorted({str(rounds) for rounds in all_rounds(optimizer)}) if self.is_late else []
        given = (*(param for group in optimizer.param_groups for param in group["params"]), *added)
        params = [param for param in given if param.requires_grad]
        self.keeps_ratios = self.is_late and rule is not None and rule.is_whole
        self.has_stacks, self.has_parts = any(map(is_stack, params)), any(map(cuts_of_tensors, params))
        self.is_whole = rule.is_whole if rule is not None else not is_elementwise(optimizer)
        self.rests, self.grain = plan.experts.rest_unused, Form.of(plan).grain
        lengths = (math.prod(param.shape[1:]) for param in params if is_stack(param))
        self.uneven = next((length for length in lengths if length % self.grain), 0)
        on_cpu = not any(param.is_cuda for param in params)
        self.is_offloaded = any(
            tier == "nvme" or (tier == "cpu" and not on_cpu) for tier in (plan.offload.optimizer, plan.offload.param)
        )
        # Without masters in a wider dtype, the weights are their own masters.
        self.in_place = self.precision.param_dtype.itemsize >= self.precision.master_dtype.itemsize
        self.optimizer_is_split = self.offload.optimizer == "nvme" and self.offload.ratio < 1
        self.weights_are_split = self.offload.param == "nvme" and self.offload.max_in_cpu > 0


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda c: c.rule is None and c.offload.optimizer == "nvme",
        "offload_optimizer to disk needs a native kernel, and {c.name} with these options has none; use AdamW, Adam, Lion, LAMB, "
        "Adagrad or SGD, or keep the states in memory",
    ),
    Refusal(
        lambda c: c.rule is None and c.offload.param == "nvme" and c.in_place,
        "offload_param to disk needs a native kernel for {c.precision.param_dtype} weights, which are their own masters, and "
        "{c.name} with these options has none; use AdamW, Adam, Lion, Adagrad or SGD, or train in bf16 with fp32 masters, which "
        "stay in memory",
    ),
    Refusal(
        lambda c: c.rule is not None and c.rule.is_whole and (c.optimizer_is_split or c.weights_are_split),
        "{c.name} computes norms of whole parameters, which cannot be split between memory and disk: set "
        "offload_optimizer.ratio to 1 and offload_param.max_in_cpu to 0",
    ),
    Refusal(
        lambda c: c.precision.state_dtype is torch.int8 and (c.rule is None or not c.rule.may_be_blocks),
        '"slipstream": {{"optimizer_states": "int8"}} supports AdamW, Adam, Lion and SGD, not {c.name}',
    ),
    Refusal(
        lambda c: c.is_late and c.is_offloaded,
        "{c.name} exchanges what it makes of each rank's gradients in device memory; drop offload_optimizer and offload_param, or "
        "use AdamW",
    ),
    Refusal(
        lambda c: c.is_late and (c.precision.master_dtype is not torch.float32 or c.precision.state_dtype is not torch.float32),
        "{c.name} needs masters and states in fp32, not {c.precision.master_dtype} and {c.precision.state_dtype}; drop the options "
        "that make them smaller, or use AdamW",
    ),
    Refusal(
        lambda c: c.is_late and c.plan.zero.shard_size is not None,
        "{c.name} exchanges signs over all data-parallel ranks, not within groups: drop zero_optimization.mics_shard_size, or use "
        "AdamW",
    ),
    Refusal(
        lambda c: len(c.differing) > 1,
        "the groups of {c.name} change to signs in different steps ({c.differing}), and all ranks' units change in one: give all "
        "groups the same freeze_step (var_freeze_step, ...), and non_freeze: true to those that shall never be compressed",
    ),
    Refusal(
        lambda c: c.steps_locally and c.plan.zero.stage > 0,
        "{c.name} takes local steps, for which each rank needs its own masters of all parameters, but stage {c.plan.zero.stage} "
        "shards them: set optimizer.params.local_step_clipper to 1, or zero_optimization.stage to 0",
    ),
    Refusal(
        lambda c: c.steps_locally and c.plan.zero.compares_weights,
        "{c.name} takes local steps, after which ranks have different weights, and zero_optimization.enable_sanity_checks compares "
        "them: set optimizer.params.local_step_clipper to 1, or drop enable_sanity_checks",
    ),
    Refusal(
        lambda c: c.keeps_ratios and c.has_stacks,
        "{c.name} keeps one trust ratio for each parameter, and a stack of experts needs one for each expert: use Lamb or "
        "OneBitAdam",
    ),
    Refusal(
        lambda c: c.keeps_ratios and c.has_parts,
        "{c.name} keeps one trust ratio for each parameter, and some parameters are parts of wholes on other ranks (tensor "
        "parallelism, an mpu or experts): use Lamb or OneBitAdam",
    ),
    Refusal(
        lambda c: c.is_whole and c.has_parts and c.is_offloaded,
        "{c.name} needs whole parameters, and some are parts of wholes on other ranks, which cannot be joined while their states "
        "are on the host or on disk: drop offload_optimizer and offload_param, or use AdamW",
    ),
    Refusal(
        lambda c: c.is_late and c.plan.local_steps.every > 0,
        "{c.name} exchanges signs in every step, and slipstream.local_steps lets replicas train on their own; drop local_steps, or "
        "use AdamW",
    ),
    Refusal(
        lambda c: c.is_late and c.plan.noise_every > 0,
        "slipstream.noise_scale_every and adaptive_batch need the norm of the mean gradient, which {c.name} does not compute; drop "
        "them, or use AdamW",
    ),
    Refusal(
        lambda c: c.rule is None and c.rests and c.has_stacks,
        "slipstream.rest_unused_experts needs a native kernel for stacks of experts, and {c.name} with these options has none: it "
        "would step a whole stack; use AdamW, Adam, Lion, LAMB, Adagrad or SGD, or drop the key",
    ),
    Refusal(
        lambda c: c.rests and c.uneven,
        "slipstream.rest_unused_experts: some experts have tensors of {c.uneven} elements, and the states are rounded by {c.grain} "
        "elements: drop slipstream.optimizer_states, slipstream.stochastic_rounding or rest_unused_experts",
    ),
    Refusal(
        lambda c: c.is_late and c.rests,
        "{c.name} exchanges what it makes of the gradients of all experts in every step, so none rests: use AdamW, or drop "
        "slipstream.rest_unused_experts",
    ),
    Refusal(
        lambda c: c.rule is None and c.precision.stochastic_rounding,
        '"slipstream": {{"stochastic_rounding": true}} needs an optimizer with a native kernel (AdamW, Adam, Lion, Adagrad, SGD), '
        "and {c.name} with these options has none",
    ),
)


def refuse(plan: Plan, optimizer: torch.optim.Optimizer, rule: Rule | None, added: Iterable[Tensor] = ()) -> None:
    """Raise ValueError if the optimizer does not support a setting of the plan. added: its further parameters."""
    for text in matching(REFUSALS, OptimizerCase(plan, optimizer, rule, added)):
        raise ValueError(text)
