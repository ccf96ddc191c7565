"""The leg `solo`: tokens per second of one stream, of a batch, of a prompt, and of a mixed batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdicts
from benchmarks.serving import traces
from benchmarks.serving.contenders import BEST, INT4, INT8, LLAMA, OURS, Q4, Q8, QUANTIZED, VLLM, Contender, Process
from benchmarks.serving.measure import MODEL, Run, absent, contenders_table, first_agreement, interleaved, judged, ratios, warm
from benchmarks.serving.traces import Outcome, Trace

ROUNDS = 2
AGREEMENT = 0.5  # of the first tokens must be ours, or it is not the same model; rounding changes some


@dataclass(frozen=True, slots=True)
class Figure:
    """A trace and what is computed from its outcome."""

    head: str
    trace: Callable[[int], Trace]  # of a round
    quick: Callable[[int], Trace]
    of: Callable[[Outcome], float]


def _batch(number: int, length: int, outputs: int) -> Callable[[int], Trace]:
    return partial(traces.batch, number=number, length=length, outputs=outputs)


FIGURES = {
    "single stream": Figure(
        "single stream, tok/s (32 + 128)", _batch(1, 32, 128), _batch(1, 32, 32), lambda outcome: outcome.stream_rate
    ),
    "batch": Figure("batch 16 of 256 + 32, out tok/s", _batch(16, 256, 32), _batch(4, 64, 16), lambda outcome: outcome.output_rate),
    "prefill 512": Figure("prefill 512, tok/s", _batch(1, 512, 1), _batch(1, 512, 1), lambda outcome: outcome.prompt_rate),
    "prefill 1,024": Figure("prefill 1,024, tok/s", _batch(1, 1024, 1), _batch(1, 1024, 1), lambda outcome: outcome.prompt_rate),
    "mixed": Figure(
        "mixed (16 of 32-768 + 32), out tok/s",
        partial(traces.mixed, number=16, shortest=32, longest=768, outputs=32),
        partial(traces.mixed, number=8, shortest=32, longest=256, outputs=16),
        lambda outcome: outcome.output_rate,
    ),
}


def joins(kind: str, contender: Contender) -> bool:
    """8 and 4 bits are compared where reading the weights limits; llama.cpp takes minutes for the mixed batch."""
    if contender.kind == "llama" and kind == "mixed":
        return False
    return contender not in QUANTIZED or kind not in ("batch", "mixed")


def run(options: Options) -> str:
    return measure(Run.of(options, ROUNDS))


def measure(run: Run) -> str:
    slow = () if BEST == "bf16" else (replace(VLLM, precision="bf16"),)
    contenders = (OURS, VLLM, LLAMA, *slow, *QUANTIZED)
    with run.fleet() as fleet:
        for contender in run.chosen(contenders):
            fleet.start(contender)
        warm(fleet)
        kinds = {kind: figure.quick if run.quick else figure.trace for kind, figure in FIGURES.items()}
        results = interleaved(run, fleet, kinds, joins)
        processes = list(fleet.running.values())
    figures = {key: [FIGURES[key[0]].of(outcome) for outcome in outcomes] for key, outcomes in results.items()}
    plain = [process.contender.name for process in processes if process.contender not in QUANTIZED]
    agreement = {name: first_agreement(results, name) for name in plain}
    void = {name: f"void: {share:.0%} of its first tokens are ours" for name, share in agreement.items() if share < AGREEMENT}

    def limit(kind: str, precision: str) -> float:
        if kind == "single stream":
            return run.rates.read / run.shape.weight_bytes(precision)
        trace = kinds[kind](0)
        seconds = run.shape.seconds(trace, precision, run.rates)
        return sum(len(ask.prompt) if kind.startswith("prefill") else ask.outputs for ask in trace) / seconds

    def share(kind: str) -> list[float]:
        return [value / limit(kind, "bf16") for value in figures[kind, OURS.name]]

    def cell(kind: str, process: Process) -> str:
        """With the share of the limit, which for 8 and 4 bits is known only where reading limits."""
        if (kind, process.contender.name) not in figures:
            return "-"
        values, precision = Spread.of(figures[kind, process.contender.name]), process.contender.precision
        text = values.show(1 if values.median < 100 else 0)
        if kind != "single stream" and process.contender in QUANTIZED:
            return text
        return f"{text}, {values.median / limit(kind, precision):.0%}"

    def against(kind: str, ours: Contender, *reference: Contender) -> list[float] | str:
        """Over the best of a peer's settings."""
        valid = [figures[kind, one.name] for one in reference if one.name not in void and (kind, one.name) in figures]
        gone = {**fleet.missing, **void}
        why = "; ".join(dict.fromkeys(gone[one.name] for one in reference if one.name in gone))
        return ratios(figures.get((kind, ours.name)), [max(values) for values in zip(*valid, strict=True)], why)

    rows = [
        [f"{process.contender.name} (void)" if process.contender.name in void else process.contender.name]
        + [cell(kind, process) for kind in kinds]
        for process in processes
    ]
    head = ["contender", *(kind if run.quick else FIGURES[kind].head for kind in kinds)]
    limits = [["limit, bf16", *(f"{limit(kind, 'bf16'):.0f}" for kind in kinds)]]
    vllm = (VLLM, *slow)
    targets = [
        judged("single stream, bf16, over vLLM's best", against("single stream", OURS, *vllm), 2.5),
        judged("single stream, bf16, over llama.cpp", against("single stream", OURS, LLAMA), 1.3),
        judged("single stream, bf16, share of weight bytes over read bandwidth", share("single stream"), 0.8),
        judged("single stream, int8 over llama.cpp's Q8_0", against("single stream", INT8, Q8), 1.5),
        judged("single stream, int4 over llama.cpp's Q4_0", against("single stream", INT4, Q4), 1.3),
    ]
    for kind in ("batch", "mixed"):
        targets += [
            judged(f"{kind}, bf16, over vLLM's best", against(kind, OURS, *vllm), 1.3),
            judged(f"{kind}, bf16, share of the limit", share(kind), 0.72),
        ]
    peers = [process.contender for process in processes if process.contender.kind != "ours"]
    for kind in (kind for kind in kinds if kind.startswith("prefill")):
        targets += [
            judged(f"{kind}, bf16, over the best peer (any precision)", against(kind, OURS, *peers), 1.1),
            judged(f"{kind}, bf16, share of the rate of multiplication", share(kind), 0.78),
        ]
    return "\n\n".join(
        (
            f"{MODEL} Median of {run.rounds} rounds (min-max), then the share of the limit: weights read once per token at the "
            "read bandwidth, and every product at the rate of multiplication. Single stream counts after the first token.",
            table(head, [*rows, *absent(fleet), *limits]),
            run.describe_limits(),
            contenders_table(processes, results),
            verdicts(targets),
        )
    )
