"""The leg on experts: a layer over a dense one with the same active products, peers over ours, and a GPT's step on two ranks.

All contenders stay alive and take turns of one step each, in both directions; a layer's have one process and thread.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.experts_worker import EXPERTS, GATED, TOKENS, TOP, WIDTH
from benchmarks.legs import Options
from benchmarks.peers import Peers, prepare
from benchmarks.ranks import Ranks, Seat
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.wire import NoNetwork, network
from benchmarks.worker import Failed
from benchmarks.workloads import Workload

PLAIN = ("dense", "slipstream", "deepspeed", "deepspeed:drops")
SKEWED = ("dense", "slipstream, skewed", "deepspeed, skewed")
HALF = ("dense, bf16", "slipstream, bf16", "deepspeed, bf16")
GATED_ONES = ("dense:gated", "slipstream:gated", "mixtral:grouped_mm", "mixtral:eager")
RATE = "200mbit"
SHAPES = ((8, 1), (8, 2), (16, 1), (16, 2))
WORK = Workload(name="experts", width=512, depth=6, heads=8, vocab=2048, batch=4, length=256)


def turns(
    target: str,
    systems: Sequence[str],
    arguments: Mapping[str, Any],
    world: int,
    peers: Peers,
    count: int,
    seat: Seat | None = None,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each contender, turn by turn; and of those that failed, why."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    troubles: dict[str, str] = {}
    with ExitStack() as stack:
        alive: dict[str, Ranks] = {}
        for name in systems:
            is_peer = name.startswith("deepspeed")
            if is_peer and peers.python is None:
                troubles[name] = peers.missing
                continue
            place: dict[str, Any] = {"seat": seat} | ({"python": peers.python, "env": peers.env()} if is_peer else {})
            try:
                ranks = stack.enter_context(
                    Ranks(f"benchmarks.experts_worker:{target}", {"system": name, **arguments}, world, name=name, **place)
                )
                ranks.call("steps", count=2)
                alive[name] = ranks
            except Failed as error:
                print(error)
                troubles[name] = error.reason
        for turn in range(count):
            for name, ranks in list(alive.items())[:: 1 if turn % 2 == 0 else -1]:
                seconds[name].append(max(statistics.mean(reply["times"]) for reply in ranks.call("steps", count=1)))
    return seconds, troubles


def run(options: Options) -> str:
    peers = prepare(options.peers)
    count = options.num_rounds(9)
    rows, judged, floors = [], [], list[tuple[float, str]]()
    for num_experts, k in SHAPES[: 1 if options.quick else None]:
        for names in (PLAIN, SKEWED, HALF, GATED_ONES):
            seconds, troubles = turns("layer", names, {"num_experts": num_experts, "k": k}, 1, peers, count)
            dense, ours = seconds[names[0]], seconds[names[1]]
            for name in names:
                shape = [str(num_experts), str(k), name]
                if name in troubles:
                    rows.append([*shape, troubles[name]])
                    continue
                over = [Spread.ratio(seconds[name], other).show(2) for other in (dense, ours)]
                rows.append([*shape, Spread.of(seconds[name]).show(), *over])
            which = f"{num_experts} experts, top-{k}"
            if names is not GATED_ONES:
                kind = names[1].partition(", ")[2]
                which += f", {kind}" if kind else ""
                judged.append(verdict(f"{which}: over the dense layer", Spread.ratio(ours, dense).median, 1.15))
                if names[2] not in troubles:
                    gain = Spread.ratio(seconds[names[2]], ours).median
                    floors.append((Spread.ratio(seconds[names[2]], dense).median, which))
                    judged.append(verdict(f"{which}: DeepSpeed's over ours", gain, 2.0, at_least=True))
            else:
                gains = [Spread.ratio(seconds[name], ours).median for name in names[2:] if name not in troubles]
                if gains:
                    judged.append(verdict(f"{which}: the better of transformers' over ours", min(gains), 1.2, at_least=True))
        print(f"  experts {num_experts}, top-{k}: done", flush=True)
    seconds, _ = turns("model", ("dense", "swap", "ep", "local"), {"work": dataclasses.asdict(WORK)}, 2, peers, count)
    ideal = [a + b for a, b in zip(seconds["dense"], seconds["swap"], strict=True)]
    steps = [[name, Spread.of(values).show(), Spread.ratio(values, ideal).show(2)] for name, values in seconds.items()]
    judged.append(verdict("GPT, EP 2: over the dense step and the exchanges", Spread.ratio(seconds["ep"], ideal).median, 1.2))
    return "\n\n".join(
        (
            f"One layer, {TOKENS:,} tokens of {WIDTH} features, fp32, one thread: forward and backward, median (min-max) of "
            f"{count} turns. Experts of {4 * WIDTH:,} features (GELU), or {GATED:,} gated (SiLU); `dense` has the products of k "
            f"experts, `mixtral` is transformers' block. DeepSpeed pads all experts to the fullest one, or (drops) to a capacity "
            f"of 1. {peers}.",
            table(["experts", "k", "contender", "s", "over dense", "over ours"], rows),
            _floor(floors),
            f"{WORK.describe()}, fp32, ZeRO-1, 2 ranks: dense, or {EXPERTS} experts of half of its MLP, top-{TOP}, split over the "
            "ranks (ep) or on both (local). swap: the all-to-alls of a step alone.",
            table(["contender", "s", "over dense + swap"], steps),
            verdicts(judged),
        )
    )


def _floor(floors: Sequence[tuple[float, str]]) -> str:
    if not floors:
        return "DeepSpeed was not measured."
    least, most = min(floors), max(floors)
    return (
        f"The dense layer's products, which are computed as ours, are the floor of every layer of experts. DeepSpeed's takes "
        f"{least[0]:.2f} ({least[1]}) to "
        f"{most[0]:.2f} ({most[1]}) of the dense layer's time: a layer that added nothing to the products would be so many times "
        "as fast as DeepSpeed's, and none can be faster than that."
    )


def bytes_sent(options: Options) -> str:
    """Bytes of a layer whose experts are split over ranks in network namespaces, counted by the kernel, over the exact formula."""
    peers = prepare(options.peers)
    rows, judged = [], []
    for world in (2, 4):
        for system in ("slipstream:gloo", "deepspeed"):
            is_peer = system == "deepspeed"
            if is_peer and peers.python is None:
                rows.append([str(world), system, peers.missing])
                continue
            place: dict[str, Any] = {"python": peers.python, "env": peers.env()} if is_peer else {}
            arguments = {"system": system, "num_experts": EXPERTS, "k": TOP}
            try:
                with (
                    network(world) as (seat, counters),
                    Ranks("benchmarks.experts_worker:split", arguments, world, name=system, seat=seat, **place) as ranks,
                ):
                    ranks.call("steps", count=1)
                    before = [int(counter.read_text()) for counter in counters]
                    formula = [reply["bytes"] for reply in ranks.call("steps", count=2)]
                    sent = [(int(counter.read_text()) - at) / 2 for counter, at in zip(counters, before, strict=True)]
            except NoNetwork as error:
                return f"Not measured: {error}."
            except Failed as error:
                print(error)
                rows.append([str(world), system, error.reason])
                continue
            over = sum(sent) / sum(formula)
            rows.append([str(world), system, f"{sum(formula) / 1e6:.2f}", f"{sum(sent) / 1e6:.2f}", f"{over:.3f}"])
            if not is_peer:
                judged.append(verdict(f"bytes over the formula, EP {world}", over, 1.02, digits=3))
    return "\n\n".join(
        (
            f"Forward and backward of a layer of {EXPERTS} experts, top-{TOP}, {TOKENS:,} tokens of {WIDTH} features on each "
            "rank, fp32, gloo, a network namespace for each rank. Formula: each row that leaves its rank, there and back, and its "
            "gradient the same way. Sent: all ranks, counted by the kernel, with counts of rows, barriers and packet headers. "
            f"DeepSpeed pads to the fullest expert. {peers}.",
            table(["ranks", "contender", "formula, MB", "sent, MB", "over it"], rows),
            verdicts(judged),
        )
    )


def beside(options: Options) -> str:
    """Seconds of a layer whose experts are split over two ranks: ours and DeepSpeed's."""
    peers, count = prepare(options.peers), options.num_rounds(9)
    rows, judged = [], []
    for num_experts, k in SHAPES[: 1 if options.quick else None]:
        arguments = {"num_experts": num_experts, "k": k}
        seconds, troubles = turns("split", ("slipstream", "slipstream:gloo", "deepspeed"), arguments, 2, peers, count)
        for name, values in seconds.items():
            shape = [str(num_experts), str(k), name]
            over = Spread.ratio(values, seconds["slipstream"]).show(2) if values else ""
            rows.append([*shape, Spread.of(values).show(), over] if values else [*shape, troubles[name]])
        if seconds["deepspeed"]:
            gain = Spread.ratio(seconds["deepspeed"], seconds["slipstream"]).median
            judged.append(verdict(f"{num_experts} experts, top-{k}, EP 2: DeepSpeed's over ours", gain, 2.0, at_least=True))
    return "\n\n".join(
        (
            f"A layer as in section experts whose experts are split over 2 ranks, {TOKENS:,} tokens on each, fp32, one thread "
            f"and core each; forward and backward, median (min-max) of {count} turns. {peers}.",
            table(["experts", "k", "contender", "s", "over ours"], rows),
            verdicts(judged),
        )
    )


def link(options: Options) -> str:
    """Rows of one layer, and its shared expert, over interfaces of 200 Mbit/s, in network namespaces."""
    names = ("in turn", "overlapped", "rows alone", "shared alone")
    try:
        with network(2, rate=RATE) as (seat, _):
            seconds, _ = turns("travel", names, {}, 2, prepare(options.peers), options.num_rounds(9), seat)
    except NoNetwork as error:
        return f"Not measured: {error}."
    rows = [[name, Spread.of(values).show(), Spread.ratio(values, seconds["in turn"]).show(2)] for name, values in seconds.items()]
    return "\n\n".join(
        (
            f"A layer of {EXPERTS} experts split over 2 ranks, top-{TOP}, {TOKENS // 4:,} tokens of {WIDTH} features a rank, and a "
            f"shared expert of {8 * WIDTH:,}; forward and backward, fp32, gloo, 200 Mbit/s per rank (network namespaces, tbf). In "
            "turn: the shared expert computes after the rows have come back.",
            "The shared expert hides the way to the experts, half of the bytes; a residual branch would hide the way back.",
            table(["contender", "s", "over in turn"], rows),
        )
    )
