"""The leg `adapters`: requests with eight different LoRA adapters in one batch, over the same without: vLLM, and the floor.

The adapters are random, in PEFT's files: of rank 16 on all matrices of the layers, and of PEFT's default, rank 8 on the queries and
values. The floor is the weights, those of the adapters included, read once per token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdicts
from benchmarks.serving import models, traces
from benchmarks.serving.contenders import OURS, VLLM, Contender
from benchmarks.serving.measure import MODEL, Run, absent, contenders_table, interleaved, judged, ratios, warm
from benchmarks.serving.systems import adapter_folder

COUNT, ROUNDS, OUTPUTS = 8, 5, 64
FORMS = {"all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), "qv": ("q_proj", "v_proj")}
RANKS = {"all": 16, "qv": 8}


def with_adapters(contender: Contender, form: str) -> Contender:
    return replace(contender, extra=(("adapters", form),))


def prepare(folder: Path) -> None:
    """Write the adapters of all forms into `folder`, if they are not there."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(folder / "hf" / "model.safetensors", "pt") as file:
        names = [name.removesuffix(".weight") for name in file.keys() if "_proj" in name]  # noqa: SIM118 (not a mapping)
        shapes = {name: file.get_slice(f"{name}.weight").get_shape() for name in names}
    for form, targets in FORMS.items():
        for number in range(COUNT):
            to, random, rank = adapter_folder(folder, form, number), torch.Generator().manual_seed(number), RANKS[form]
            if (to / "adapter_config.json").exists():
                continue
            to.mkdir(parents=True, exist_ok=True)
            state: dict[str, torch.Tensor] = {}
            for name, (out, features) in shapes.items():
                if name.endswith(targets):  # terms that are small beside the model's products
                    a = torch.randn(rank, features, generator=random) * features**-0.5
                    b = torch.randn(out, rank, generator=random) * 0.02
                    state |= {f"base_model.model.{name}.lora_{kind}.weight": one.bfloat16() for kind, one in (("A", a), ("B", b))}
            save_file(state, to / "adapter_model.safetensors")
            settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
            (to / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": [*targets]}))


def nbytes(folder: Path, form: str) -> int:
    """Of the adapters of a form, together."""
    return sum((adapter_folder(folder, form, number) / "adapter_model.safetensors").stat().st_size for number in range(COUNT))


def run(options: Options) -> str:
    run = Run.of(options, ROUNDS, models.prepare(models.FOLDER))
    prepare(run.models)
    return measure(run)


def measure(run: Run) -> str:
    outputs = 16 if run.quick else OUTPUTS
    kinds: dict[str, Callable[[int], traces.Trace]] = {
        f"{number} streams": partial(traces.batch, number=number, length=32, outputs=outputs) for number in (8, 32)
    }
    forms = [*FORMS]
    asked = (OURS, *(with_adapters(OURS, form) for form in forms), *(with_adapters(VLLM, form) for form in forms))
    with run.fleet() as fleet:
        for contender in run.chosen(asked):
            fleet.start(contender)
        warm(fleet)
        results = interleaved(run, fleet, kinds)
        processes = list(fleet.running.values())

    def rates(kind: str, contender: Contender) -> list[float] | None:
        return [outcome.output_rate for outcome in results[kind, contender.name]] if (kind, contender.name) in results else None

    by_form = {form: [one for one in processes if form in dict(one.contender.extra).values()] for form in forms}
    weights = run.shape.weight_bytes("bf16")
    targets, rows = [], []
    for kind in kinds:
        base = rates(kind, OURS)
        for form in forms:
            ours, peer = (rates(kind, with_adapters(one, form)) for one in (OURS, VLLM))
            missing = fleet.missing.get(with_adapters(VLLM, form).name)
            targets += [
                judged(f"{kind}, {form}: over the base alone", ratios(ours, base), 0.85),
                judged(f"{kind}, {form}: over vLLM", ratios(ours, peer, missing), 1.3),
            ]
    for process in processes:
        own = dict(process.contender.extra).get("adapters")
        share = "" if own is None else f"{weights / (weights + nbytes(run.models, own)):.2f}"
        spreads = [Spread.of(rates(kind, process.contender) or [0.0]).show(0) for kind in kinds]
        rows.append([process.contender.name, *spreads, share])
    head = ["contender", *(f"{kind}, out tok/s" for kind in kinds), "floor: weights over weights and adapters"]
    described = ", ".join(f"{form}: rank {RANKS[form]} on {len(FORMS[form])} matrices of a layer" for form in forms)
    return "\n\n".join(
        (
            f"{MODEL} {COUNT} adapters, one for each request in turn ({described}); requests of 32 + {outputs} tokens, all at "
            f"once. Median of {run.rounds} rounds (min-max).",
            table(head, [*rows, *absent(fleet)]),
            run.describe_limits(),
            *(contenders_table(own, results, with_adapters(OURS, form).name) for form, own in by_form.items()),
            verdicts(targets),
        )
    )
