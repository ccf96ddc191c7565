"""The leg `activations`: what recomputing saves and costs, and the fused loss beside the plain one, in one process.

Memory is the bytes of all storages that operations have made and that are alive at once in one step, counted by a
dispatch mode in a step of its own; times are of other steps, the contenders in turns. Each is over the first contender's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import slipstream
from benchmarks.report import Spread, host, table, verdict, verdicts
from benchmarks.workloads import Workload, build_batch, build_model
from slipstream.tiled import fused_linear_cross_entropy

GPT = Workload(name="activations", width=256, depth=12, heads=8, vocab=2048, batch=4, length=256)
CONTENDERS: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"slipstream": {"activations": "recompute"}},
    "recompute 6 of 12": {"activation_checkpointing": {"number_checkpoints": 6}},
}


class Live(TorchDispatchMode):
    """The most bytes alive at once of storages made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs or {}))}
        out = func(*args, **(kwargs or {}))
        self.alive = {name: item for name, item in self.alive.items() if not item[0].expired()}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, sum(nbytes for _, nbytes in self.alive.values()))
        return out


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if type(leaf) is Tensor]


def compare(contenders: Mapping[str, Callable[[], object]], rounds: int) -> tuple[str, dict[str, tuple[float, float]]]:
    """A table of bytes and seconds; and both by name, over the first contender's."""
    nbytes: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for name, run in contenders.items():
        run()
        with Live() as live:
            run()
        nbytes[name] = live.most
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    first, *_ = contenders
    over = {
        name: (nbytes[name] / nbytes[first], Spread.of([a / b for a, b in zip(took, seconds[first], strict=True)]).median)
        for name, took in seconds.items()
    }
    rows = [
        [name, f"{nbytes[name] / 2**20:.1f}", f"{over[name][0]:.2f}", Spread.of(seconds[name]).show(), f"{over[name][1]:.2f}"]
        for name in contenders
    ]
    return table(["", "peak, MiB", "over the first", "s", "over the first"], rows), over


def gpt_steps() -> dict[str, Callable[[], object]]:
    batch = build_batch(GPT, 0)

    def one(blocks: dict[str, Any]) -> Callable[[], object]:
        settings = {"train_micro_batch_size_per_gpu": GPT.batch, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
        engine, *_ = slipstream.initialize(model=build_model(GPT), config=settings | blocks)

        def step() -> None:
            engine.backward(engine(*batch))
            engine.step()

        return step

    return {name: one(blocks) for name, blocks in CONTENDERS.items()}


def losses(tokens: int, width: int, words: int) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, requires_grad=True)
    weight = torch.randn(words, width, generator=generator).mul_(width**-0.5).requires_grad_()
    target = torch.randint(words, (tokens,), generator=generator)

    def plain() -> object:
        return torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), target), [hidden, weight])

    def fused() -> object:
        return torch.autograd.grad(fused_linear_cross_entropy(hidden, weight, target), [hidden, weight])

    return {"F.cross_entropy(F.linear())": plain, "fused_linear_cross_entropy": fused}


def run(*, quick: bool) -> str:
    rounds = 2 if quick else 7
    tokens, width, words = (512, 128, 4096) if quick else (2048, 256, 16384)
    blocks, of_blocks = compare(gpt_steps(), rounds)
    loss, of_loss = compare(losses(tokens, width, words), rounds)
    fused = of_loss["fused_linear_cross_entropy"]
    judged = [
        verdict("peak, recompute over keep", of_blocks["recompute"][0], 0.5),
        verdict("time, recompute over keep (a second forward: 4/3)", of_blocks["recompute"][1], 1.4),
        verdict("peak, fused loss over plain", fused[0], 0.25),
        verdict("time, fused loss over plain", fused[1], 1.05),
    ]
    return "\n\n".join(
        (
            host(f"{torch.get_num_threads()} threads"),
            f"A step of a {GPT.describe()}, fp32, stage 0; the peak is of what the step makes, beside the states:",
            blocks,
            f"The loss and its gradients, {tokens} tokens of width {width}, {words:,} words, fp32:",
            loss,
            verdicts(judged),
        )
    )
