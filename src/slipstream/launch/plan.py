"""`slipstream plan`: the resolved configuration with the source of each value, and what it will take.

Of a model (`--model`): memory at the peak, traffic and time per step (train/predict.py), and what fits a budget (train/propose.py).
Of a number of parameters (`--num-params`): the states alone (weights, gradients, optimizer), per stage:

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
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from slipstream.config.plan import ModelFacts, Plan

__all__ = ["StateBytes", "execute", "parse_count", "per_parameter", "per_rank", "sizes_text"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_RATES = ("flops", "memory", "wire", "host", "disk_read", "disk_write")
_SHOWN = 4  # proposals


class StateBytes(NamedTuple):
    weights: float
    grads: float
    optim: float

    @property
    def total(self) -> float:
        return self.weights + self.grads + self.optim


def parse_count(text: str, option: str = "--num_params ") -> int:
    """`7e9`, `1.3B`, `350M`, `46_300_000` -> a number, of parameters for instance."""
    found = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]*)?(?:e[0-9]+)?)([kmbgt]?)", text.strip().lower())
    if found is None:
        raise ValueError(f"{option}{text!r} is not a number; write 7e9, 1.3B or 350M")
    return round(float(found[1]) * _UNITS[found[2]])


def per_parameter(plan: Plan) -> StateBytes:
    """Bytes per parameter and copy of each state. Without an optimizer in the config: AdamW's."""
    import torch

    from slipstream.train import explain

    precision = plan.precision
    grad_dtype = precision.grad_accum_dtype
    if grad_dtype is None:
        grad_dtype = precision.param_dtype if plan.batch.accumulation == 1 else torch.float32
    master = 0 if precision.master_dtype is precision.param_dtype else precision.master_dtype.itemsize
    moments = 2 if plan.optimizer is None else explain.moments_of(plan.optimizer.type, plan.optimizer.params)
    states = precision.state_dtype.itemsize * moments
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
        f"bytes per parameter: weights {each.weights:g}, gradients {each.grads:g}, optimizer {each.optim:g} ({by})",
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


def load(option: str, where: str) -> Any:
    """What MODULE:FUNCTION names."""
    name, colon, function = where.partition(":")
    if not colon or not name or not function:
        raise ValueError(f"{option} {where!r} is not MODULE:FUNCTION, such as train:build_model")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(name), function)
    except ModuleNotFoundError as error:
        raise ValueError(f"{option} {where}: {error}; it is looked for here and where Python finds modules") from None
    except AttributeError:
        raise ValueError(f"{option} {where}: module {name} has no {function}") from None


def build_on_meta(where: str) -> torch.nn.Module:
    """The module that `MODULE:FUNCTION` returns, or the causal language model of a Hugging Face config, without memory."""
    import torch

    if ":" in where or not (Path(where) / "config.json").is_file():
        if ":" not in where:
            raise ValueError(
                f"--model {where!r} is not MODULE:FUNCTION, such as train:build_model, and no folder with a config.json"
            )
        with torch.device("meta"):
            model = load("--model", where)()
    else:
        from slipstream.config import huggingface
        from slipstream.extras import needs

        with needs(f"--model {where}", extra="hf"):
            from transformers import AutoConfig, AutoModelForCausalLM
        huggingface.read_config(Path(where) / "config.json")
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(where, local_files_only=True))
        except Exception as error:  # what it raises for a configuration that is wrong is not told
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"--model {where}: transformers cannot build it: {said:.300}") from error
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"--model {where} returned {type(model).__name__}; it has to return a torch.nn.Module")
    return model


class Batch(NamedTuple):
    """What the model is called with, of one micro-batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def shapes_of(option: str) -> list[list[int]]:
    """`2x128` or `2x128,2x128`, as --batch-shape states it."""
    for text in option.split(","):
        if not re.fullmatch(r"[1-9][0-9]{0,15}(x[1-9][0-9]{0,15})*", text):
            raise ValueError(f"--batch-shape {text!r} is not a shape of token ids; write 2x128, or 2x128,2x128 for two arguments")
    return [[int(number) for number in text.split("x")] for text in option.split(",")]


def batch_of(options: argparse.Namespace, plan: Plan) -> Batch | None:
    """The example batch that the options state: token ids of the shape, in rows of the micro-batch, or a function's."""
    import torch

    if options.batch:
        found = load("--batch", options.batch)()
        if isinstance(found, Mapping):
            return Batch((), dict(found))
        return Batch(tuple(found) if isinstance(found, (tuple, list)) else (found,), {})
    if not options.batch_shape:
        return None
    shapes = [[plan.batch.micro_batch_size, *rest] for _, *rest in shapes_of(options.batch_shape)]
    tokens = [torch.empty(shape, dtype=torch.int64, device="meta") for shape in shapes]
    if ":" not in options.model:  # transformers' models compute their own loss
        return Batch((), {"input_ids": tokens[0], "labels": tokens[-1]})
    return Batch(tuple(tokens), {})


