"""The leg `convergence`: the time to a fixed loss over a slow link, on the text of `make train`.

A loss depends on the steps and not on the link, and the time of a step on its kind and not on the loss. So the losses come from
whole runs of two ranks without a limit, and the seconds of each kind of step from ranks in network namespaces behind a link,
limited or not, all kinds in turns. The time to a loss is the sum of the seconds of the steps before it.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.experts_quality import example
from benchmarks.legs import Options
from benchmarks.picture import Curve, draw
from benchmarks.ranks import Ranks, Seat
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.wire import NoNetwork, network
from benchmarks.worker import ROOT

if TYPE_CHECKING:
    from benchmarks.worker import Channel

SIZES = {"dim": 256, "layers": 4, "heads": 4, "hidden": 1024}
VOCAB, CONTEXT, BATCH, WORLD = 1024, 128, 4, 2
STEPS, QUICK_STEPS, EVERY, VALIDATION = 600, 24, 10, 64  # steps of a run, between validation losses; windows
RATE, WARMUP, FREEZE = 1.4e-3, 50, 0.15  # learning rate, its warm-up in steps, and the share of steps before the variance is frozen
LINKS = {"100 Mbit/s": "100mbit", "400 Mbit/s": "400mbit", "no limit": ""}  # of a rank, in tc's units
SLOWEST = next(iter(LINKS))
PICTURE = ROOT / "docs" / "convergence.svg"
LEGEND = ("Held-out loss over time, two ranks with 100 Mbit/s each", "seconds", "loss")
NEAR = 1.01  # the fixed loss, over the last of `AdamW, bf16`; the last losses of others shall not be above it
ADAMW = {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.99], "weight_decay": 0.1}}
INT4 = {"communication_data_type": "int4", "zero_optimization": {"stage": 0, "zeropp_loco_param": {}}}


LAMB = {"type": "Lamb", "params": {**ADAMW["params"], "lr": 2e-2}}  # type: ignore[dict-item]


def _onebit(freeze: int, of: dict[str, Any] = ADAMW) -> dict[str, Any]:
    return {"type": "OneBitLamb" if of is LAMB else "OneBitAdam", "params": {**of["params"], "freeze_step": freeze}}


PERIOD, OVERLAP = 16, 8  # local steps of a round, and those that go on while its differences travel
_ROUNDS = {"every": PERIOD, "outer_lr": 0.8, "outer_momentum": 0.4, "exchange": "int8", "overlap": OVERLAP}
LOCAL = {"slipstream": {"local_steps": _ROUNDS}}
# A kind of step: blocks of the JSON, steps before the first turn, steps of a turn
KINDS: Mapping[str, tuple[dict[str, Any], int, int]] = {
    "bf16": ({"optimizer": ADAMW}, 2, 3),
    "int4": ({"optimizer": ADAMW, **INT4}, 2, 3),
    "signs": ({"optimizer": _onebit(2)}, 4, 6),
    "LAMB": ({"optimizer": LAMB}, 2, 3),
    "LAMB's signs": ({"optimizer": _onebit(2, LAMB)}, 4, 6),
    "local": ({"optimizer": ADAMW, **LOCAL}, PERIOD, PERIOD),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """blocks: of a whole run's JSON, of `steps` steps; kinds: of its steps, from a first step on."""

    label: str
    kinds: Sequence[tuple[float, str]]  # from this share of the steps on
    longer: float = 1.0  # its steps, over those of the others: a run of more steps, each cheaper, may end sooner

    def blocks(self, steps: int) -> dict[str, Any]:
        kinds = [kind for _, kind in self.kinds]
        first = dict(KINDS[kinds[0]][0])
        if kinds[-1].endswith("signs"):
            first["optimizer"] = _onebit(int(FREEZE * steps), LAMB if kinds[0] == "LAMB" else ADAMW)
        return first

    def steps(self, usual: int) -> int:
        return round(self.longer * usual / EVERY) * EVERY

    def seconds(self, steps: float, total: int, of_kind: Mapping[str, float]) -> float:
        """Of the first `steps` of `total` steps."""
        ends = [*(share * total for share, _ in self.kinds[1:]), float(total)]
        return sum(
            max(0.0, min(steps, end) - share * total) * of_kind[kind] for (share, kind), end in zip(self.kinds, ends, strict=True)
        )


CONTENDERS = (
    Contender(label="AdamW, bf16", kinds=[(0, "bf16")]),
    Contender(label="AdamW, int4", kinds=[(0, "int4")]),
    Contender(label="1-bit Adam", kinds=[(0, "bf16"), (FREEZE, "signs")], longer=1.05),
    Contender(label="1-bit Adam, int4 before", kinds=[(0, "int4"), (FREEZE, "signs")], longer=1.05),
    Contender(label="LAMB, bf16", kinds=[(0, "LAMB")]),
    Contender(label="1-bit LAMB", kinds=[(0, "LAMB"), (FREEZE, "LAMB's signs")], longer=1.05),
    Contender(label="DiLoCo, int8", kinds=[(0, "local")], longer=1.15),
)


