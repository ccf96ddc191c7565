"""The legs `experts-quality`, `-shared`, `-wide` and `experts-pyramid`: losses of small GPTs that train for equal time.

The text is that of `make train`.

Two contenders train at once, each in a process on a core of its own, and change cores with each seed. Rates are constant after a
warm-up, so a curve says what a shorter run would have reached. The clock stands while the validation loss is measured.

dense    the example's GPT
moe      each MLP is 8 experts of half of its features, of which a token uses 2: the same active parameters
shared   each MLP is one of half of its features and 1 of 8 such experts: the same active parameters
pyramid  PR-MoE (arXiv:2201.05596): each MLP is a dense one of half of its features and 1 of 2 or, in the last layer, 4 such experts
"""

from __future__ import annotations

import importlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from benchmarks.worker import ROOT, Worker

if TYPE_CHECKING:
    from benchmarks.worker import Channel

EXAMPLE = ROOT / "examples" / "pretrain"
DEPTH, HEAD = 3, 32
VOCAB, CONTEXT, BATCH, RATE, WARMUP = 1024, 128, 4, 2e-3, 50
SECONDS, QUICK_SECONDS, CURVE = 60.0, 3.0, 20  # of training; points of a curve
VALIDATION = 64  # windows
TARGET = 0.7  # of the dense model's time


class Curve(NamedTuple):
    """One run: validation losses at equal distances of time."""

    times: list[float]
    losses: list[float]
    steps: int
    parameters: int
    counts: list[int] = []  # noqa: RUF012 (never written): steps at each point

    @property
    def smooth(self) -> list[float]:
        """Means of three points."""
        return [statistics.mean(self.losses[max(i - 2, 0) : i + 1]) for i in range(len(self.losses))]

    def at(self, step: int) -> float:
        """The smoothed loss after so many steps."""
        points = zip(itertools.pairwise(self.counts), itertools.pairwise(self.smooth), strict=True)
        for (first, last), (before, after) in points:
            if step <= last:
                return before + (after - before) * (step - first) / max(last - first, 1)
        return self.smooth[-1]

    def reaches(self, loss: float) -> float:
        """The seconds after which the smoothed loss is as low; infinite if it never is."""
        points = list(zip(self.times, self.smooth, strict=True))
        for (t0, before), (t1, after) in itertools.pairwise(points):
            if after <= loss:
                return t0 + (t1 - t0) * (before - loss) / (before - after) if before > loss else t0
        return float("inf")


def example(module: str) -> Any:
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module(module)


class Mixture(nn.Module):
    """A layer of experts in place of an MLP."""

    def __init__(self, config: Any, num_experts: int, k: int, beside: str = "") -> None:
        from slipstream.moe import MoE

        super().__init__()
        half = example("model").MLP
        dense: dict[str, Any] = {beside: half(config, 2)} if beside else {}  # shared or residual
        self.moe = MoE(config.dim, lambda: half(config, 2), num_experts, k=k, balance_rate=1e-3, **dense)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.moe(x)[0]
        return out


