"""`slipstream plan`: print the resolved configuration with the source of each value, and estimate its memory and time.

For a model (`--model`): peak memory, traffic and time per step (predict.py), and the configurations that fit a memory budget
(propose.py). For a number of parameters (`--num-params`): only the model states (weights, gradients, optimizer), per stage:

    stage 0   (w + g + o) P
    stage 1   (w + g) P + o P/N
    stage 2   w P + (g + o) P/N
    stage 3   (w + g + o) P/N      (and, while running, the full weights and gradients of two units)

with P parameters, N ranks per shard group (`mics_shard_size`, or all data-parallel ranks), and w, g, o the bytes per parameter of
weights, of stored gradients and of the optimizer (one or two moments, and a master copy if the weights have another dtype).
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from slipstream.config.plan import ModelFacts, Plan

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_RATES = ("flops", "memory", "wire", "host", "disk_read", "disk_write")
_MAX_PROPOSALS = 4
_STATES = ("weights", "gradients", "optimizer")
_WITHOUT_RANKS, _WITH_RANKS = ("config", "activations", "all", "batch", "batch_shape", "disk"), ("draw", "sequences")  # only


def parse_count(text: str, option: str = "--num_params ") -> int:
    """Parse a number such as `7e9`, `1.3B`, `350M` or `46_300_000`. Raises ValueError, which names `option`."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]*)?(?:e[0-9]+)?)([kmbgt]?)", text.strip().lower())
    number = float(match[1]) * _UNITS[match[2]] if match else 0
    if not 0.5 < number < float("inf"):
        raise ValueError(f"{option}{text!r} is not a number above 0; write 7e9, 1.3B or 350M")
    return round(number)


def state_nbytes(plan: Plan, num_params: int, world: int) -> dict[str, int]:
    """Bytes per rank of weights, gradients and optimizer. Assumes AdamW if the config has no optimizer."""
    import torch

    from slipstream.train.planning import explain, predict

    # as many parameters as ranks, because some optimizers take whole ones
    params = [torch.nn.Parameter(torch.empty(-(-num_params // world), device="meta")) for _ in range(world)]
    parts = explain.parts_of(torch.nn.ParameterList(params), plan, world)
    lines = predict.Forecast.of(parts, explain.setting_of(plan, world, "cpu")).rest
    return {state: sum(line.nbytes for line in lines if line.state == state) for state in _STATES}


def _size(nbytes: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"


def sizes_text(plan: Plan, num_params: int, world: int) -> str:
    """A table of the model states at all four stages, with the configured one marked."""
    shards = plan.zero.shard_size or world
    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    by_stage = [state_nbytes(replace(plan, zero=replace(plan.zero, stage=stage)), num_params, world) for stage in stages]
    sizes = ", ".join(f"{state} {nbytes / num_params:.4g}" for state, nbytes in by_stage[0].items())
    optimizer = plan.optimizer.type if plan.optimizer else "AdamW, since the config has no optimizer"
    lines = [
        f"model states per rank: {num_params:,} parameters, sharded over {shards} ranks",
        f"bytes per parameter: {sizes} ({optimizer})",
        "",
        f"  {'stage':<8}" + "".join(f"{name:>12}" for name in (*_STATES, "total")),
    ]
    for stage, states in enumerate(by_stage):
        mark = "->" if stage == plan.zero.stage else "  "
        lines.append(f"{mark}{stage:<8}" + "".join(f"{_size(nbytes):>12}" for nbytes in (*states.values(), sum(states.values()))))
    lines += ["", "Not included: activations, buckets and, at stage 3, gathered units."]
    return "\n".join(lines)


def load(option: str, target: str) -> Any:
    """Import the function of MODULE:FUNCTION. Raises ValueError, which names `option`."""
    name, colon, function = target.partition(":")
    if not colon or not name or not function:
        raise ValueError(f"{option} {target!r} is not MODULE:FUNCTION, such as train:build_model")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(name), function)
    except ModuleNotFoundError as error:
        raise ValueError(f"{option} {target}: {error} in this folder or on Python's path") from None
    except AttributeError:
        raise ValueError(f"{option} {target}: module {name} has no {function}") from None


def build_on_meta(target: str) -> torch.nn.Module:
    """Build the model of MODULE:FUNCTION or of a Hugging Face config on the meta device. Raises ValueError if that fails."""
    import torch

    folder = Path(target)
    if ":" in target:
        with torch.device("meta"):
            model = load("--model", target)()
    elif not (folder / "config.json").is_file():
        raise ValueError(
            f"--model {target!r} is neither MODULE:FUNCTION, such as train:build_model, nor a folder with a config.json"
        )
    else:
        from slipstream.config import huggingface
        from slipstream.world.extras import needs

        with needs(f"--model {target}", extra="hf"):
            from transformers import AutoConfig, AutoModelForCausalLM
        huggingface.read_config(folder / "config.json")
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target, local_files_only=True))
        except Exception as error:  # transformers does not document what it raises for an invalid configuration
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"--model {target}: transformers cannot build it: {reason:.300}") from error
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"--model {target} returned {type(model).__name__}; it must return a torch.nn.Module")
    return model


