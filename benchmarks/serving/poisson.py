"""The leg `poisson`: requests per second within one latency target, at rising rates of arrival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdicts
from benchmarks.serving import traces
from benchmarks.serving.contenders import BUDGET, LLAMA, OURS, UNSPLIT, VLLM, Contender
from benchmarks.serving.measure import MODEL, Run, absent, contenders_table, interleaved, judged, ratios, warm
from benchmarks.serving.solo import FIGURES
from benchmarks.serving.traces import Latency, Outcome, percentile

SAFE = 0.6  # of the time that is allowed between tokens: at 0.7, noise made half more of the answers miss it
RATES = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.2, 16.0)  # requests per second


def run(options: Options) -> str:
    return measure(Run.of(options, 1))


def fitting(gap: float, prompt_rate: float) -> int:
    """The token budget of a forward within `gap` seconds at a contender's own speed, less 40 %: that speed was measured in forwards
    of 512, and small ones are slower per token."""
    return max(16, min(BUDGET, int(0.6 * gap * prompt_rate) // 16 * 16))


def measure(run: Run) -> str:
    """Solo speeds first, which set the target and each contender's budget; then rising rates, each contender in turn."""
    rates = (2.0, 6.0) if run.quick else RATES
    speeds: dict[Contender, tuple[float, float]] = {}
    outcomes: dict[str, dict[float, list[Outcome]]] = {}
    with run.fleet() as fleet:
        for contender in run.chosen((OURS, VLLM, LLAMA)):
            fleet.start(contender)
        warm(fleet)
        solos = {kind: FIGURES[kind].trace for kind in ("single stream", "prefill 512")}
        results = interleaved(replace(run, rounds=1 if run.quick else 2), fleet, solos)
        for process in fleet.running.values():
            name = process.contender.name
            stream = max(outcome.stream_rate for outcome in results["single stream", name])
            speeds[process.contender] = (stream, max(outcome.prompt_rate for outcome in results["prefill 512", name]))
        wanted = traces.target([prompt for _, prompt in speeds.values()], [stream for stream, _ in speeds.values()])
        # Every contender runs with the default budget, and with one that fits it to the target: ours gets the time between tokens
        # (less a margin), or the target with each request, the others a budget by their own speed.
        for contender, (_, prompt_rate) in speeds.items():
            if contender == OURS:
                fitted = replace(contender, extra=(("token_interval", round(SAFE * wanted.gap, 3)),))
                targeted = replace(contender, extra=(("target", (round(wanted.prompt_rate), round(wanted.gap, 3))),))
                fleet.start(targeted)
            else:
                fitted = replace(contender, budget=fitting(wanted.gap, prompt_rate))
            if fitted != contender and (contender == OURS or not run.quick):
                fleet.start(fitted)
        fleet.start(UNSPLIT)
        warm(fleet)
        done: set[str] = set()
        for rate in rates:
            for turn in range(run.rounds):
                trace = traces.poisson(turn, 4 if run.quick else 16 if rate < 1 else 24, rate)
                order = [process for name, process in fleet.running.items() if name not in done]
                for process in order if turn % 2 == 0 else order[::-1]:
                    outcome = fleet.run(process, trace)
                    if outcome is not None:
                        name = process.contender.name
                        outcomes.setdefault(name, {}).setdefault(rate, []).append(outcome)
                        print(f"  {rate}/s, {name}: {wanted.good(outcome)} of {len(trace)} within the target", flush=True)
            # Ours without SplitFuse goes on: its waits are compared at the rate where the best of ours is.
            done |= {name for name, reached in outcomes.items() if name != UNSPLIT.name and overloaded(reached, wanted)}
        processes = list(fleet.running.values())

    played = {(f"{rate:g}/s", name): each for name, reached in outcomes.items() for rate, each in reached.items()}

    def effective(name: str, rate: float) -> Spread:
        return Spread.of([wanted.rate(outcome) for outcome in outcomes[name][rate]])

    best = {name: max(reached, key=lambda rate, name=name: effective(name, rate).median) for name, reached in outcomes.items()}  # type: ignore[misc]

    def tail(name: str, rate: float) -> list[float]:
        """P95 between tokens, by round."""
        return [percentile(outcome.gaps, 0.95) for outcome in outcomes[name][rate]]

    def longest(name: str, rate: float) -> list[float]:
        """P95 of the longest time between two tokens of a request, by round."""
        return [percentile([max(gaps) for gaps in outcome.gaps_of_requests if gaps], 0.95) for outcome in outcomes[name][rate]]

    rows = [
        [name, f"**{effective(name, best[name]).show(2)}** at {best[name]:g}/s"]
        + [
            f"{effective(name, rate).median:.2f}, {Spread.of(tail(name, rate)).median * 1000:.0f} ms" if rate in reached else ""
            for rate in rates
        ]
        for name, reached in outcomes.items()
        if name in {process.contender.name for process in processes}
    ]
    head = ["contender", "most within the target, requests/s", *(f"{rate:g}/s" for rate in rates)]

    def most(kind: Contender) -> tuple[str, Sequence[float]] | None:
        """The better of a contender's budgets."""
        names = [name for name in best if (name + " ").startswith(kind.name + " ") and "=False" not in name]
        if not names:
            return None
        name = max(names, key=lambda name: effective(name, best[name]).median)
        return name, [wanted.rate(outcome) for outcome in outcomes[name][best[name]]]

    ours = most(OURS)
    assert ours is not None, "if ours fails, so does the leg"
    reference = most(VLLM)
    unsplit = [wanted.rate(outcome) for outcome in outcomes[UNSPLIT.name][best[UNSPLIT.name]]]
    common = [rate for rate in outcomes[UNSPLIT.name] if rate in outcomes[ours[0]]]
    at = min(common, key=lambda rate: abs(rate - best[ours[0]]))
    above = [rate for rate in outcomes[ours[0]] if rate >= 1.8 * best[ours[0]]]
    loaded = [wanted.rate(outcome) for outcome in outcomes[ours[0]][min(above)]] if above else None
    figure = "requests/s within the target"
    targets = [
        judged(f"{figure}, over vLLM", over(ours[1], reference and reference[1], fleet.missing.get(VLLM.name)), 9),
        judged(f"{figure}, over ours with SplitFuse off", over(ours[1], unsplit), 2.1),
        judged(f"{figure} at twice the best rate, {best[ours[0]]:g}/s, over there", ratios(loaded, ours[1]), 0.7),
        judged(
            f"P95 of a request's longest wait at {at:g}/s, SplitFuse off over on",
            over(longest(UNSPLIT.name, at), longest(ours[0], at)),
            20,
        ),
    ]
    return "\n\n".join(
        (
            f"{MODEL} Poisson arrivals, prompts N(260, 30 %), outputs N(32, 30 %); {'4' if run.quick else '24 (below 1/s, 16)'} "
            f"requests at each rate, {run.rounds} rounds. One target for all: {describe(wanted)}. Requests that miss it do not "
            "count. At each rate: requests/s within the target, P95 between tokens. A contender stops when it is overloaded (two "
            "rates in a row below half of its best). `budget`: tokens per forward that the contender's own solo speed fits to the "
            f"target; without one, {BUDGET}. `target`: each request carries it.",
            table(head, [*rows, *absent(fleet)]),
            contenders_table(processes, played),
            verdicts(targets),
        )
    )


def over(ours: Sequence[float], reference: Sequence[float] | None, why: str | None = None) -> list[float] | str:
    """As `ratios`; if nothing of theirs is within the target, the ratio is infinite, or NaN if nothing of ours is either."""
    if not reference:
        return why or "not in this run"
    return [a / b if b else math.inf if a else math.nan for a, b in zip(ours, reference, strict=True)]


def describe(wanted: Latency) -> str:
    return f"a prompt at {wanted.prompt_rate:.0f} tok/s, every token within {wanted.gap * 1000:.0f} ms"


def overloaded(reached: dict[float, list[Outcome]], wanted: Latency) -> bool:
    """Whether the last two rates reached less than half of the best: faster arrivals are not worth trying."""
    medians = [Spread.of([wanted.rate(outcome) for outcome in outcomes]).median for outcomes in reached.values()]
    return len(medians) >= 2 and max(medians[-2:]) <= 0.5 * max(medians)
