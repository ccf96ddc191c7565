"""`slipstream plan`: the resolved configuration with the source of each value, and the bytes per rank it will take.

The bytes are those of the model states alone (weights, gradients, optimizer), per stage:

    stage 0   (w + g + o) P
    stage 1   (w + g) P + o P/N
    stage 2   w P + (g + o) P/N
    stage 3   (w + g + o) P/N      (and, while it runs, two units in full: weights and gradients)

with P parameters, N ranks among which the states are cut (`mics_shard_size`, or all data-parallel ranks), and w, g, o the
bytes per parameter of weights, of gradients as they are kept, and of the optimizer (a master copy where weights are not in its
dtype, and one or two moments).
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from slipstream.config.plan import ModelFacts, Plan

__all__ = ["StateBytes", "execute", "parse_count", "per_parameter", "per_rank", "sizes_text"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
# Full-size moments of each optimizer, by lower-case name; those that are not listed have Adam's two.
_MOMENTS = {"sgd": 0, "lion": 1, "adagrad": 1, "muon": 1, "rmsprop": 1, "adafactor": 0, "rprop": 2}


class StateBytes(NamedTuple):
    weights: float
    grads: float
    optim: float

    @property
    def total(self) -> float:
        return self.weights + self.grads + self.optim


def parse_count(text: str) -> int:
    """`7e9`, `1.3B`, `350M`, `46_300_000` -> a number of parameters."""
    found = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]*)?(?:e[0-9]+)?)([kmbgt]?)", text.strip().lower())
    if found is None:
        raise ValueError(f"--num_params {text!r} is not a number; write 7e9, 1.3B or 350M")
    return round(float(found[1]) * _UNITS[found[2]])


def _num_moments(plan: Plan) -> int | None:
    """Moments of the configured optimizer; None without one."""
    if plan.optimizer is None:
        return None
    name = plan.optimizer.type.lower()
    if name == "sgd":
        return 1 if plan.optimizer.params.get("momentum") else 0
    return _MOMENTS.get(name, 2)


def per_parameter(plan: Plan) -> StateBytes:
    """Bytes per parameter and copy of each state. Without an optimizer in the config: AdamW's."""
    import torch

    precision = plan.precision
    grad_dtype = precision.grad_accum_dtype
    if grad_dtype is None:
        grad_dtype = precision.param_dtype if plan.batch.accumulation == 1 else torch.float32
    master = 0 if precision.master_dtype is precision.param_dtype else precision.master_dtype.itemsize
    moments = _num_moments(plan)
    states = precision.state_dtype.itemsize * (2 if moments is None else moments)
    return StateBytes(precision.param_dtype.itemsize, grad_dtype.itemsize, master + states)


def per_rank(stage: int, each: StateBytes, num_params: int, num_shards: int) -> StateBytes:
    """Bytes of each state on one rank; stage s cuts the last s of (weights, grads, optim)."""
    cut = [1 / num_shards if stage > 2 - index else 1.0 for index in range(3)]
    return StateBytes(*(size * num_params * share for size, share in zip(each, cut, strict=True)))


def _size(nbytes: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"


def sizes_text(plan: Plan, num_params: int, world: int) -> str:
    """A table of the four stages, the configured one marked."""
    each = per_parameter(plan)
    shards = plan.zero.shard_size or world
    by = plan.optimizer.type if plan.optimizer else "AdamW, as the config names no optimizer"
    lines = [
        f"model states per rank: {num_params:,} parameters, states cut in {shards}",
        f"bytes per parameter: weights {each.weights:g}, gradients {each.grads:g}, optimizer {each.optim:g} "
        f"({by})",
        "",
        f"  {'stage':<8}{'weights':>12}{'gradients':>12}{'optimizer':>12}{'total':>12}",
    ]
    for stage in range(4):
        sizes = per_rank(stage, each, num_params, shards)
        mark = "->" if stage == plan.zero.stage else "  "
        cells = "".join(f"{_size(size):>12}" for size in (*sizes, sizes.total))
        lines.append(f"{mark}{stage:<8}{cells}")
    lines.append("")
    lines.append("Activations, buckets and, at stage 3, the units in use come on top.")
    return "\n".join(lines)


def build_on_meta(where: str) -> torch.nn.Module:
    """The module that `MODULE:FUNCTION` returns, without memory for its parameters."""
    import torch

    name, colon, function = where.partition(":")
    if not colon or not name or not function:
        raise ValueError(f"--model {where!r} is not MODULE:FUNCTION, such as train:build_model")
    sys.path.insert(0, str(Path.cwd()))
    try:
        build = getattr(importlib.import_module(name), function)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--model {where}: {error}; it is looked for here and where Python finds modules"
        ) from None
    except AttributeError:
        raise ValueError(f"--model {where}: module {name} has no {function}") from None
    with torch.device("meta"):
        model = build()
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"--model {where} returned {type(model).__name__}; it has to return a torch.nn.Module"
        )
    return model


def facts(device: str | None) -> ModelFacts:
    """What is known without `initialize`; the device is this host's unless another is named."""
    import torch

    from slipstream.config.plan import ModelFacts

    device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return ModelFacts(
        device_type=device_type,
        supports_bf16=device_type == "cpu" or not torch.cuda.is_available() or torch.cuda.is_bf16_supported(),
    )


def execute(options: argparse.Namespace) -> int:
    from slipstream.config import DataWorld, describe, resolve
    from slipstream.config.arguments import load_config
    from slipstream.train import rehearse

    num_params = parse_count(options.num_params) if options.num_params else 0
    if options.model:
        num_params = sum(parameter.numel() for parameter in build_on_meta(options.model).parameters())
    plan = resolve(
        load_config(options.config),
        world=DataWorld(data_parallel=options.world),
        facts=facts(options.device),
    )
    rehearse(plan)
    print(describe(plan))
    if num_params:
        print(f"\n{sizes_text(plan, num_params, options.world)}")
    else:
        print("\nbytes per rank: give --num_params 1.3B or --model MODULE:FUNCTION")
    return 0