def sizes_of(width: int) -> dict[str, int]:
    return {"dim": width, "layers": DEPTH, "heads": width // HEAD, "hidden": 4 * width}


def build(system: str, vocab: int, width: int = 128) -> Any:
    models = example("model")
    config = models.ModelConfig(vocab_size=vocab, **sizes_of(width))
    model = models.LanguageModel(config)
    for i, block in enumerate(model.blocks):
        if system == "moe":
            block.mlp = Mixture(config, 8, 2)
        elif system == "shared":
            block.mlp = Mixture(config, 8, 1, "shared")
        elif system == "pyramid":
            block.mlp = Mixture(config, 4 if i == len(model.blocks) - 1 else 2, 1, "residual")
    return model


def train(channel: Channel, system: str, folder: str, seed: int, seconds: float, width: int) -> None:
    """A worker's target."""
    torch.set_num_threads(1)
    import slipstream

    corpus = example("data").load(Path(folder), CONTEXT)
    torch.manual_seed(seed)
    model = build(system, corpus.tokenizer.get_vocab_size(), width)
    schedule = {"warmup_num_steps": WARMUP, "warmup_max_lr": RATE, "warmup_type": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": schedule},
    }
    engine = slipstream.initialize(model=model, config=config)[0]
    windows = corpus.train()
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()
    batches = itertools.cycle(order[i : i + BATCH] for i in range(0, len(order) - BATCH, BATCH))
    held_out = corpus.validation(VALIDATION, 0, 1)[0]

    def evaluate() -> float:
        engine.eval()
        with torch.no_grad():
            loss = float(engine(*held_out))
        engine.train()
        return loss

    def run() -> dict[str, Any]:
        times, losses, counts, spent, steps = [0.0], [evaluate()], [0], 0.0, 0
        while len(times) <= CURVE:
            began = time.perf_counter()
            while spent + time.perf_counter() - began < seconds * len(times) / CURVE:
                tokens, targets = (torch.stack(each) for each in zip(*map(windows.__getitem__, next(batches)), strict=True))
                engine.backward(engine(tokens, targets))
                engine.step()
                steps += 1
            spent += time.perf_counter() - began
            times.append(spent)
            losses.append(evaluate())
            counts.append(steps)
        return Curve(times, losses, steps, sum(param.numel() for param in model.parameters()), counts)._asdict()

    channel.serve({"run": run})


def race(systems: Sequence[str], folder: Path, seed: int, seconds: float, width: int) -> list[Curve]:
    """All at once, each on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(systems):
        raise RuntimeError(f"{len(systems)} contenders need as many cores, and there are {len(cores)}")
    with ExitStack() as stack:
        workers = []
        for i, system in enumerate(systems):
            arguments = {"system": system, "folder": str(folder), "seed": seed, "seconds": seconds, "width": width}
            env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            core = cores[(i + seed) % len(systems)]
            worker = Worker("benchmarks.experts_quality:train", arguments, name=system, core=core, env=env)
            stack.callback(worker.close)
            workers.append(worker)
        for worker in workers:
            worker.ready()
        for worker in workers:
            worker.ask("run")
        return [Curve(**worker.answer(timeout=3 * seconds + 60)) for worker in workers]


def run(options: Options, systems: tuple[str, str], width: int = 128, seconds: float = SECONDS) -> str:
    seconds = QUICK_SECONDS if options.quick else seconds
    first, second = systems
    rows, shares, gaps = [], [], []
    sizes: dict[str, int] = {}
    data = example("data")
    with tempfile.TemporaryDirectory() as scratch:
        folder = data.prepare(data.standard_library(), Path(scratch), VOCAB)
        for seed in range(options.num_rounds(3)):
            curves = dict(zip(systems, race(systems, folder, seed, seconds, width), strict=True))
            common = min(curve.steps for curve in curves.values())
            goal = curves[first].smooth[-1]
            shares.append(curves[second].reaches(goal) / curves[first].times[-1])
            gaps.append(curves[second].smooth[-1] - goal)
            for name, curve in curves.items():
                sizes[name] = curve.parameters
                reached = curve.reaches(goal)
                when = f"{reached:.1f} s" if reached < float("inf") else "not reached"
                rows.append([str(seed), name, f"{curve.steps:,}", f"{curve.smooth[-1]:.3f}", f"{curve.at(common):.3f}", when])
            print(f"  seed {seed}: {', '.join(f'{name} {curve.smooth[-1]:.3f}' for name, curve in curves.items())}", flush=True)
    judged = [verdict(f"time of {second} to the loss of dense, of its time", statistics.median(shares), TARGET)]
    weights = [[name, f"{count:,}", f"{4 * count / 2**20:.1f}"] for name, count in sizes.items()]
    parts = [
        f"GPTs (width {width}, {DEPTH} layers, MLPs of {4 * width:,} features, {VOCAB:,} tokens) of the same "
        f"active parameters, fp32, one thread each, {BATCH * CONTEXT} tokens per step, {seconds:g} s of training on the text of "
        f"`make train`. Losses in nats per token on {VALIDATION * CONTEXT:,} held-out tokens, means of three points, at "
        f"the end and after as many steps as the slower run has made; the last column is when a run reaches the last loss of "
        f"`{first}`.",
        table(["seed", "model", "steps", "last loss", "loss at equal steps", f"reaches {first}'s"], rows),
        table(["model", "parameters", "MiB in fp32"], weights),
    ]
    if second != "pyramid":
        parts.append(verdicts(judged))
    else:
        fewer = sizes[first] / sizes[second]
        parts.append(
            f"`{second}` has {fewer:.2f} times fewer bytes than `{first}`, and its last loss is {statistics.median(gaps):+.3f} "
            f"nats from that of `{first}` (median of the seeds; {min(gaps):+.3f} to {max(gaps):+.3f})."
        )
    return "\n\n".join(parts)