def shapes_of(option: str) -> list[list[int]]:
    """Parse --batch-shape: `2x128` or `2x128,2x128`. Raises ValueError."""
    for text in option.split(","):
        if not re.fullmatch(r"[1-9][0-9]{0,15}(x[1-9][0-9]{0,15})*", text):
            raise ValueError(f"--batch-shape {text!r} is not a shape of token ids; write 2x128, or 2x128,2x128 for two arguments")
    return [[int(number) for number in text.split("x")] for text in option.split(",")]


def batch_of(options: argparse.Namespace, plan: Plan) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The model's arguments in one micro-batch: those of --batch, or of --batch-shape with the config's micro-batch size as rows;
    None without both."""
    import torch

    if options.batch:
        batch = load("--batch", options.batch)()
        if isinstance(batch, Mapping):
            return (), dict(batch)
        return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}
    if not options.batch_shape:
        return None
    shapes = [[plan.batch.micro_batch_size, *dims] for _, *dims in shapes_of(options.batch_shape)]
    tokens = [torch.empty(shape, dtype=torch.int64, device="meta") for shape in shapes]
    if ":" not in options.model:  # transformers' models compute their own loss
        return (), {"input_ids": tokens[0], "labels": tokens[-1]}
    return tuple(tokens), {}


def facts(device: str | None, rows: int | None = None) -> ModelFacts:
    """The facts that `resolve` needs when there is no model; the default device is this host's.

    rows: of the example batch, used as the micro-batch size if the config sets none
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
    """Parse --rate: `flops=20T`, `wire=1.2G`. Raises ValueError."""
    rates = {}
    for text in stated:
        name, equals, value = text.partition("=")
        if not equals or name not in _RATES:
            raise ValueError(f"--rate {text!r} is not NAME=NUMBER, such as wire=1.2G; names are {', '.join(_RATES)}")
        rates[name] = float(parse_count(value, f"--rate {name}="))
    return rates


def _check_ranks(options: argparse.Namespace) -> None:
    """Reject options that have no effect with --ranks, or without it."""
    if idle := [name for name in (_WITHOUT_RANKS if options.ranks else _WITH_RANKS) if getattr(options, name)]:
        name = "the config" if idle[0] == "config" else f"--{idle[0].replace('_', '-')}"
        raise ValueError(f"{name} has no effect {'with' if options.ranks else 'without'} --ranks: leave it out")


def execute(options: argparse.Namespace) -> int:
    _check_ranks(options)
    if options.ranks:
        return compare_layouts(options)
    if options.config is None:
        raise ValueError("give a config, or --ranks with --model to compare layouts")
    from slipstream.config import DataWorld, describe, resolve
    from slipstream.config.arguments import read_config
    from slipstream.config.resolution import DEEPSPEEDS, WorldError
    from slipstream.train import recipe

    loaded = read_config(options.config)
    rows = shapes_of(options.batch_shape)[0][0] if options.batch_shape else None
    try:
        plan = resolve(loaded.raw, world=DataWorld(ranks=options.world), facts=facts(options.device, rows))
    except WorldError as error:
        hint = f"pass --world {error.fits}, which fits the config: " if error.fits else ""
        raise ValueError(f"{hint}{str(error).removeprefix(DEEPSPEEDS)}") from None
    recipe.rehearse(plan)
    if not options.json:
        print(describe(plan, defaults=options.all))
        if rows not in (None, plan.batch.micro_batch_size):
            print(f"note: --batch-shape has {rows} rows; using the config's micro-batch size, {plan.batch.micro_batch_size}")
        print("".join(f"note: {note}\n" for note in loaded.notes))
    if (options.model or options.num_params) and plan.mesh.model_size * plan.experts.size > 1:
        return _cost_of_parts(options, plan)
    return _forecast(options, plan) if options.model else _sizes(options, plan)


