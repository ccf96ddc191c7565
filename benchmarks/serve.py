"""`python -m benchmarks.serve [LEG ...]`: our serving engine beside vLLM, llama.cpp and transformers, into RESULTS.md.

Legs: solo (single stream, batch, prefill, mixed), shared (90 % of the prompt in common), poisson (requests per second within one
latency target), load (process start to first token); all of them by default. How: benchmarks/README.md, "Serving".
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.ranks import ROOT
from benchmarks.report import RESULTS, Spread, host, table, verdict, verdicts, write_section
from benchmarks.serving import traces
from benchmarks.serving.contenders import BUDGET, Contender, Fleet, Process
from benchmarks.serving.limits import Rates, Shape
from benchmarks.serving.models import prepare
from benchmarks.serving.traces import Latency, Outcome, Trace, percentile
from benchmarks.workloads import has_bf16_instructions

# torch multiplies bf16 by plain loops where the CPU has no instructions for it (workloads, [Note: bf16 without bf16
# instructions]): what runs through torch has its best setting in fp32 there, and runs in bf16 only in `solo`.
BEST = "bf16" if has_bf16_instructions() else "fp32"
OURS, LLAMA = Contender(kind="ours", precision="bf16"), Contender(kind="llama", precision="bf16")
VLLM, GENERATE = Contender(kind="vllm", precision=BEST), Contender(kind="transformers", precision=BEST)
SLOW = () if BEST == "bf16" else (replace(VLLM, precision="bf16"), replace(GENERATE, precision="bf16"))
QUANTIZED = tuple(
    Contender(kind=kind, precision=precision)
    for kind, precision in (("ours", "int8"), ("ours", "int4"), ("llama", "q8_0"), ("llama", "q4_0"))
)
UNSPLIT = Contender(kind="ours", precision="bf16", extra=(("split", False),))
UNCACHED = Contender(kind="ours", precision="bf16", extra=(("prefix_caching", False),))

Figure = Callable[[Outcome], float]


@dataclass(frozen=True, slots=True)
class Leg:
    """A trace of `solo`."""

    head: str
    whole: Callable[[int], Trace]  # of a round
    quick: Callable[[int], Trace]
    figure: Figure


SOLO = {
    "single stream": Leg(
        "single stream, tok/s (32 + 128)",
        partial(traces.batch, number=1, length=32, outputs=128),
        partial(traces.batch, number=1, length=32, outputs=32),
        lambda outcome: outcome.stream_rate,
    ),
    "batch": Leg(
        "batch 16 of 256 + 64, out tok/s",
        partial(traces.batch, number=16, length=256, outputs=64),
        partial(traces.batch, number=4, length=64, outputs=16),
        lambda outcome: outcome.output_rate,
    ),
    "prefill 512": Leg(
        "prefill 512, tok/s",
        partial(traces.batch, number=1, length=512, outputs=1),
        partial(traces.batch, number=1, length=512, outputs=1),
        lambda outcome: outcome.prompt_rate,
    ),
    "prefill 1,024": Leg(
        "prefill 1,024, tok/s",
        partial(traces.batch, number=1, length=1024, outputs=1),
        partial(traces.batch, number=1, length=1024, outputs=1),
        lambda outcome: outcome.prompt_rate,
    ),
    "mixed": Leg(
        "mixed (32 of 32-768 + 64), out tok/s",
        partial(traces.mixed, number=32, shortest=32, longest=768, outputs=64),
        partial(traces.mixed, number=8, shortest=32, longest=256, outputs=16),
        lambda outcome: outcome.output_rate,
    ),
}
SAFE = 0.6  # of the time that is allowed between tokens: at 0.7, noise made half more of the answers miss it
RATES = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)  # requests per second
AGREEMENT = 0.5  # of the first tokens have to be ours, or it is not the same model; rounding turns some over


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a leg is given."""

    pythons: dict[str, Path]
    models: Path
    shape: Shape
    quick: bool
    rounds: int
    only: Sequence[str]
    limits: list[Rates] = field(default_factory=list)  # of each round so far

    def chosen(self, contenders: Iterable[Contender]) -> list[Contender]:
        """--only's, else all; with --quick not those that take a minute to load or to run, and not everything in 8 bits."""
        if self.only:
            return [one for one in contenders if one.kind == "ours" or one.name.startswith(tuple(self.only))]
        slow = ("vllm", "transformers", "int8", "q8_0") if self.quick else ()
        return [one for one in contenders if one.kind not in slow and one.precision not in slow]

    def measure(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.serving.limits"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        self.limits.append(Rates(*json.loads(done.stdout)))

    @property
    def rates(self) -> Rates:
        """Medians."""
        return Rates(*(Spread.of(values).median for values in zip(*self.limits, strict=True)))

    def limits_said(self) -> str:
        read, bf16, fp32 = (Spread.of([value / 1e9 for value in values]) for values in zip(*self.limits, strict=True))
        return (
            f"Limits, measured in each round: all cores read {read.show(1)} GB/s and multiply {bf16.show(0)} GFLOP/s in bf16, "
            f"{fp32.show(0)} in fp32 (torch; the larger of the two is the limit)."
        )


def judged(figure: str, over: Sequence[float] | str, wanted: float) -> list[str]:
    """A row of the target table: the median of paired ratios, or why there are none."""
    if isinstance(over, str):
        return [figure, "-", f">= {wanted:g}", f"not measured: {over}"]
    return verdict(figure, Spread.of(over).median, wanted, at_least=True)


def ratios(mine: Sequence[float] | None, theirs: Sequence[float] | None, why: str | None = None) -> list[float] | str:
    """Round by round."""
    if not mine or not theirs:
        return why or "not in this run"
    return [a / b for a, b in zip(mine, theirs, strict=True)]


Found = dict[tuple[str, str], list[Outcome]]  # (trace, contender) -> an outcome per round


def who(processes: Iterable[Process], found: Found) -> str:
    """Who ran: what is printed of each, so that a reader can judge the comparison."""
    rows = []
    for process in processes:
        name, facts = process.contender.name, process.facts
        outcomes = [outcome for (_, one), each in found.items() if one == name for outcome in each]
        busy = sum(outcome.cpu for outcome in outcomes) / sum(outcome.seconds for outcome in outcomes)
        agreement = f"{first_agreement(found, name):.0%}"
        rows.append([name, str(facts["threads"]), facts["precision"], facts["setting"], facts["kernels"], agreement, f"{busy:.1f}"])
    return table(["contender", "threads", "precision", "setting", "what ran", "first tokens as ours", "cores busy"], rows)


def absent(fleet: Fleet, num_columns: int) -> list[list[str]]:
    return [[name, why, *[""] * (num_columns - 2)] for name, why in fleet.missing.items()]


def warm(fleet: Fleet) -> None:
    for process in list(fleet.running.values()):
        for trace in (traces.batch(-1, 2, 64, 4), traces.batch(-2, 1, 512, 1)):
            if process.contender.name in fleet.running:
                fleet.run(process, trace)


def interleaved(run: Run, fleet: Fleet, kinds: dict[str, Callable[[int], Trace]]) -> Found:
    """Trace by trace, contenders in turns, every other round backwards."""
    found: Found = {}
    for turn in range(run.rounds):
        run.measure()
        for kind, make in kinds.items():
            trace = make(turn)
            order = list(fleet.running.values())
            for process in order if turn % 2 == 0 else order[::-1]:
                name = process.contender.name
                outcome = fleet.run(process, trace)
                if outcome is not None:
                    found.setdefault((kind, name), []).append(outcome)
                    print(f"  {kind}, {name}: {outcome.seconds:.2f} s", flush=True)
    return {(kind, name): outcomes for (kind, name), outcomes in found.items() if name in fleet.running}


def first_agreement(found: Found, name: str) -> float:
    """How many of a contender's first tokens are those of ours in bf16: the sign that it is the same model."""
    pairs = [
        (mine, theirs)
        for (kind, one), outcomes in found.items()
        if one == name and (kind, OURS.name) in found
        for a, b in zip(found[kind, OURS.name], outcomes, strict=True)
        for mine, theirs in zip(a.first, b.first, strict=True)
    ]
    return sum(mine == theirs for mine, theirs in pairs) / max(1, len(pairs))


def solo(run: Run) -> str:
    fleet = Fleet(run.pythons, run.models)
    try:
        for contender in run.chosen((OURS, VLLM, LLAMA, GENERATE, *SLOW, *QUANTIZED)):
            fleet.start(contender)
        warm(fleet)
        kinds = {kind: leg.quick if run.quick else leg.whole for kind, leg in SOLO.items()}
        found = interleaved(run, fleet, kinds)
        processes = list(fleet.running.values())
    finally:
        fleet.close()
    figures = {key: [SOLO[key[0]].figure(outcome) for outcome in outcomes] for key, outcomes in found.items()}
    agreement = {process.contender.name: first_agreement(found, process.contender.name) for process in processes}
    void = {
        name: f"void: {agreement[name]:.0%} of its first tokens are ours"
        for name in (process.contender.name for process in processes if process.contender.precision in ("bf16", "fp32"))
        if agreement[name] < AGREEMENT
    }

    def share(kind: str, precision: str) -> list[float] | None:
        """Of the limit, by round. Where multiplication bounds it, codes of 8 and 4 bits have another limit: none is given."""
        mine = figures.get((kind, f"ours:{precision}"))
        return None if mine is None else [value / limit(kind, precision) for value in mine]

    def limit(kind: str, precision: str) -> float:
        if kind == "single stream":
            return run.rates.read / run.shape.weight_bytes(precision)
        trace = kinds[kind](0)
        seconds = run.shape.seconds(trace, precision, run.rates)
        return sum(len(ask.prompt) if kind.startswith("prefill") else ask.outputs for ask in trace) / seconds

    def cell(kind: str, process: Process) -> str:
        values = Spread.of(figures[kind, process.contender.name])
        precision = process.contender.precision
        said = values.show(1 if values.median < 100 else 0)
        if kind != "single stream" and precision not in ("bf16", "fp32"):
            return said
        return f"{said}, {values.median / limit(kind, precision):.0%}"

    rows = [
        [f"{process.contender.name} (void)" if process.contender.name in void else process.contender.name]
        + [cell(kind, process) for kind in kinds]
        for process in processes
    ]
    head = ["contender", *(kind if run.quick else SOLO[kind].head for kind in kinds)]
    limits = [["limit, bf16", *(f"{limit(kind, 'bf16'):.0f}" for kind in kinds)]]

    def against(kind: str, mine: Contender, *theirs: Contender) -> list[float] | str:
        """Over the best of a peer's settings."""
        valid = [figures[kind, one.name] for one in theirs if one.name not in void and (kind, one.name) in figures]
        why = "; ".join({**fleet.missing, **void}[one.name] for one in theirs if one.name in {**fleet.missing, **void})
        return ratios(figures.get((kind, mine.name)), [max(values) for values in zip(*valid, strict=True)], why)

    int8, int4, q8, q4 = QUANTIZED
    vllm = (VLLM, *(one for one in SLOW if one.kind == "vllm"))
    targets = [
        judged("single stream, bf16, over vLLM's best", against("single stream", OURS, *vllm), 2.5),
        judged("single stream, bf16, over llama.cpp", against("single stream", OURS, LLAMA), 1.3),
        judged("single stream, bf16, share of weight bytes over read bandwidth", share("single stream", "bf16") or "", 0.8),
        judged("single stream, int8 over llama.cpp's Q8_0", against("single stream", int8, q8), 1.5),
        judged("single stream, int4 over llama.cpp's Q4_0", against("single stream", int4, q4), 1.3),
    ]
    for kind in ("batch", "mixed"):
        targets += [
            judged(f"{kind}, bf16, over vLLM's best", against(kind, OURS, *vllm), 1.3),
            judged(f"{kind}, bf16, share of the limit", share(kind, "bf16") or "", 0.72),
        ]
    for kind in (kind for kind in kinds if kind.startswith("prefill")):
        peers = [figures[kind, p.contender.name] for p in processes if p.contender.kind != "ours" and p.contender.name not in void]
        best = [max(values) for values in zip(*peers, strict=True)]
        targets += [
            judged(f"{kind}, bf16, over the best peer (any precision)", ratios(figures[kind, OURS.name], best, "no peer ran"), 1.1),
            judged(f"{kind}, bf16, share of the rate of multiplication", share(kind, "bf16") or "", 0.78),
        ]
    return "\n\n".join(
        (
            f"Median of {run.rounds} rounds (min-max), then the share of the limit: weights read once per token at the read "
            "bandwidth, and every product at the rate of multiplication. Single stream counts after the first token.",
            table(head, [*rows, *absent(fleet, len(head)), *limits]),
            run.limits_said(),
            who(processes, found),
            verdicts(targets),
        )
    )


def shared(run: Run) -> str:
    fleet = Fleet(run.pythons, run.models)
    try:
        for contender in run.chosen((OURS, UNCACHED, VLLM, LLAMA)):
            fleet.start(contender)
        warm(fleet)
        number, length, outputs = (6, 320, 8) if run.quick else (17, 640, 16)
        found = interleaved(run, fleet, {"shared": lambda seed: traces.shared(seed, number, length, outputs)})
        processes = list(fleet.running.values())
    finally:
        fleet.close()
    seconds = {name: [outcome.seconds for outcome in outcomes] for (_, name), outcomes in found.items()}
    rows = [
        [name, Spread.of(values).show(2), Spread.of([number / value for value in values]).show(2)]
        for name, values in seconds.items()
    ]
    gained = ratios(seconds[UNCACHED.name], seconds[OURS.name])
    targets = [judged("shared prefix, over ours without the prefix cache", gained, 3.0)]
    return "\n\n".join(
        (
            f"{number} prompts of {length} tokens, the first {0.9 * length:.0f} of them the same, {outputs} tokens out each; the "
            f"first request comes alone, the others together when it has ended. {run.rounds} rounds with other prompts each. "
            "llama.cpp's slots share nothing.",
            table(["contender", "whole trace, s", "requests/s"], [*rows, *absent(fleet, 3)]),
            who(processes, found),
            verdicts(targets),
        )
    )


def fitting(gap: float, prompt_rate: float) -> int:
    """The token budget whose forward takes less than `gap` seconds at a contender's own speed. Less by 40 %: small forwards
    reach less of that speed, which was measured in forwards of 512."""
    return max(16, min(BUDGET, int(0.6 * gap * prompt_rate) // 16 * 16))


def poisson(run: Run) -> str:
    """Solo speeds first, which fix the target and each contender's budget; then rising rates, each contender in turn."""
    fleet = Fleet(run.pythons, run.models)
    rates = (2.0, 6.0) if run.quick else RATES
    speeds: dict[Contender, tuple[float, float]] = {}
    outcomes: dict[str, dict[float, list[Outcome]]] = {}
    try:
        for contender in run.chosen((OURS, VLLM, LLAMA, GENERATE)):
            fleet.start(contender)
        warm(fleet)
        solos = {kind: SOLO[kind].whole for kind in ("single stream", "prefill 512")}
        found = interleaved(replace(run, rounds=1 if run.quick else 2), fleet, solos)
        for process in fleet.running.values():
            name = process.contender.name
            stream = max(outcome.stream_rate for outcome in found["single stream", name])
            speeds[process.contender] = (stream, max(outcome.prompt_rate for outcome in found["prefill 512", name]))
        wanted = traces.target([prompt for _, prompt in speeds.values()], [stream for stream, _ in speeds.values()])
        # Everybody runs with the default budget and with what fits it to the target: ours is told the time between tokens (less
        # a part for what nobody foresees), the others a budget by their own speed.
        for contender, (_, prompt_rate) in speeds.items():
            if contender == OURS:
                fitted = replace(contender, extra=(("token_interval", round(SAFE * wanted.gap, 3)),))
            else:
                fitted = replace(contender, budget=fitting(wanted.gap, prompt_rate))
            if contender.kind != "transformers" and fitted != contender:  # its batches have no budget
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
            done |= {name for name, reached in outcomes.items() if overloaded(reached, wanted)}
        processes = list(fleet.running.values())
    finally:
        fleet.close()

    played = {(f"{rate:g}/s", name): each for name, reached in outcomes.items() for rate, each in reached.items()}

    def effective(name: str, rate: float) -> Spread:
        return Spread.of([wanted.rate(outcome) for outcome in outcomes[name][rate]])

    best = {name: max(reached, key=lambda rate, name=name: effective(name, rate).median) for name, reached in outcomes.items()}  # type: ignore[misc]

    def tail(name: str, rate: float) -> list[float]:
        """P95 between tokens, by round."""
        return [percentile(outcome.gaps, 0.95) for outcome in outcomes[name][rate]]

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

    mine = most(OURS)
    assert mine is not None, "ours runs, or the benchmark has failed"
    theirs = most(VLLM)
    unsplit = [wanted.rate(outcome) for outcome in outcomes[UNSPLIT.name][best[UNSPLIT.name]]]
    common = [rate for rate in outcomes[UNSPLIT.name] if rate in outcomes[mine[0]]]
    at = min(common, key=lambda rate: abs(rate - best[mine[0]]))
    targets = [
        judged("requests/s within the target, over vLLM", over(mine[1], theirs and theirs[1], fleet.missing.get(VLLM.name)), 1.4),
        judged("requests/s within the target, over ours with SplitFuse off", over(mine[1], unsplit), 2.3),
        judged(f"P95 between tokens at {at:g}/s, SplitFuse off over on", over(tail(UNSPLIT.name, at), tail(mine[0], at)), 3.0),
    ]
    return "\n\n".join(
        (
            f"Poisson arrivals, prompts N(260, 30 %), outputs N(32, 30 %); {'4' if run.quick else '24 (below 1/s, 16)'} requests "
            f"at each rate, {run.rounds} rounds. The target, one for all: {describe(wanted)}. Requests that miss it count for "
            "nothing. At each rate: requests/s within the target, P95 between tokens. A contender stops when it is overloaded (two "
            "rates in a row below half of its best). `budget`: tokens per forward that the contender's own solo speed fits to the "
            f"target; without one, {BUDGET}.",
            table(head, [*rows, *absent(fleet, len(head))]),
            who(processes, played),
            verdicts(targets),
        )
    )


def over(mine: Sequence[float], theirs: Sequence[float] | None, why: str | None = None) -> list[float] | str:
    """As `ratios`; over nothing within the target at all, the ratio is infinite, and of nothing over nothing there is none."""
    if not theirs:
        return why or "not in this run"
    return [a / b if b else math.inf if a else math.nan for a, b in zip(mine, theirs, strict=True)]


def describe(wanted: Latency) -> str:
    return f"a prompt at {wanted.prompt_rate:.0f} tok/s, every token within {wanted.gap * 1000:.0f} ms"


def overloaded(reached: dict[float, list[Outcome]], wanted: Latency) -> bool:
    """Whether faster arrivals are not worth trying: the last two rates gave less than half of the best."""
    medians = [Spread.of([wanted.rate(outcome) for outcome in outcomes]).median for outcomes in reached.values()]
    return len(medians) >= 2 and max(medians[-2:]) <= 0.5 * max(medians)


def served() -> tuple[float, float]:
    """`slipstream serve smollm2`, as `make serve` runs it: seconds from its start until it is healthy, and to the first answer."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("slipstream"), "serve", "smollm2", "--port", str(port)]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not _answers(port, "GET", "/health"):
                if server.poll() is not None or time.monotonic() - began > 60:
                    raise SystemExit(f"{' '.join(map(str, command))} does not serve")
                time.sleep(0.01)
            healthy = time.monotonic() - began
            body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
            if not _answers(port, "POST", "/v1/chat/completions", json.dumps(body)):
                raise SystemExit("the server does not answer a chat")
            return healthy, time.monotonic() - began
        finally:
            server.terminate()


def _answers(port: int, method: str, path: str, body: str | None = None) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        return reply.status == 200
    except ConnectionRefusedError:
        return False
    finally:
        connection.close()


def load(run: Run) -> str:
    seconds: dict[str, list[tuple[float, float]]] = {}
    fleet = Fleet(run.pythons, run.models)
    contenders = run.chosen((OURS, *QUANTIZED[:2], LLAMA, GENERATE, VLLM))
    fill = not run.quick  # one more at the beginning, for the page cache
    for turn in range(run.rounds + fill):
        for contender in contenders:
            process = fleet.start(contender)
            fleet.close()
            if process is not None and turn >= fill:
                seconds.setdefault(contender.name, []).append((process.loaded, process.first_token))
        http_seconds = served()
        if turn >= fill:
            seconds.setdefault(SERVED, []).append(http_seconds)
    rows = [[name, *(Spread.of(column).show(2) for column in zip(*values, strict=True))] for name, values in seconds.items()]
    ours = [SERVED, *(one.name for one in contenders if one.kind == "ours")]
    reached = max(Spread.of([first for _, first in seconds[name]]).median for name in ours)
    return "\n\n".join(
        (
            f"A fresh process, {run.rounds} times" + (" after one that is not counted and fills the page cache." if fill else "."),
            table(["contender", "process start to a loaded model, s", "to the first token, s"], [*rows, *absent(fleet, 3)]),
            verdicts([verdict("process start to first token (serve: first answer), the slowest of ours, s", reached, 5.0)]),
        )
    )


SERVED = "slipstream serve smollm2 (GGUF), over HTTP"
LEGS: dict[str, Callable[[Run], str]] = {"solo": solo, "shared": shared, "poisson": poisson, "load": load}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("legs", nargs="*", metavar="LEG", help=f"{', '.join(LEGS)} or all (default)")
    parser.add_argument("--quick", action="store_true", help="small traces, one round, neither vLLM nor transformers nor 8 bits")
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="PEER=PYTHON",
        help="interpreters: vllm=... llama=... transformers=... (default: those that make builds)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="CONTENDER",
        help="beside ours only these, by the start of their names (llama vllm:bf16 ...)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each contender runs each trace (default 3)")
    parser.add_argument("--models", type=Path, default=ROOT / "runs" / "bench-serve", help="where the model's files are or go")
    parser.add_argument("--out", type=Path, help="where the sections go (default benchmarks/RESULTS.md; with --quick nowhere)")
    options = parser.parse_args()
    if unknown := set(options.legs) - {*LEGS, "all"}:
        parser.error(f"no leg {', '.join(sorted(unknown))}; there are {', '.join(LEGS)} and all")
    built = ROOT / ".venv-serve-peers" / "bin" / "python"
    pythons = {"ours": Path(sys.executable), "transformers": Path(sys.executable), "vllm": built, "llama": built}
    for pair in options.python:
        peer, _, python = pair.partition("=")
        if peer not in pythons or peer == "ours" or not python:
            parser.error(f"--python {pair}: it has to be vllm=PYTHON, llama=PYTHON or transformers=PYTHON")
        pythons[peer] = Path(python).absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that contenders are ended
    models = prepare(options.models.absolute())
    out = options.out or (None if options.quick else RESULTS)
    chosen = list(LEGS) if not options.legs or "all" in options.legs else options.legs
    for leg in chosen:
        began = time.monotonic()
        where = host("SmolLM2-135M-Instruct from one bf16 copy, every contender with all cores")
        body = LEGS[leg](
            Run(
                pythons=pythons,
                models=models,
                shape=Shape.read(models / "hf"),
                quick=options.quick,
                only=options.only,
                rounds=1 if options.quick else options.rounds,
            )
        )
        took = f"This took {(time.monotonic() - began) / 60:.1f} minutes{' (--quick)' if options.quick else ''}."
        body = f"{where}\n\n{body}\n\n{took}"
        if out is not None:
            write_section(f"serve, {leg}", body, out)
        print(f"\n## serve, {leg}\n\n{body}\n", flush=True)
    print(f"written to {out}" if out is not None else "--quick writes nothing without --out")


if __name__ == "__main__":
    main()