def train(channel: Channel, folder: str, seed: int, steps: int, blocks: dict[str, Any], transport: str) -> None:
    """The target of a rank."""
    torch.set_num_threads(1)
    import slipstream

    data, models = example("data"), example("model")
    corpus = data.load(Path(folder), CONTEXT)
    torch.manual_seed(seed)
    model: nn.Module = models.LanguageModel(models.ModelConfig(vocab_size=corpus.tokenizer.get_vocab_size(), **SIZES))
    schedule = {
        "total_num_steps": steps,
        "warmup_num_steps": min(WARMUP, steps // 3),
        "warmup_type": "linear",
        "cos_min_ratio": 0.05,
    }
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        **blocks,
        "slipstream": {"transport": transport, **blocks.get("slipstream", {})},
    }
    engine = slipstream.initialize(model=model, config=config)[0]
    rank, windows = dist.get_rank(), corpus.train()
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()
    share = BATCH * WORLD
    batches = itertools.cycle(order[i + rank * BATCH :][:BATCH] for i in range(0, len(order) - share, share))
    held_out = corpus.validation(VALIDATION // WORLD, rank, WORLD)[0]

    def evaluate() -> float:
        engine.eval()
        with torch.no_grad():
            loss = float(engine(*held_out))
        engine.train()
        return loss

    def run(count: int) -> list[float]:
        """Validation losses of this rank's windows after every EVERY steps."""
        losses = []
        for step in range(1, count + 1):
            tokens, targets = (torch.stack(each) for each in zip(*map(windows.__getitem__, next(batches)), strict=True))
            engine.backward(engine(tokens, targets))
            engine.step()
            if step % EVERY == 0:
                losses.append(evaluate())
        return losses

    def timed(count: int) -> float:
        """Seconds per step."""
        began = time.perf_counter()
        for _ in range(count):
            tokens, targets = (torch.stack(each) for each in zip(*map(windows.__getitem__, next(batches)), strict=True))
            engine.backward(engine(tokens, targets))
            engine.step()
        return (time.perf_counter() - began) / count

    channel.serve({"run": run, "timed": timed})


def ranks(folder: Path, seed: int, steps: int, blocks: Mapping[str, Any], name: str, seat: Seat | None = None) -> Ranks:
    transport = "auto" if seat is None else "gloo"
    arguments = {"folder": str(folder), "seed": seed, "steps": steps, "blocks": blocks, "transport": transport}
    return Ranks("benchmarks.convergence:train", arguments, WORLD, name=name, seat=seat)


def curve(folder: Path, seed: int, steps: int, contender: Contender) -> list[float]:
    """Validation losses after every EVERY steps, means of three."""
    with ranks(folder, seed, steps, contender.blocks(steps), contender.label) as running:
        of_ranks = running.call("run", count=steps)
    losses = [statistics.mean(each) for each in zip(*of_ranks, strict=True)]
    return [statistics.mean(losses[max(i - 2, 0) : i + 1]) for i in range(len(losses))]


def steps_to(loss: float, losses: Sequence[float]) -> float:
    """The step, between two measured ones by a line; infinite if no loss is as low."""
    for i, after in enumerate(losses):
        if after <= loss:
            before = losses[i - 1] if i else after
            return EVERY * (i + 1 - ((loss - after) / (before - after) if before > loss else 0))
    return float("inf")


def timed(folder: Path, rate: str, rounds: int) -> tuple[dict[str, Spread], dict[str, float]]:
    """Seconds per step of each kind over links of a rate, and MB that the busiest rank sends in it. Raises NoNetwork and Failed."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    sent: dict[str, float] = {}
    with ExitStack() as stack:
        running = {}
        for kind, (blocks, first, _) in KINDS.items():
            seat, counters = stack.enter_context(network(WORLD, rate))
            running[kind] = stack.enter_context(ranks(folder, 0, STEPS, blocks, kind, seat)), counters
            running[kind][0].call("timed", count=first)
        for _ in range(rounds):
            for kind, (workers, counters) in running.items():
                count = KINDS[kind][2]
                before = [int(counter.read_text()) for counter in counters]
                seconds[kind].append(max(workers.call("timed", count=count)))
                after = [int(counter.read_text()) for counter in counters]
                sent[kind] = max(b - a for a, b in zip(before, after, strict=True)) / count / 1e6
    return {kind: Spread.of(values) for kind, values in seconds.items()}, sent


def _over_time(curves: Mapping[str, Sequence[Sequence[float]]], steps: int, of_kind: Mapping[str, float]) -> dict[str, Curve]:
    """The mean losses of all seeds, by the seconds of the steps before."""
    seconds = {each.label: partial(each.seconds, total=each.steps(steps), of_kind=of_kind) for each in CONTENDERS}
    return {
        label: [(seconds[label]((i + 1) * EVERY), statistics.mean(each)) for i, each in enumerate(zip(*losses, strict=True))]
        for label, losses in curves.items()
    }


def run(options: Options) -> str:
    steps, seeds = QUICK_STEPS if options.quick else STEPS, options.num_rounds(3)
    data = example("data")
    curves: dict[str, list[list[float]]] = {each.label: [] for each in CONTENDERS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = data.prepare(data.standard_library(), Path(scratch), VOCAB)
        try:
            links = {link: timed(folder, rate, 1 if options.quick else 3) for link, rate in LINKS.items()}
        except NoNetwork as error:
            return f"Not measured: {error}."
        for seed in range(seeds):
            for each in CONTENDERS:
                curves[each.label].append(curve(folder, seed, each.steps(steps), each))
                print(f"  convergence, seed {seed}: {each.label} {curves[each.label][-1][-1]:.3f}", flush=True)
    if not options.quick:
        of_kind = {kind: spread.median for kind, spread in links[SLOWEST][0].items()}
        PICTURE.write_text(draw(_over_time(curves, steps, of_kind), *LEGEND))
    base, rows, faster, gaps = CONTENDERS[0], [], {}, {}
    goals = [NEAR * losses[-1] for losses in curves[base.label]]
    for each in CONTENDERS:
        gap = statistics.mean(own[-1] / dense[-1] for own, dense in zip(curves[each.label], curves[base.label], strict=True)) - 1
        gaps[each.label] = 100 * gap
        reached = [steps_to(goal, own) for goal, own in zip(goals, curves[each.label], strict=True)]
        row = [each.label, f"{gaps[each.label]:+.2f} %", Spread.of(reached).show(0)]
        for link, (seconds, _) in links.items():
            of_kind = {kind: spread.median for kind, spread in seconds.items()}
            total = each.steps(steps)
            times = [each.seconds(count, total, of_kind) if count <= total else float("inf") for count in reached]
            dense = [base.seconds(steps_to(goal, own), steps, of_kind) for goal, own in zip(goals, curves[base.label], strict=True)]
            faster[each.label, link] = Spread.ratio(dense, times)
            row += [Spread.of(times).show(0), faster[each.label, link].show(1)]
        rows.append(row)
    kinds = [
        [kind, *(cell for seconds, sent in links.values() for cell in (seconds[kind].show(), f"{sent[kind]:.3f}"))]
        for kind in KINDS
    ]
    judged = [
        verdict(f"{label}: faster to the loss, {SLOWEST}", faster[label, SLOWEST].median, target, at_least=True)
        for label, target in (("1-bit Adam", 3.3), ("1-bit Adam, int4 before", 3.3), ("DiLoCo, int8", 10))
    ]
    judged += [
        verdict(f"{each.label}: last loss over `{base.label}`'s, %", gaps[each.label], 100 * (NEAR - 1))
        for each in CONTENDERS
        if each is not base
    ]
    heads = [cell for link in LINKS for cell in (f"s, {link}", "faster")]
    model = f"width {SIZES['dim']}, {SIZES['layers']} layers, MLPs of {SIZES['hidden']} features, {VOCAB:,} tokens"
    return "\n\n".join(
        (
            f"A Llama ({model}), bf16, stage 0, {WORLD} ranks of {BATCH * CONTEXT} tokens, {steps} steps of the text of `make "
            f"train`, cosine schedule, {seeds} seeds. `1-bit Adam` and `1-bit LAMB` freeze variances after {100 * FREEZE:.0f} "
            f"% of the steps; `DiLoCo` exchanges how far weights have moved after {PERIOD} local steps, and takes {OVERLAP} more "
            f"meanwhile. They run 5 % and 15 % more steps, and have schedules of that length. Last loss: mean of the seeds over "
            f"`{base.label}`'s, on {VALIDATION * CONTEXT:,} held-out tokens. The fixed loss is {NEAR} times the last of "
            f"`{base.label}`; steps, seconds and how many times faster than `{base.label}` are medians of the seeds. Losses are of "
            f"runs without a limit.",
            table(["optimizer, reduction", "last loss", "steps", *heads], rows),
            "Seconds per step of each kind (network namespaces, tbf), and MB that a rank sends in it:",
            table(["step", *(cell for link in LINKS for cell in (f"s, {link}", "MB"))], kinds),
            verdicts(judged),
        )
    )