def _sizes(options: argparse.Namespace, plan: Plan) -> int:
    """Print the bytes per rank for a number of parameters. Rejects options that need a model."""
    for option in ("memory", "batch_shape", "batch", "activations", "json"):
        if getattr(options, option):
            name = option.replace("_", "-")
            raise ValueError(f"--{name} needs a model; give --model MODULE:FUNCTION or --model FOLDER with a config.json")
    if options.num_params:
        print(sizes_text(plan, parse_count(options.num_params), options.world))
    else:
        print("for bytes per rank, give --model MODULE:FUNCTION, --model FOLDER with a config.json, or --num-params 1.3B")
    return 0


def _cost_of_parts(options: argparse.Namespace, plan: Plan) -> int:
    """Print time and memory, by the layouts' model, of a plan whose ranks hold parts of a decoder or of its samples."""
    from slipstream.parallel import layouts

    if not options.model or plan.experts.size > 1 or options.memory or options.batch or options.activations:
        raise ValueError(
            f"the config splits the model or its samples over ranks (pp {plan.mesh.pp}, sp {plan.mesh.sp}, tp {plan.mesh.tp}, "
            f"experts over {plan.experts.size}): --model and --length are needed, and experts over ranks, --num-params, --memory, "
            f"--batch and --activations not served for such a config; slipstream plan --ranks {options.world} --model M compares "
            "layouts, and engine.explain() tells the bytes of a rank"
        )
    layout = layouts.layout_of(plan, options.world)
    if options.batch_shape:
        options.length = shapes_of(options.batch_shape)[0][-1]
    model, cluster = _setting(options, options.world, plan.batch.train_batch_size)
    cluster = replace(cluster, element=plan.precision.param_dtype.itemsize)
    cost = layouts.cost_of(model, cluster, layout)
    if options.json:
        row = {"layout": layout._asdict(), "cost": cost._asdict(), "seconds": cost.seconds}
        print(json.dumps({"parameters": model.num_params} | row))
        return 0
    print(f"{_described(options, model, cluster)}\n\n{layouts.table(model, cluster, [(layout, cost)])}")
    print("seconds of a step, by part; GB of the fullest rank, with states and activations on its device")
    return 0


def _setting(options: argparse.Namespace, ranks: int, batch: int) -> tuple[Any, Any]:
    """The decoder of --model in a step of `batch` sequences, and the ranks, as the layouts' model takes them."""
    from slipstream.parallel import layouts
    from slipstream.train.planning import calibrate

    if ranks < 1 or ranks % options.hosts:
        raise ValueError(f"{ranks} ranks on --hosts {options.hosts}: hosts have equal numbers of ranks")
    rates = calibrate.rates("bfloat16", options.device or facts(None).device_type, None, rates_of(options.rate))
    between = parse_count(options.bandwidth, "--bandwidth ") / 8 if options.bandwidth else rates.wire
    memory = options.memory or float("inf")
    cluster = layouts.Cluster(
        ranks=ranks, hosts=options.hosts, flops=rates.flops, inside=rates.wire, between=between, memory=memory
    )
    return layouts.decoder_of(build_on_meta(options.model), options.length, batch, options.heads), cluster


def _described(options: argparse.Namespace, model: Any, cluster: Any) -> str:
    return (
        f"{model.num_params:,} parameters, {model.batch} sequences of {model.length} tokens a step; {cluster.ranks} ranks on "
        f"{options.hosts} hosts, {cluster.flops / 1e12:.3g} TFLOP/s and {cluster.inside / 1e9:.3g} GB/s a rank, "
        f"{cluster.between / 1e9:.3g} GB/s a host"
    )


def compare_layouts(options: argparse.Namespace) -> int:
    """Print the layouts of `--ranks` ranks by step time, the config of the fastest, and its drawing."""
    from slipstream.parallel import layouts

    if not options.model:
        raise ValueError("--ranks needs --model: MODULE:FUNCTION, or a folder with a Hugging Face config.json")
    counts = [parse_count(text, "--ranks ") for text in options.ranks.split(",")]
    ranks = counts[0]
    if ranks < 1 or ranks % options.hosts or any(count % ranks for count in counts):
        raise ValueError(
            f"--ranks {options.ranks} --hosts {options.hosts}: hosts have equal numbers of ranks, and further numbers are "
            "multiples of the first"
        )
    model, cluster = _setting(options, ranks, options.sequences or 4 * ranks)
    ranking = layouts.ranked(model, cluster)
    if options.json:
        rows = [{"layout": each._asdict(), "cost": cost._asdict(), "seconds": cost.seconds} for each, cost in ranking]
        print(json.dumps({"parameters": model.num_params, "layouts": rows}))
        return 0 if ranking else 1
    print(f"{_described(options, model, cluster)}\n")
    if len(counts) > 1:
        print(layouts.scaling_table(model, cluster, layouts.weak_scaling(model, cluster, counts)))
        return 0
    print(layouts.table(model, cluster, ranking))
    if ranking:
        print(f"\nseconds of a step, by part; config of the first:\n{json.dumps(layouts.settings(ranking[0][0]), indent=2)}")
    if options.draw:
        print(_drawn(options.draw, [layout for layout, _ in ranking], model.batch))
    return 0 if ranking else 1


