"""The leg `shared`: prompts that have 90 % in common, with our prefix cache and without, and the peers."""

from __future__ import annotations

from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdicts
from benchmarks.serving import traces
from benchmarks.serving.contenders import LLAMA, OURS, UNCACHED, VLLM
from benchmarks.serving.measure import MODEL, Run, absent, contenders_table, interleaved, judged, ratios, warm

ROUNDS = 2


def run(options: Options) -> str:
    return measure(Run.of(options, ROUNDS))


def measure(run: Run) -> str:
    with run.fleet() as fleet:
        for contender in run.chosen((OURS, UNCACHED, VLLM, LLAMA)):
            fleet.start(contender)
        warm(fleet)
        number, length, outputs = (6, 320, 8) if run.quick else (17, 640, 16)
        results = interleaved(run, fleet, {"shared": lambda seed: traces.shared(seed, number, length, outputs)})
        processes = list(fleet.running.values())
    seconds = {name: [outcome.seconds for outcome in outcomes] for (_, name), outcomes in results.items()}
    rows = [
        [name, Spread.of(values).show(2), Spread.of([number / value for value in values]).show(2)]
        for name, values in seconds.items()
    ]
    gained = ratios(seconds[UNCACHED.name], seconds[OURS.name])
    return "\n\n".join(
        (
            f"{MODEL} {number} prompts of {length} tokens, the first {0.9 * length:.0f} of them the same, {outputs} tokens out "
            f"each; the first request arrives alone, the others when it has ended. {run.rounds} rounds, each with other prompts. "
            "llama.cpp's slots share nothing.",
            table(["contender", "total, s", "requests/s"], [*rows, *absent(fleet)]),
            contenders_table(processes, results),
            verdicts([judged("shared prefix, over ours without the prefix cache", gained, 3.0)]),
        )
    )
