"""The leg `moq`: what rounding weights to 8 and 4 bits costs, after training (PTQ) and in it (MoQ), on one grid each.

A GPT is trained on the text of `make train`, and then goes on for some steps in each of several ways from the same weights: with
exact ones, and with weights that are rounded in the forward. PTQ rounds those of the exact way at its end. All linear layers of the
blocks are rounded; the embedding and the head are not.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.experts_quality import example
from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from benchmarks.worker import Worker

if TYPE_CHECKING:
    from benchmarks.worker import Channel

SIZES = {"dim": 128, "layers": 4, "heads": 4, "hidden": 384}
VOCAB, CONTEXT, BATCH, RATE, GROUPS = 1024, 128, 8, 2e-3, 1  # groups of a matrix: DeepSpeed's default
STEPS, QUICK_STEPS = (500, 150), (20, 10)  # before, and in each way
# grid -> bits at the beginning and the end, and the kind of quantization
GRIDS: dict[str, tuple[int, int, str]] = {
    "8 bits": (12, 8, "symmetric"),
    "4 bits": (8, 4, "symmetric"),
    "4 bits, served": (4, 4, "served"),
}


def _block(grid: str, count: int) -> dict[str, Any]:
    """The config's block; a bit is lost after 1/32, 1/16, 1/8 and 1/4 of the steps."""
    start, target, kind = GRIDS[grid]
    shared = {"enabled": True, "quantization_type": kind, "quantize_groups": GROUPS}
    params = {"start_bits": start, "target_bits": target, "quantization_period": max(1, count // 32)}
    groups = {"blocks": {"params": params, "modules": ["^blocks"]}}
    return {"compression_training": {"weight_quantization": {"shared_parameters": shared, "different_groups": groups}}}


def outcomes(channel: Channel, folder: str, seed: int, before: int, count: int) -> None:
    """A worker's target: held-out losses by way."""
    torch.set_num_threads(1)
    import slipstream
    from slipstream.compression import redundancy_clean
    from slipstream.compression.quantize import quantized

    corpus, models = example("data").load(Path(folder), CONTEXT), example("model")
    windows, held_out = corpus.train(), corpus.validation(64, 0, 1)[0]
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()

    def built() -> Any:
        torch.manual_seed(seed)
        return models.LanguageModel(models.ModelConfig(vocab_size=corpus.tokenizer.get_vocab_size(), **SIZES))

    def fit(model: Any, first: int, steps: int, rate: float, block: dict[str, Any]) -> None:
        schedule = {"warmup_num_steps": steps // 10, "total_num_steps": steps, "warmup_max_lr": rate, "warmup_type": "linear"}
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupDecayLR", "params": schedule},
            "steps_per_print": 2**31,
            **block,
        }
        engine = slipstream.initialize(model=model, config=config)[0]
        batches = itertools.cycle(order[i : i + BATCH] for i in range(0, len(order) - BATCH, BATCH))
        for numbers in itertools.islice(batches, first, first + steps):
            engine.backward(engine(*(torch.stack(each) for each in zip(*map(windows.__getitem__, numbers), strict=True))))
            engine.step()
        engine.destroy()

    def loss(model: Any) -> float:
        with torch.no_grad():
            return float(model.eval()(*held_out))

    def run() -> dict[str, float]:
        start = built()
        fit(start, 0, before, RATE, {})
        exact = copy.deepcopy(start)
        fit(exact, before, count, RATE / 4, {})
        found = {"exact": loss(exact)}
        for grid, (_, bits, kind) in GRIDS.items():
            rounded, trained = copy.deepcopy(exact), copy.deepcopy(start)
            for layer in rounded.blocks.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.weight.data = quantized(layer.weight.data, bits, GROUPS, kind)  # type: ignore[arg-type]
            block = _block(grid, count)
            fit(trained, before, count, RATE / 4, block)
            found |= {f"{grid}, PTQ": loss(rounded), f"{grid}, MoQ": loss(redundancy_clean(trained, block))}
        return found

    channel.serve({"run": run})


def run(options: Options) -> str:
    before, count = QUICK_STEPS if options.quick else STEPS
    found = _found(options.num_rounds(4), before, count)
    rows, shares = [], dict[str, float]()
    over = {name: [math.exp(each[name] - each["exact"]) for each in found] for name in found[0]}
    for name, ratios in over.items():
        perplexities = ", ".join(f"{math.exp(each[name]):.3f}" for each in found)
        rows.append([name, perplexities, f"{statistics.median(ratios) - 1:+.2%}"])
    for grid in GRIDS:
        lost = [(each[f"{grid}, PTQ"] - each["exact"], each[f"{grid}, MoQ"] - each["exact"]) for each in found]
        shares[grid] = statistics.median((ptq - moq) / ptq if ptq > 0 else 0.0 for ptq, moq in lost)
    judged = [verdict("8 bits by MoQ: perplexity over exact weights", statistics.median(over["8 bits, MoQ"]), 1.005, digits=4)]
    for grid in list(GRIDS)[1:]:
        judged.append(verdict(f"{grid}: share of PTQ's loss that MoQ recovers", shares[grid], 1 / 3, at_least=True))
    return "\n\n".join(
        (
            f"GPTs (width {SIZES['dim']}, {SIZES['layers']} blocks) on the text of `make train`, fp32: {before} steps, then "
            f"{count} in each way from the same weights. Grids are symmetric, with one scale a matrix (DeepSpeed's "
            "default), or the inference engine's (served). Held-out perplexities by seed, and the median over the exact one:",
            table(["weights", "perplexity", "over exact"], rows),
            verdicts(judged),
        )
    )


def _found(seeds: int, before: int, count: int) -> list[dict[str, float]]:
    """Losses of each seed; two seeds train at once."""
    data, cores = example("data"), sorted(os.sched_getaffinity(0))[:2]
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = data.prepare(data.standard_library(), Path(scratch), VOCAB)
        for first in range(0, seeds, len(cores)):
            with ExitStack() as stack:
                workers = []
                for seed, core in zip(range(first, seeds), cores, strict=False):
                    arguments = {"folder": str(folder), "seed": seed, "before": before, "count": count}
                    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
                    workers.append(Worker("benchmarks.moq:outcomes", arguments, name=f"seed {seed}", core=core, env=env))
                    stack.callback(workers[-1].close)
                for worker in workers:
                    worker.ready()
                    worker.ask("run")
                found += [worker.answer(timeout=900) for worker in workers]
                print(f"  moq, {len(found)} seeds: {found[-1]}", flush=True)
    return found