def _drawn(form: str, ranking: Sequence[Any], batch: int) -> str:
    """Draw the pipeline of the first layout that has stages."""
    from slipstream.parallel import drawing, schedule

    layout = next((layout for layout in ranking if layout.pp > 1), None)
    if layout is None:
        raise ValueError("--draw: no layout that fits has pipeline stages")
    micros = min(batch // (layout.dp * layout.micro_batch), 16)  # more do not fit on a page
    drawn = schedule.simulate(layout.pp, micros, schedule.style_of(layout.schedule, layout.chunks), layout.chunks)
    return drawing.draw_svg(drawn) if form == "svg" else drawing.draw_text(drawn)


def _forecast(options: argparse.Namespace, plan: Plan) -> int:
    """Print the forecast of a model and, with a memory budget, the configurations that fit it."""
    from slipstream.ops import matmul
    from slipstream.train.planning import calibrate, explain, predict, propose

    model = build_on_meta(options.model)
    device = options.device or facts(None).device_type
    folder = options.disk or plan.offload.optimizer_path or plan.offload.param_path
    explain.mark(model, plan)
    parts = explain.parts_of(model, plan, options.world)
    profile_of = _profiles(options, plan, model, parts)
    rates = profile = None
    if profile_of is not None:
        profile = profile_of(plan.activations.way == "recompute", plan.batch.micro_batch_size)
        matmul.use(plan.products == "fastest")  # measure the rate of the engine's products
        rates = calibrate.rates(profile.dtype, device, folder, rates_of(options.rate))
    forecast = predict.Forecast.of(parts, explain.setting_of(plan, options.world, device), profile, rates)
    proposals: list[propose.Proposal] | propose.Least | None = None
    if profile_of is None and (idle := [f"--{name}" for name in ("memory", "rate") if getattr(options, name)]):
        raise ValueError(f"{idle[0]} needs the size of the activations; give --batch-shape 2x128, --batch or --activations 300M")
    if options.memory and profile_of is not None and rates is not None:
        tried = propose.survey(model, plan, options.world, device, folder, rates, profile_of, options.memory)
        proposals = propose.choose(tried, options.memory)
    _print_forecast(options, sum(parameter.numel() for parameter in model.parameters()), forecast, proposals)
    return 1 if isinstance(proposals, propose.Least) else 0


def _print_forecast(options: argparse.Namespace, num_params: int, forecast: Any, proposals: Any) -> None:
    """proposals: the configurations that fit, or the least memory that any needs, or None without a memory budget."""
    from slipstream.train.planning import explain, propose

    if options.json:
        fitting = proposals[:_MAX_PROPOSALS] if isinstance(proposals, list) else []
        rows = [{"changes": proposal.changes, **explain.as_dict(proposal.forecast)} for proposal in fitting]
        print(json.dumps({"parameters": num_params, **explain.as_dict(forecast), "proposals": rows}))
        return
    print(f"{num_params:,} parameters\n\n{explain.table(forecast)}")
    if options.activations:
        print("\nThe model was not run: activations are those given, and compute time is not included.")
    if proposals is not None:
        print(f"\n{propose.table(proposals, options.memory, _MAX_PROPOSALS)}")


def _profiles(
    options: argparse.Namespace, plan: Plan, model: torch.nn.Module, parts: Sequence[Any]
) -> Callable[[bool, int], Any] | None:
    """Return the function (recompute, micro-batch size) -> profile, from the example batch or --activations; None without both."""
    if options.activations:
        from slipstream.train.planning import predict

        return lambda recompute, size: predict.stated(parts, options.activations * size // plan.batch.micro_batch_size)
    batch = batch_of(options, plan)
    if batch is None:
        return None
    from slipstream.train.planning import dry_run

    return dry_run.profiles(model, plan, options.world, *batch)
