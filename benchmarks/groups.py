"""The leg `groups`: what crosses the link between two groups of ranks, the seconds of a step, and the loss, of ZeRO++ and ZeRO-3.

Two bridges with two ranks each, joined by one link, which is limited and counts (benchmarks/wire.py). Losses are those of a small
GPT on the text of `make train`, with the same batches and seeds, over gloo without a limit.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import systems
from benchmarks.compressed import WORK
from benchmarks.experts_quality import BATCH, CONTEXT, RATE, VOCAB, WARMUP, build, example
from benchmarks.legs import Options
from benchmarks.ranks import Ranks
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.step import start
from benchmarks.wire import NoNetwork, two_groups
from benchmarks.worker import Failed

if TYPE_CHECKING:
    from benchmarks.worker import Channel

WORLD, LINK = 4, "400mbit"
ZERO3, ZEROPP = "slipstream:3:gloo", "slipstream:3:gloo:groups"
CONTENDERS = (ZERO3, "slipstream:3:gloo:zeropp", "slipstream:3:gloo:hpz", ZEROPP)
FIRST, COUNT = 2, 2  # steps before the first turn, and of a turn
STEPS, QUICK_STEPS, VALIDATION = 200, 5, 64
FEWER, LOSS = 3.8, 1.01


def run(options: Options) -> str:
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    crossed: dict[str, float] = {}
    try:
        with ExitStack() as stack:
            running = {}
            for name in CONTENDERS:
                seat, counters = stack.enter_context(two_groups(WORLD, LINK))
                running[name] = (stack.enter_context(start(name, WORK, "bf16", WORLD, None, seat)), counters)
                running[name][0].call("steps", count=FIRST)
            for turn in range(rounds := options.num_rounds(2)):
                for name, (ranks, counters) in running.items():
                    before = sum(int(counter.read_text()) for counter in counters)
                    done = ranks.call("steps", count=COUNT)
                    crossed[name] = (sum(int(counter.read_text()) for counter in counters) - before) / COUNT
                    seconds[name] += [max(rank["times"][i] for rank in done) for i in range(COUNT)]
                    print(
                        f"  groups {turn + 1}/{rounds} {name}: {seconds[name][-1]:.2f} s, {crossed[name] / 1e6:.2f} MB", flush=True
                    )
        losses = _losses(QUICK_STEPS if options.quick else STEPS, options.num_rounds(2))
    except NoNetwork as error:
        return f"Not measured: {error}."
    except Failed as error:
        return f"Not measured: {error.reason}."
    rows = [
        [
            systems.label(name),
            f"{crossed[name] / 1e6:.2f}",
            f"{crossed[ZERO3] / crossed[name]:.2f}",
            Spread.of(seconds[name]).show(),
            Spread.ratio(seconds[ZERO3], seconds[name]).show(),
        ]
        for name in CONTENDERS
    ]
    ratios = [ours / zero3 for zero3, ours in losses]
    steps = QUICK_STEPS if options.quick else STEPS
    return "\n\n".join(
        (
            f"{WORK.describe()}, bf16, {WORLD} ranks in two groups joined by a link of 400 Mbit/s each way. MB per step that cross "
            f"the link, both ways and packet headers included; seconds per step of the slowest rank, median (min-max) of "
            f"{rounds * COUNT} steps.",
            table(["contender", "across groups, MB", "fewer", "s", "faster"], rows),
            f"Held-out loss after {steps} steps of a small GPT on the text of `make train`, {WORLD} x {BATCH * CONTEXT} tokens per "
            "step, nats per token:",
            table(
                ["seed", "ZeRO-3", "ZeRO++", "over it"],
                [[str(i), f"{zero3:.3f}", f"{ours:.3f}", f"{ours / zero3 - 1:+.2%}"] for i, (zero3, ours) in enumerate(losses)],
            ),
            verdicts(
                [
                    verdict("ZeRO++: times fewer bytes across two groups", crossed[ZERO3] / crossed[ZEROPP], FEWER, at_least=True),
                    verdict("ZeRO++: loss over ZeRO-3's, median of the seeds", statistics.median(ratios), LOSS, digits=4),
                ]
            ),
        )
    )


def _losses(steps: int, seeds: int) -> list[tuple[float, float]]:
    """Per seed, ZeRO-3's and ZeRO++'s. Raises Failed."""
    data, losses = example("data"), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = data.prepare(data.standard_library(), Path(scratch), VOCAB)
        for seed in range(seeds):
            pair = []
            for name in (ZERO3, ZEROPP):
                arguments = {"system": name, "folder": str(folder), "seed": seed}
                with Ranks("benchmarks.groups:learn", arguments, WORLD, name=name) as ranks:
                    pair.append(float(ranks.call("learn", timeout=600.0, steps=steps)[0]))
            print(f"  seed {seed}: {pair[0]:.3f} and {pair[1]:.3f} nats", flush=True)
            losses.append((pair[0], pair[1]))
    return losses


def learn(channel: Channel, system: str, folder: str, seed: int) -> None:
    """The target of a rank: trains, and returns the held-out loss."""
    torch.set_num_threads(1)
    import slipstream

    corpus, rank = example("data").load(Path(folder), CONTEXT), int(os.environ["RANK"])
    torch.manual_seed(seed)
    schedule = {"warmup_num_steps": WARMUP, "warmup_max_lr": RATE, "warmup_type": "linear"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": schedule},
        "zero_optimization": {"stage": 3},
        "slipstream": {"transport": "gloo"},
        "steps_per_print": 2**31,
        **systems.COMPRESSED.get(system.rpartition(":")[2], {}),
    }
    engine = slipstream.initialize(model=build("dense", corpus.tokenizer.get_vocab_size()), config=config)[0]
    windows = corpus.train()
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = corpus.validation(VALIDATION, 0, 1)[0]

    def steps_of(steps: int) -> float:
        for step in range(steps):
            chosen = [order[(step * WORLD * BATCH + rank * BATCH + i) % len(order)] for i in range(BATCH)]
            tokens, targets = (torch.stack(each) for each in zip(*map(windows.__getitem__, chosen), strict=True))
            engine.backward(engine(tokens, targets))
            engine.step()
        engine.eval()
        with torch.no_grad():
            return float(engine(*held_out))

    channel.serve({"learn": steps_of})
