"""The figures of each step that monitors get, and how an engine gets its monitors (observe/monitors.py).

Rank 0 alone has monitors. A step's figures are read after the step, when the verdict has already waited for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config.plan import Plan, describe
from slipstream.moe import expert_loads
from slipstream.observe import report
from slipstream.observe.monitors import check_packages, open_monitors
from slipstream.train.engine import Engine
from slipstream.world.host import resident_nbytes

# Per weight and token: 2 in the forward, 4 in the backward, of which 2 are for the weight's own gradient (Kaplan et al.,
# arXiv:2001.08361).
FLOP_TRAINED, FLOP_FROZEN = 6, 4


def monitor(model: nn.Module, plan: Plan) -> Callable[[Engine], None] | None:
    """The `Change` (changes.py) that adds monitors to an engine. Raises ValueError for a missing package or class."""
    own = {name: block for name, block in plan.own_monitors.items() if name != "custom"}
    blocks: dict[str, Mapping[str, Any]] = {**plan.monitors, **own, **plan.own_monitors.get("custom", {})}
    if not blocks:
        return None
    check_packages(blocks)

    def connect(engine: Engine) -> None:
        if not engine.mesh.is_first:
            return
        if "report" in blocks:
            blocks["report"] = {**blocks["report"], "sections": _texts(engine)}
        engine.progress.losses = []
        monitors = engine.states.resources["monitors"] = open_monitors(blocks)
        tokens = _Tokens(engine)
        engine.states.after_step.append(lambda _: monitors.write_events(_figures(engine, tokens)))

    return connect


class _Tokens:
    """Counts the tokens of this rank's forwards in a step: the elements of the model's first integer input of two dimensions,
    (samples, tokens). A model without one has no tokens."""

    def __init__(self, engine: Engine) -> None:
        self.seen = 0  # in this step, on this rank
        mesh = engine.mesh
        self.parts = mesh.batch.size * mesh.sp.size  # ranks that see different tokens
        self.weight = engine.precision.weight  # this rank's samples over the mean of all ranks
        is_whole = mesh.world.size == self.parts and not expert_loads(engine.module)  # each rank has all weights of a token
        self.flop = _flop(engine) if is_whole else 0  # per token; 0: unknown
        engine.states.before_forward(self._count, with_kwargs=True)

    def _count(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if model.training and torch.is_grad_enabled():
            for value in (kwargs.get("input_ids"), *args, *kwargs.values()):
                if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point():
                    self.seen += value.numel()
                    return

    def take(self) -> int:
        """The tokens of all ranks since the last call."""
        num_tokens, self.seen = self.seen, 0
        return round(num_tokens * self.parts / self.weight)


def _flop(engine: Engine) -> int:
    """FLOP per token of products with weights, without attention scores. Embeddings count only if they are tied to a product."""
    modules = (module for module in engine.module.modules() if not isinstance(module, nn.Embedding))
    met = {id(param) for module in modules for param in module.parameters(recurse=False)}
    return sum(
        (FLOP_TRAINED if unit.trainable else FLOP_FROZEN) * slot.numel
        for unit in engine.units
        for slot, param in zip(unit.layout.slots, unit.model_params, strict=True)
        if id(param) in met
    )


def _figures(engine: Engine, tokens: _Tokens) -> list[tuple[str, float, int]]:
    """The events of a step, by DeepSpeed's tags."""
    figures: dict[str, float | None] = {"grad_norm": engine.global_grad_norm, **engine.progress.figures()}
    if engine.optimizer is not None:
        figures["lr"] = engine.optimizer.param_groups[0]["lr"]
    if seen := tokens.take():
        figures["tokens_per_s"] = rate = seen * (figures["samples_per_s"] or 0.0) / engine.progress.samples
        if tokens.flop:
            figures["flops_per_s"] = tokens.flop * rate
    on_gpu = engine.device.type == "cuda"
    figures["memory_bytes"] = torch.cuda.max_memory_allocated(engine.device) if on_gpu else resident_nbytes()
    if engine.plan.precision.param_dtype is torch.float16:
        figures["loss_scale"] = engine.precision.loss_scale
    if engine.plan.wall_clock_breakdown:
        figures |= {f"elapsed_time_ms_{part}": 1e3 * seconds for part, seconds in engine.progress.seconds.items()}
    return [(f"Train/Samples/{name}", value, engine.global_samples) for name, value in figures.items() if value is not None]


def _texts(engine: Engine) -> dict[str, str]:
    """The text that a report shows beside the curves."""
    settings, environment = describe(engine.plan), report.as_text(report.collect())
    return {"Settings": settings, "Environment": environment, "Memory and traffic of each rank, predicted": engine.explain()}
