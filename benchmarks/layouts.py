"""The legs on layouts: `pipeline` (two stages over the bound, and DeepSpeed's), `slices` (two slices over the ideal, DeepSpeed's
and torch's), `link` (a pipeline or data parallelism over a slow link), `states` (bytes per rank over the formula) and `predicted`.

All contenders stay alive and take turns of one step each, in both directions; idle ones wait in a read. A figure is the time of the
slowest rank over that of `compute` in the same turn: the forwards and backwards that a rank has to do, without communication.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks import memory
from benchmarks.cgroup import Sampler, meter
from benchmarks.legs import Options
from benchmarks.peers import Peers, prepare
from benchmarks.ranks import Ranks, Seat
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.wire import NoNetwork, network
from benchmarks.worker import Failed
from benchmarks.workloads import Workload
from slipstream.parallel.layouts import Cluster, MeshLayout, Model, cost_of

PIPELINE = Workload(name="pipeline", width=512, depth=8, heads=8, vocab=512, batch=2, length=128)
SLICES = Workload(name="slices", width=512, depth=6, heads=8, vocab=2048, batch=4, length=128)
LINK = dataclasses.replace(PIPELINE, name="link", batch=1, length=64)
COMPUTE = "compute:half"


def measure(
    work: Workload, systems: Sequence[str], peers: Peers, micros: int, turns: int, seat: Seat | None = None
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds per step of each contender, turn by turn; and of those that failed, why."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    troubles: dict[str, str] = {}
    with ExitStack() as stack:
        alive: dict[str, Ranks] = {}
        for name in systems:
            is_peer = name.startswith("deepspeed")
            if is_peer and peers.python is None:
                troubles[name] = peers.missing
                continue
            try:
                alive[name] = stack.enter_context(
                    Ranks(
                        "benchmarks.layouts_worker:train",
                        {"system": name, "work": dataclasses.asdict(work), "micros": micros},
                        2,
                        name=name,
                        python=peers.python if is_peer else None,
                        env=peers.env() if is_peer else {},
                        seat=seat,
                    )
                )
                alive[name].call("steps", count=1)
            except Failed as error:
                print(error)
                alive.pop(name, None)
                troubles[name] = error.reason
        for turn in range(turns):
            for name, ranks in list(alive.items())[:: 1 if turn % 2 == 0 else -1]:
                try:
                    replies = ranks.call("steps", count=1)
                except Failed as error:
                    print(error)
                    alive.pop(name)
                    troubles[name] = error.reason
                    continue
                seconds[name].append(max(statistics.mean(reply["times"]) for reply in replies))
    for name, values in seconds.items():
        if name not in troubles:
            print(f"  {work.name} m={micros} {name}: {statistics.median(values):.3f} s", flush=True)
    return seconds, troubles


_PIPES = ("slipstream:pp:1f1b", "slipstream:pp:zero_bubble", "slipstream:pp:zero_bubble:2", "slipstream:pp:gpipe", "deepspeed:pp")


def pipeline(options: Options) -> str:
    peers = prepare(options.peers)
    turns = options.num_rounds(7)
    rows, judged = [], []
    for micros in (4, 8):
        seconds, troubles = measure(PIPELINE, (COMPUTE, *_PIPES), peers, micros, turns)
        bound = (micros + 1) / micros
        for name in _PIPES:
            if name in troubles:
                rows.append([str(micros), name, troubles[name]])
                continue
            over = Spread.ratio(seconds[name], seconds[COMPUTE])
            one = Spread.of(seconds[name])
            rows.append([str(micros), name, one.show(), over.show(2), f"{over.median / bound:.3f}"])
        ours = Spread.ratio(seconds["slipstream:pp:1f1b"], seconds[COMPUTE]).median
        judged.append(verdict(f"m = {micros}: 1F1B over its bound (m + 1) / m", ours / bound, 1.06, digits=3))
        if micros == 4:
            gain = Spread.ratio(seconds["slipstream:pp:1f1b"], seconds["slipstream:pp:zero_bubble"]).median
            judged.append(verdict("m = 4: 1F1B over zero bubble", gain, 1.10, at_least=True))
        if "deepspeed:pp" not in troubles:
            for schedule, name in (
                ("1F1B", "slipstream:pp:1f1b"),
                ("zero bubble", "slipstream:pp:zero_bubble"),
                ("zero bubble, two stages a rank", "slipstream:pp:zero_bubble:2"),
            ):
                if name in troubles:
                    continue
                times = Spread.ratio(seconds["deepspeed:pp"], seconds[name]).median
                judged.append(verdict(f"m = {micros}: DeepSpeed's PipelineModule over our {schedule}", times, 1.15, at_least=True))
    return "\n\n".join(
        (
            f"{PIPELINE.describe()} of a micro-batch, fp32, as a list of layers on two ranks; ZeRO-1. Seconds per step, median "
            f"(min-max) of {turns} turns; over the computing of m micro-batches on two cores at once. {peers}.",
            table(["m", "contender", "s", "over computing", "over 1F1B's bound"], rows),
            verdicts(judged),
        )
    )


_SLICES = (
    "slipstream:tp",
    "slipstream:tp:overlap",
    "slipstream:tp:tokens",
    "slipstream:tp:gloo",
    "slipstream:tp:overlap:gloo",
    "deepspeed:tp",
    "deepspeed:tp:overlap",
    "torch:tp",
)
_OVER_LINKS = ("slipstream:tp:gloo", "slipstream:tp:overlap:gloo", "slipstream:tp:tokens:gloo", "slipstream:tp:overlap:tokens:gloo")
_RATES = {"1gbit": 1.1, "4gbit": 0.0}  # with the gain that is wanted


def slices(options: Options) -> str:
    peers = prepare(options.peers)
    turns = options.num_rounds(7)
    sums = "slipstream:tp:sums"
    seconds, troubles = measure(SLICES, ("half:tp", sums, *_SLICES), peers, 1, turns)
    links, judged_links = _overlap_over_links(options)
    ideal = [half + exchanged for half, exchanged in zip(seconds["half:tp"], seconds[sums], strict=True)]
    rows, judged = [], []
    for name in ("half:tp", sums, *_SLICES):
        if name in troubles:
            rows.append([name, troubles[name]])
        else:
            rows.append([name, Spread.of(seconds[name]).show(), Spread.ratio(seconds[name], ideal).show(2)])
    ours = "slipstream:tp", "slipstream:tp:overlap"
    gain = Spread.ratio(seconds[ours[0]], seconds[ours[1]])
    rows.append([f"{ours[0]} over {ours[1]}", "", gain.show(2)])
    best = _faster(ours, seconds, troubles)
    judged.append(verdict("our step over the ideal", Spread.ratio(seconds["slipstream:tp"], ideal).median, 1.15))
    for names, who, wanted in (
        (("deepspeed:tp", "deepspeed:tp:overlap"), "DeepSpeed's AutoTP", 1.5),
        (("torch:tp",), "torch's parallelize_module", 1.3),
    ):
        if peer := _faster(names, seconds, troubles):
            judged.append(verdict(f"{who} over our step", Spread.ratio(peer, best).median, wanted, at_least=True))
    return "\n\n".join(
        (
            f"A Llama of width {SLICES.width}, depth {SLICES.depth}, {SLICES.batch}x{SLICES.length} tokens, fp32, AdamW, two ranks."
            f" Seconds per step, median (min-max) of {turns} turns. The ideal: a model with half of each layer (`half:tp`), and "
            f"the {4 * SLICES.depth} sums of a step over shared memory (`{sums}`). `overlap`: tp_overlap_comm; of two contenders "
            f"of one system, the faster counts. {peers}.",
            table(["contender", "s", "over the ideal"], rows),
            "The same over links of these rates per rank (network namespaces, tbf), gloo.",
            links,
            verdicts(judged + judged_links),
        )
    )


def _faster(names: Sequence[str], seconds: dict[str, list[float]], troubles: dict[str, str]) -> list[float]:
    """The times of the contender with the lowest median; [] if all have failed."""
    return min((seconds[name] for name in names if name not in troubles), key=statistics.median, default=[])


def _overlap_over_links(options: Options) -> tuple[str, list[list[str]]]:
    """Steps with and without overlapped sums, in turns: the table, and the verdicts."""
    rows, judged = [], []
    for rate, wanted in _RATES.items():
        try:
            with network(2, rate=rate) as (seat, _):
                seconds, troubles = measure(SLICES, _OVER_LINKS, prepare(options.peers), 1, options.num_rounds(7), seat)
        except NoNetwork as error:
            return f"Not measured: {error}.", []
        rows += [[rate, name, troubles.get(name) or Spread.of(seconds[name]).show()] for name in _OVER_LINKS]
        for plain, overlap in (_OVER_LINKS[:2], _OVER_LINKS[2:]):
            if not {plain, overlap} & troubles.keys():
                ratio = Spread.ratio(seconds[plain], seconds[overlap])
                rows.append([rate, f"{plain} over {overlap}", ratio.show(2)])
                if wanted and plain == _OVER_LINKS[0]:
                    judged.append(verdict(f"{rate}: {plain} over {overlap}", ratio.median, wanted, at_least=True))
    return table(["rate", "contender", "s"], rows), judged


def link(options: Options) -> str:
    """A pipeline and ZeRO-1 over interfaces of 200 Mbit/s, in network namespaces."""
    names = ("slipstream:pp:1f1b:gloo", "slipstream:dp:gloo")
    try:
        with network(2, rate="200mbit") as (seat, _):
            seconds, troubles = measure(LINK, names, prepare(options.peers), 8, options.num_rounds(5), seat)
    except NoNetwork as error:
        return f"Not measured: {error}."
    rows = [[name, troubles.get(name) or Spread.of(seconds[name]).show()] for name in names]
    ratio = Spread.ratio(seconds[names[1]], seconds[names[0]])
    return "\n\n".join(
        (
            f"{LINK.describe()} of a micro-batch, 8 micro-batches, fp32, gloo, 200 Mbit/s per rank (network namespaces, tbf). "
            "Seconds per step.",
            table(["contender", "s"], rows),
            verdicts([verdict("data parallelism (ZeRO-1) over a pipeline", ratio.median, 4.0, at_least=True)]),
        )
    )


_STATES = (("pp2", 2), ("tp2", 2), ("pp2.tp2", 4), ("pp2.dp2", 4))


def states(options: Options) -> str:
    """Bytes per parameter and rank at the peak of a step, from two depths, as in the leg `memory`."""
    shallow = Workload(name="shallow", width=512, depth=4, heads=8, vocab=512, batch=1, length=16)
    deep = dataclasses.replace(shallow, name="deep", depth=12)
    rows, judged = [], []
    for mesh, world in _STATES:
        for stage in (1, 3):
            try:
                low, high = (
                    _peak(f"slipstream:mesh:{mesh}:{'micro_batch' if stage == 3 else 'step'}", work, world, stage)
                    for work in (shallow, deep)
                )
            except (OSError, Failed) as error:
                rows.append([mesh, str(stage), str(error).splitlines()[0]])
                continue
            replicas = 2 if "dp2" in mesh else 1
            formula = memory.FORMULA["fp32", stage](replicas) * replicas / world
            measured = (high - low) / world / ((deep.depth - shallow.depth) * (16 * 512 + 2) * 512)
            print(f"  states {mesh} stage {stage}: {measured:.2f} of {formula:.2f} bytes per parameter", flush=True)
            rows.append([mesh, str(stage), f"{formula:.2f}", f"{measured:.2f}", f"{measured / formula:.3f}"])
            judged.append((measured / formula, f"{mesh}, ZeRO-{stage}"))
    worst, where = max(judged)
    return "\n\n".join(
        (
            "A Llama of width 512 with 4 and 12 layers, fp32, AdamW; the difference of the peaks, per parameter and rank.",
            table(["layout", "ZeRO", "formula", "bytes per parameter", "over it"], rows),
            verdicts([verdict(f"bytes over the formula, worst ({where})", worst, 1.10)]),
        )
    )


def _peak(system: str, work: Workload, world: int, stage: int) -> int:
    with meter() as gauge:
        sampler = Sampler(gauge)
        arguments = {"system": system, "work": dataclasses.asdict(work), "micros": 2, "stage": stage}
        seat = Seat(env=memory.MALLOC, enter=gauge.enter)
        with Ranks("benchmarks.layouts_worker:train", arguments, world, name=system, seat=seat) as ranks:
            ranks.call("steps", count=memory.SETTLED)
            sampler.start()
            ranks.call("steps", count=memory.STEPS)
            return max(sampler.stop(), gauge.peak() or 0)


PREDICTED = Workload(name="predicted", width=512, depth=8, heads=8, vocab=512, batch=2, length=128)
_MEASURED = {  # layout -> the model's own name of it; 8 micro-batches of 2 sequences a step
    "dp2": MeshLayout(1, 2, 1, 1, 1, "1f1b", 2, False),
    "pp2": MeshLayout(2, 1, 1, 1, 1, "1f1b", 2, False),
    "pp2.zero_bubble": MeshLayout(2, 1, 1, 1, 1, "zero_bubble", 2, False),
    "tp2": MeshLayout(1, 1, 1, 2, 1, "1f1b", 2, False),
    "dp2.zero3": MeshLayout(1, 2, 1, 1, 3, "1f1b", 2, False),
    "pp2.zero3": MeshLayout(2, 1, 1, 1, 3, "1f1b", 2, False),
}


def predicted(options: Options) -> str:
    """The time model of `slipstream plan --ranks` against steps measured here, with rates measured in the same turns."""
    micros, turns = 8, options.num_rounds(5)
    names = {name: f"slipstream:mesh:{name}" for name in _MEASURED}
    sums = "slipstream:tp:sums"
    work = PREDICTED
    seconds, troubles = measure(work, ("compute:llama", sums, *names.values()), prepare(options.peers), micros, turns)
    block = (16 * work.width + 2) * work.width
    model = Model(
        blocks=work.depth,
        block_params=block,
        other_params=2 * work.vocab * work.width,
        width=work.width,
        heads=work.heads,
        length=work.length,
        batch=micros * work.batch,
    )
    rows, errors = [], []
    best: dict[str, list[float]] = {}
    for name, layout in _MEASURED.items():
        if names[name] in troubles:
            rows.append([name, troubles[names[name]]])
            continue
        ratios = []
        for turn in range(turns):
            one = Cluster(ranks=2, hosts=1, flops=1.0, inside=1e30, between=1e30, element=4)
            flops = cost_of(model, one, MeshLayout(1, 2, 1, 1, 1, "1f1b", 2, False)).compute / seconds["compute:llama"][turn]
            hidden = work.batch * work.length * work.width * 4
            link = 4 * work.depth * hidden / seconds[sums][turn]
            cost = cost_of(model, dataclasses.replace(one, flops=flops, inside=link, between=link), layout)
            ratios.append(cost.seconds / seconds[names[name]][turn])
            best.setdefault(name, []).append(cost.seconds)
        spread, taken = Spread.of(ratios), Spread.of(seconds[names[name]])
        errors.append(max(spread.median, 1 / spread.median))
        rows.append([name, taken.show(), f"{statistics.median(best[name]):.3f}", spread.show(2)])
    proposed = min(best, key=lambda name: statistics.median(best[name]))
    fastest = min(statistics.median(seconds[names[name]]) for name in best)
    chosen = statistics.median(seconds[names[proposed]])
    return "\n\n".join(
        (
            f"A Llama of width {work.width}, depth {work.depth}, 8 micro-batches of {work.batch}x{work.length} tokens, fp32, "
            "two ranks. Arithmetic and the link are those of `compute:llama` and the sums of slices in the same turn.",
            table(["layout", "measured, s", "predicted, s", "predicted over measured"], rows),
            verdicts(
                [
                    verdict("worst ratio of predicted and measured", max(errors), 1.15),
                    verdict(f"the proposed layout ({proposed}) over the fastest", chosen / fastest, 1.05),
                ]
            ),
        )
    )
