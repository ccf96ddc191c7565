"""The leg `gpt2`: tokens per second of a GPT-2 of 124 million weights, whose kernels are not Llama's: vLLM and the read bandwidth.

Its weights are random, and it has 2,048 positions, as many as the other legs use; there is no vocabulary, for nothing turns tokens
into text. With `--before FOLDER`, ours of that checkout runs too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdicts
from benchmarks.serving import traces
from benchmarks.serving.contenders import BEFORE, BEST, INT8, OURS, VLLM, Contender
from benchmarks.serving.limits import Shape
from benchmarks.serving.measure import Run, absent, contenders_table, interleaved, judged, ratios, warm
from benchmarks.serving.systems import CONTEXT
from benchmarks.worker import ROOT

FOLDER = ROOT / "runs" / "bench-gpt2"
WIDTH, LAYERS, VOCABULARY = 768, 12, 50257
ROUNDS = 3


def prepare(folder: Path) -> Path:
    """The model's folder, made if it is not complete. The file `complete` is written last."""
    if not (folder / "complete").exists():
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        print(f"writing a random GPT-2 into {folder} ...", flush=True)
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(n_positions=CONTEXT, bos_token_id=None, eos_token_id=None))
        model.bfloat16().save_pretrained(folder / "hf")
        (folder / "complete").touch()
    return folder


def run(options: Options) -> str:
    shape = Shape(LAYERS * 12 * WIDTH * WIDTH, WIDTH * VOCABULARY, 4 * WIDTH * LAYERS, 4 * WIDTH * LAYERS)
    return measure(Run.of(options, ROUNDS, prepare(FOLDER), shape))


def measure(run: Run) -> str:
    other = replace(VLLM, precision="bf16" if BEST == "fp32" else "fp32")
    outputs = 16 if run.quick else 128
    kinds: dict[str, Callable[[int], traces.Trace]] = {
        "single stream": partial(traces.batch, number=1, length=32, outputs=outputs),
        "batch 16": partial(traces.batch, number=16, length=32, outputs=outputs // 2),
    }
    with run.fleet() as fleet:
        for contender in run.chosen((OURS, INT8, *(BEFORE.values() if run.before else ()), VLLM, other)):
            fleet.start(contender)
        warm(fleet)
        results = interleaved(run, fleet, kinds)
        processes = list(fleet.running.values())
    alone = {name: [outcome.stream_rate for outcome in each] for (kind, name), each in results.items() if kind == "single stream"}
    many = {name: [outcome.output_rate for outcome in each] for (kind, name), each in results.items() if kind != "single stream"}

    def share(contender: Contender) -> list[float]:
        """Of the read bandwidth that was measured in the same round."""
        nbytes = run.shape.weight_bytes(contender.precision)
        return [rate * nbytes / limits.read for rate, limits in zip(alone[contender.name], run.limits, strict=True)]

    def over_vllm(rates: dict[str, list[float]]) -> list[float] | str:
        peers = [rates[one.name] for one in (VLLM, other) if one.name in rates]
        best = [max(values) for values in zip(*peers, strict=True)]
        return ratios(rates.get(OURS.name), best, fleet.missing.get(VLLM.name))

    rows = [
        [
            process.contender.name,
            Spread.of(alone[process.contender.name]).show(1),
            f"{Spread.of(share(process.contender)).median:.0%}",
            Spread.of(many[process.contender.name]).show(1),
        ]
        for process in processes
    ]
    targets = [
        judged("single stream, bf16, over vLLM's best", over_vllm(alone), 2.5),
        judged("single stream, bf16, share of weight bytes over read bandwidth", share(OURS), 0.75),
        judged("batch of 16, bf16, over vLLM's best", over_vllm(many), 1.3),
    ]
    if INT8.name in alone:
        targets.append(judged("single stream, int8 over bf16", ratios(alone[INT8.name], alone[OURS.name]), 1.5))
    for one, earlier in BEFORE.items() if run.before else ():
        if one.name in alone:
            over = ratios(alone[one.name], alone[earlier.name])
            targets.append(judged(f"single stream, {one.precision}, over the checkout before", over, 1.0))
    head = [
        "contender",
        f"single stream, tok/s (32 + {outputs})",
        "share of the bandwidth",
        f"batch 16 of 32 + {outputs // 2}, out tok/s",
    ]
    return "\n\n".join(
        (
            f"A random GPT-2 of 124 million weights; every contender has all cores. Median of {run.rounds} rounds (min-max); a "
            "single stream counts after the first token.",
            table(head, [*rows, *absent(fleet)]),
            run.describe_limits(),
            contenders_table(processes, results),
            verdicts(targets),
        )
    )