def facts(device: str | None, rows: int | None = None) -> ModelFacts:
    """What is known without `initialize`; the device is this host's unless another is named.

    rows  of the example batch: the micro-batch where the config states none
    """
    import torch

    from slipstream.config.plan import ModelFacts

    device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return ModelFacts(
        device_type=device_type,
        supports_bf16=device_type == "cpu" or not torch.cuda.is_available() or torch.cuda.is_bf16_supported(),
        loader_batch_size=rows,
        ahead=True,
    )


def rates_of(stated: Sequence[str]) -> dict[str, float]:
    """`flops=20T`, `wire=1.2G`: what --rate states."""
    found = {}
    for text in stated:
        name, equals, value = text.partition("=")
        if not equals or name not in _RATES:
            raise ValueError(f"--rate {text!r} is not NAME=NUMBER, such as wire=1.2G; names are {', '.join(_RATES)}")
        found[name] = float(parse_count(value, f"--rate {name}="))
    return found


def execute(options: argparse.Namespace) -> int:
    from slipstream.config import DataWorld, describe, resolve
    from slipstream.config.arguments import read_config
    from slipstream.train import rehearse

    loaded = read_config(options.config)
    rows = shapes_of(options.batch_shape)[0][0] if options.batch_shape else None
    plan = resolve(loaded.raw, world=DataWorld(data_parallel=options.world), facts=facts(options.device, rows))
    rehearse(plan)
    if not options.json:
        print(describe(plan, defaults=options.all))
        if rows not in (None, plan.batch.micro_batch_size):
            print(f"note: --batch-shape has {rows} rows, and is taken with {plan.batch.micro_batch_size}, the config's micro-batch")
        print("".join(f"note: {note}\n" for note in loaded.notes))
    if options.model:
        return _forecast(options, plan)
    for option in ("memory", "batch_shape", "batch", "activations", "json"):
        if getattr(options, option):
            name = option.replace("_", "-")
            raise ValueError(f"--{name} needs the model: give --model MODULE:FUNCTION or a folder with a config.json")
    if options.num_params:
        print(sizes_text(plan, parse_count(options.num_params), options.world))
    else:
        print("bytes per rank: give --model MODULE:FUNCTION, a folder with a config.json, or --num-params 1.3B")
    return 0


def _forecast(options: argparse.Namespace, plan: Plan) -> int:
    """The forecast of a model under the plan and, where there is a budget, the configurations that fit it."""
    from slipstream.train import calibrate, explain, propose

    model = build_on_meta(options.model)
    device = options.device or facts(None).device_type
    folder = options.disk or plan.offload.optimizer_path or plan.offload.param_path
    parts = explain.parts_of(model, plan, options.world)
    profile_of = _profiles(options, plan, model, parts)
    rates = profile = None
    if profile_of is not None:
        profile = profile_of(plan.activations.way == "recompute", plan.batch.micro_batch_size)
        rates = calibrate.rates(profile.dtype, device, folder, rates_of(options.rate))
    forecast = explain.Forecast(parts=parts, setting=explain.setting_of(plan, options.world, device), profile=profile, rates=rates)
    found: list[propose.Proposal] | propose.Least | None = None
    if options.memory:
        if profile_of is None or rates is None:
            raise ValueError("--memory needs to know the activations: give --batch-shape 2x128, --batch or --activations 300M")
        found = propose.propose(model, plan, options.world, device, folder, options.memory, rates, profile_of)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    if options.json:
        fitting = found[:_SHOWN] if isinstance(found, list) else []
        print(
            json.dumps(
                {
                    "parameters": num_params,
                    **explain.as_dict(forecast),
                    "proposals": [{"changes": each.changes, **explain.as_dict(each.forecast)} for each in fitting],
                }
            )
        )
    else:
        print(f"{num_params:,} parameters\n\n{explain.table(forecast)}")
        if options.activations:
            print("\nThe model was not run: its activations are those stated, and no time is counted for compute.")
        if found is not None:
            print(f"\n{propose.table(found, options.memory, _SHOWN)}")
    return 1 if isinstance(found, propose.Least) else 0


def _profiles(
    options: argparse.Namespace, plan: Plan, model: torch.nn.Module, parts: Sequence[Any]
) -> Callable[[bool, int], Any] | None:
    """What a micro-batch takes, by (recompute, size): from an example, or as stated."""
    if options.activations:
        from slipstream.train import predict

        return lambda recompute, size: predict.stated(parts, options.activations * size // plan.batch.micro_batch_size)
    batch = batch_of(options, plan)
    if batch is None:
        return None
    from slipstream.train import dry_run

    return dry_run.profiles(model, plan, options.world, batch.args, batch.kwargs)
