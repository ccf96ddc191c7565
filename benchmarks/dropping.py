"""The leg `dropping`: progressive layer dropping's time and bytes at the end of its schedule, and its loss at equal samples.

Blocks that are kept at last, with theta 0.5 and L blocks: 1 - (L + 1) / (4 L) of them. Bytes are those of a step at stage 3, which
gathers and reduces only what it computes, but for what is outside of the blocks.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.experts_quality import example
from benchmarks.legs import Options
from benchmarks.ranks import Ranks
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.wire import NoNetwork, network
from benchmarks.worker import Failed, Worker

if TYPE_CHECKING:
    from benchmarks.worker import Channel

LAYERS, THETA = 12, 0.5
MOST, GAMMA = 0.77, 1e6  # of dense's time per sample; from the first step on theta is the limit
KEPT = 1 - (1 - THETA) * (LAYERS + 1) / (2 * LAYERS)
WIDE = {"dim": 256, "layers": LAYERS, "heads": 4, "hidden": 1024}  # for time and bytes
SMALL = {"dim": 96, "layers": LAYERS, "heads": 4, "hidden": 384}  # for losses
VOCAB, CONTEXT, BATCH, RATE, WARMUP, POINTS = 1024, 128, 4, 1e-3, 50, 20
CONTENDERS = {
    "dense": (False, 1),
    "dropping": (True, 1),
    "dense, twice the rate": (False, 2),
    "dropping, twice the rate": (True, 2),
}
PAIRS = tuple(zip(*[iter(CONTENDERS)] * 2, strict=True))
STEPS, QUICK_STEPS = 500, 20
FIRST, COUNT = 2, 16


def _config(drops: bool, rate: float, gamma: float, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "progressive_layer_drop": {"enabled": drops, "theta": THETA, "gamma": gamma},
        "steps_per_print": 2**31,
        **more,
    }


def steps(channel: Channel, drops: bool) -> None:
    """The target of a rank: its handler makes steps at the end of the schedule."""
    torch.set_num_threads(1)
    import slipstream

    models = example("model")
    torch.manual_seed(0)
    model = models.LanguageModel(models.ModelConfig(vocab_size=VOCAB, **WIDE))
    more = {"zero_optimization": {"stage": 3}, "slipstream": {"transport": "gloo"}} if "RANK" in os.environ else {}
    engine = slipstream.initialize(model=model, config=_config(drops, RATE, GAMMA, **more))[0]
    tokens = torch.randint(VOCAB, (BATCH, CONTEXT))

    def run(count: int) -> dict[str, list[float]]:
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            engine.backward(engine(tokens, tokens))
            engine.step()
            times.append(time.perf_counter() - begin)
        return {"times": times}

    channel.serve({"steps": run})


def train(channel: Channel, drops: bool, times_rate: int, folder: str, seed: int, count: int) -> None:
    """A worker's target: the validation loss at equal distances of steps."""
    torch.set_num_threads(1)
    import slipstream

    corpus = example("data").load(Path(folder), CONTEXT)
    models = example("model")
    torch.manual_seed(seed)
    model = models.LanguageModel(models.ModelConfig(vocab_size=corpus.tokenizer.get_vocab_size(), **SMALL))
    rate = RATE * times_rate
    schedule = {"warmup_num_steps": WARMUP, "total_num_steps": count, "warmup_max_lr": rate, "warmup_type": "linear"}
    # theta is 0.52 after half of the steps
    config = _config(drops, rate, 6.0 / count, scheduler={"type": "WarmupDecayLR", "params": schedule}, slipstream={"seed": seed})
    engine = slipstream.initialize(model=model, config=config)[0]
    windows = corpus.train()
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()
    batches = itertools.cycle(order[i : i + BATCH] for i in range(0, len(order) - BATCH, BATCH))
    held_out = corpus.validation(64, 0, 1)[0]

    def run() -> list[float]:
        losses = []
        for step in range(1, count + 1):
            tokens, targets = (torch.stack(each) for each in zip(*map(windows.__getitem__, next(batches)), strict=True))
            engine.backward(engine(tokens, targets))
            engine.step()
            if step % max(1, count // POINTS) == 0:
                engine.eval()
                with torch.no_grad():
                    losses.append(float(engine(*held_out)))
                engine.train()
        return losses

    channel.serve({"run": run})


def run(options: Options) -> str:
    count = QUICK_STEPS if options.quick else STEPS
    seconds = _take_turns(options.num_rounds(5))
    share = Spread.ratio(seconds["dropping"], seconds["dense"])
    judged = [verdict(f"time per sample, theta {THETA}, {LAYERS} blocks ({KEPT:.2f} are kept)", share.median, MOST)]
    rows = [[name, Spread.of(times).show()] for name, times in seconds.items()]
    told, sent = _bytes(options)
    if sent is not None:
        kept = _drawn()  # the target allows as much beside the blocks as that of time does
        judged.append(verdict(f"bytes sent at stage 3 over dense ({kept:.2f} are kept)", sent, round(kept + MOST - KEPT, 2)))
    losses = _losses(options, count)
    last = {name: [curve[-1] for curve in curves] for name, curves in losses.items()}
    goal = last["dense"]
    over = statistics.median(mine / other for mine, other in zip(last["dropping"], goal, strict=True))
    judged.append(verdict("loss at equal samples over dense", over, 1.02, digits=3))
    curves = []
    for name, each in losses.items():
        needed = [reaches(curve, loss) for curve, loss in zip(each, goal, strict=True)]
        shown = ["never" if share > 1 else f"{share:.2f}" for share in needed]
        curves.append([name, ", ".join(f"{loss:.3f}" for loss in last[name]), ", ".join(shown)])
    return "\n\n".join(
        (
            f"GPTs of {LAYERS} blocks on the text of `make train`, fp32, one thread. Seconds of a step of {BATCH * CONTEXT} tokens "
            f"(width {WIDE['dim']}) at the end of the schedule, means of {COUNT} steps, medians of turns:",
            table(["contender", "s"], rows),
            told,
            f"Held-out losses after {count} steps (width {SMALL['dim']}; gamma {6.0 / count:.3f}), and the share of samples after "
            "which a run reaches `dense`'s last loss, by seed:",
            table(["contender", "last loss", "samples to dense's last loss"], curves),
            verdicts(judged),
        )
    )


def _take_turns(rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"dense": [], "dropping": []}
    with ExitStack() as stack:
        workers = {}
        for name in seconds:
            worker = Worker("benchmarks.dropping:steps", {"drops": name == "dropping"}, name=name)
            stack.callback(worker.close)
            worker.ready()
            workers[name] = worker
        for turn in range(-1, rounds):
            for name, worker in workers.items():
                worker.ask("steps", count=COUNT)
                times = worker.answer()["times"]
                if turn >= 0:
                    seconds[name].append(statistics.mean(times))
    return seconds


def _drawn() -> float:
    """The share of the blocks that the steps of `_bytes` keep."""
    from slipstream.train.layer_drop import LayerDrop

    drop = LayerDrop(THETA, GAMMA, 0)
    drop.blocks = {torch.nn.Identity(): (i, i / LAYERS) for i in range(1, LAYERS + 1)}
    return 1 - statistics.mean(len(drop.draw(step, 0)) / LAYERS for step in range(FIRST, FIRST + COUNT))


def _bytes(options: Options) -> tuple[str, float | None]:
    """Bytes of a step of two ranks at stage 3, in words, and their share of dense; None if they were not measured."""
    sent: dict[str, float] = {}
    try:
        for name in ("dense", "dropping"):
            with network(2) as (seat, counters):
                target = "benchmarks.dropping:steps"
                with Ranks(target, {"drops": name == "dropping"}, 2, name=name, seat=seat) as ranks:
                    ranks.call("steps", count=FIRST)
                    before = [int(counter.read_text()) for counter in counters]
                    ranks.call("steps", count=COUNT)
                    after = [int(counter.read_text()) for counter in counters]
                    sent[name] = max(b - a for a, b in zip(before, after, strict=True)) / COUNT
    except NoNetwork as error:
        return f"Bytes at stage 3 were not measured: {error}.", None
    except Failed as error:
        return f"Bytes at stage 3 were not measured: {error.reason}.", None
    figures = ", ".join(f"{name} {nbytes / 1e6:.2f} MB" for name, nbytes in sent.items())
    share = sent["dropping"] / sent["dense"]
    return f"Sent by a rank of two in a step at stage 3: {figures} ({share:.2f} of dense; {COUNT} draws).", share


def _losses(options: Options, count: int) -> dict[str, list[list[float]]]:
    """Validation curves by contender and seed; two contenders train at once."""
    curves: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    data = example("data")
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        folder = data.prepare(data.standard_library(), Path(scratch), VOCAB)
        for seed, names in itertools.product(range(options.num_rounds(3)), PAIRS):
            with ExitStack() as stack:
                workers = {}
                for name, core in zip(names, cores, strict=False):
                    drops, times_rate = CONTENDERS[name]
                    arguments = {"drops": drops, "times_rate": times_rate, "folder": str(folder), "seed": seed, "count": count}
                    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
                    workers[name] = Worker("benchmarks.dropping:train", arguments, name=name, core=core, env=env)
                    stack.callback(workers[name].close)
                for worker in workers.values():
                    worker.ready()
                    worker.ask("run")
                for name, worker in workers.items():
                    curves[name].append(worker.answer(timeout=900))
                    print(f"  dropping, seed {seed}: {name} {curves[name][-1][-1]:.3f}", flush=True)
    return curves


def reaches(curve: list[float], loss: float) -> float:
    """The share of the run after which its loss is as low; above 1 if it never is."""
    return next(((i + 1) / len(curve) for i, value in enumerate(curve) if value <= loss), 2.0)
