"""The leg `efficiency`: random-LTD's time per sample, and the samples that curricula need for the loss of a plain order.

Losses are those of one model on the text of `make train` at equal samples. The metric of the curriculum is the rarity of a window's
tokens, minus the sum of the logarithms of their frequencies, by percentiles; that of the older curriculum is the window's length.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.dropping import reaches
from benchmarks.experts_quality import example
from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.worker import Worker

if TYPE_CHECKING:
    from benchmarks.worker import Channel

LAYERS, CONTEXT, LEAST = 12, 256, 16
WIDE = {"dim": 256, "layers": LAYERS, "heads": 4, "hidden": 1024}  # for time
SMALL = {"dim": 96, "layers": 4, "heads": 4, "hidden": 384}  # for losses
VOCAB, WINDOW, BATCH, RATE, WARMUP, POINTS = 1024, 128, 4, 1e-3, 30, 30
STEPS, QUICK_STEPS, COUNT, MIDDLE = 600, 30, 8, 500
CONTENDERS = ("plain", "rarity", "length", "random-LTD")
_ON: dict[str, Any] = {"enabled": True}


def _ltd(layers: int, context: int, steps: int, least: int = LEAST) -> dict[str, Any]:
    """All layers but the first and the last drop tokens."""
    chosen = list(range(1, layers - 1))
    schedule = {"min_value": least, "max_value": context, "schedule_config": {"require_steps": steps, "seq_per_step": 8}}
    numbers = {"total_layer_num": layers, "random_ltd_layer_num": len(chosen), "random_ltd_layer_id": chosen}
    return {**_ON, "data_routing": {**_ON, "random_ltd": {**_ON, **numbers, "random_ltd_schedule": schedule}}}


def _config(rate: float, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "steps_per_print": 2**31,
        **more,
    }


def steps(channel: Channel, drops: bool) -> None:
    """A worker's target: seconds of steps, and of the dropping layers alone, in the middle of the schedule."""
    torch.set_num_threads(1)
    import slipstream
    from slipstream.train.random_ltd import TokenDrop

    models = example("model")

    def built() -> Any:
        torch.manual_seed(0)
        return models.LanguageModel(models.ModelConfig(vocab_size=VOCAB, **WIDE))

    more = {"data_efficiency": _ltd(LAYERS, CONTEXT, 2 * MIDDLE)} if drops else {}
    engine = slipstream.initialize(model=built(), config=_config(RATE, **more))[0]
    alone = built()
    if drops:
        drop = TokenDrop(engine.plan.efficiency["data_routing.random_ltd"], 0)
        drop.clock = lambda: (MIDDLE, 0, 0)
        drop.wrap(list(alone.blocks), "")
    tokens = torch.randint(VOCAB, (BATCH, CONTEXT))
    hidden = torch.randn(BATCH, CONTEXT, WIDE["dim"], requires_grad=True)
    rotation = models.rotation(CONTEXT, alone.config, hidden)

    def step() -> None:
        engine.global_steps = MIDDLE
        engine.backward(engine(tokens, tokens))
        engine.step()

    def layers() -> None:
        x = hidden
        for layer in alone.blocks[1:-1]:
            x = layer(x, rotation)
        x.sum().backward()

    def run(count: int) -> dict[str, list[float]]:
        return {call.__name__: [_seconds(call) for _ in range(count)] for call in (step, layers)}

    channel.serve({"steps": run})


def _seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _rarity(folder: Path, tokens: torch.Tensor) -> None:
    """Write the rarity of windows [windows, tokens], in hundredths, as an analysis."""
    from slipstream.data import DataAnalyzer

    counts = torch.bincount(tokens.flatten(), minlength=VOCAB).clamp(min=1)
    surprise = -(counts / counts.sum()).log()
    DataAnalyzer(
        tokens,
        metric_names=["rarity"],
        metric_functions=[lambda batch: (100 * surprise[batch].sum(1)).long()],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[torch.int64],
        batch_size=256,
        save_path=folder,
    ).run_map_reduce()


def _block(contender: str, analysis: Path, count: int, seed: int) -> dict[str, Any]:
    """The config's block of a contender, whose schedule ends after half of the steps."""
    linear = {"total_curriculum_step": count // 2}
    if contender == "rarity":
        index = str(analysis / "rarity" / "rarity_index_to_sample")
        kinds = {"clustering_type": "schedule_based", "difficulty_type": "percentile", "schedule_type": "fixed_root"}
        bounds = {
            "min_difficulty": 10,
            "max_difficulty": 100,
            "schedule_config": {**linear, "difficulty_step": 1, "root_degree": 2},
        }
        metrics = {"rarity": {"index_to_sample_path": index, **kinds, **bounds}}
        sampling = {**_ON, "curriculum_learning": {**_ON, "curriculum_metrics": metrics}}
        return {"data_efficiency": {**_ON, "seed": seed, "data_sampling": sampling}}
    if contender == "length":
        bounds = {"min_difficulty": 16, "max_difficulty": WINDOW}
        return {"curriculum_learning": {**_ON, **bounds, "schedule_config": {**linear, "difficulty_step": 8}}}
    return {"data_efficiency": {**_ltd(SMALL["layers"], WINDOW, count // 2), "seed": seed}} if contender == "random-LTD" else {}


def train(channel: Channel, contender: str, folder: str, seed: int, count: int) -> None:
    """A worker's target: the validation loss, and the tokens computed, at equal distances of steps."""
    torch.set_num_threads(1)
    import slipstream

    corpus = example("data").load(Path(folder), WINDOW)
    models = example("model")
    torch.manual_seed(seed)
    model = models.LanguageModel(models.ModelConfig(vocab_size=corpus.tokenizer.get_vocab_size(), **SMALL))
    schedule = {"warmup_num_steps": WARMUP, "total_num_steps": count, "warmup_max_lr": RATE, "warmup_type": "linear"}
    more = {"scheduler": {"type": "WarmupDecayLR", "params": schedule}, "slipstream": {"seed": seed}}
    config = _config(RATE, **more, **_block(contender, Path(folder), count, seed))
    engine, _, loader, _ = slipstream.initialize(model=model, config=config, training_data=corpus.train())
    held_out = corpus.validation(64, 0, 1)[0]

    def run() -> list[float]:
        losses = []
        batches = iter(slipstream.RepeatingLoader(loader))
        for step in range(1, count + 1):
            engine.backward(engine(*next(batches)))
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
    rows = [[name, *(Spread.of(times[call]).show() for call in ("step", "layers"))] for name, times in seconds.items()]
    over = {call: Spread.ratio(seconds["random-LTD"][call], seconds["plain"][call]).median for call in ("step", "layers")}
    kept = (LEAST + CONTEXT) // 2 // 8 * 8
    losses = _losses(options, count)
    goal = [curve[-1] for curve in losses["plain"]]
    curves = []
    for name, each in losses.items():
        needed = [reaches(curve, loss) for curve, loss in zip(each, goal, strict=True)]
        shown = ["never" if share > 1 else f"{share:.2f}" for share in needed]
        last = [curve[-1] for curve in each]
        ratio = statistics.median(mine / other for mine, other in zip(last, goal, strict=True))
        curves.append([name, ", ".join(f"{loss:.3f}" for loss in last), f"{ratio:.3f}", ", ".join(shown)])
    return "\n\n".join(
        (
            f"GPTs on the text of `make train`, fp32, one thread. Seconds in the middle of random-LTD's schedule, {kept} of "
            f"{CONTEXT} tokens in {LAYERS - 2} of {LAYERS} layers (width {WIDE['dim']}, {BATCH} sequences), means of {COUNT}, "
            "medians of turns:",
            table(["contender", "step, s", f"those {LAYERS - 2} layers alone, s"], rows),
            f"Time per sample of random-LTD over plain: {over['step']:.2f}.",
            f"Held-out losses after {count} steps (width {SMALL['dim']}, {SMALL['layers']} layers, schedules end after half of "
            "them), by seed, over plain's, and the share of samples after which a run reaches plain's last loss. Samples of "
            "`length` are shorter:",
            table(["contender", "last loss", "over plain", "samples to plain's last loss"], curves),
            verdicts(
                [
                    verdict(
                        f"time of layers without random-LTD over with it, {kept} of {CONTEXT} tokens",
                        1 / over["layers"],
                        1.25,
                        at_least=True,
                    )
                ]
            ),
        )
    )


def _take_turns(rounds: int) -> dict[str, dict[str, list[float]]]:
    seconds: dict[str, dict[str, list[float]]] = {name: {"step": [], "layers": []} for name in ("plain", "random-LTD")}
    with ExitStack() as stack:
        workers = {}
        for name in seconds:
            workers[name] = Worker("benchmarks.efficiency:steps", {"drops": name == "random-LTD"}, name=name)
            stack.callback(workers[name].close)
            workers[name].ready()
        for turn in range(-1, rounds):
            for name, worker in workers.items():
                worker.ask("steps", count=COUNT)
                for call, times in worker.answer().items():
                    if turn >= 0:
                        seconds[name][call].append(statistics.mean(times))
    return seconds


def _losses(options: Options, count: int) -> dict[str, list[list[float]]]:
    """Validation curves by contender and seed; two contenders train at once."""
    curves: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    data = example("data")
    cores = sorted(os.sched_getaffinity(0))
    pairs = list(zip(*[iter(CONTENDERS)] * 2, strict=True))
    with tempfile.TemporaryDirectory() as scratch:
        folder = data.prepare(data.standard_library(), Path(scratch), VOCAB)
        windows = data.load(folder, WINDOW).train()
        _rarity(folder, torch.stack([windows[i][0] for i in range(len(windows))]))
        for seed, names in itertools.product(range(options.num_rounds(3)), pairs):
            with ExitStack() as stack:
                workers = {}
                for name, core in zip(names, cores, strict=False):
                    arguments = {"contender": name, "folder": str(folder), "seed": seed, "count": count}
                    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
                    workers[name] = Worker("benchmarks.efficiency:train", arguments, name=name, core=core, env=env)
                    stack.callback(workers[name].close)
                for worker in workers.values():
                    worker.ready()
                    worker.ask("run")
                for name, worker in workers.items():
                    curves[name].append(worker.answer(timeout=900))
                    print(f"  efficiency, seed {seed}: {name} {curves[name][-1][-1]:.3f}", flush=True)
    return curves
