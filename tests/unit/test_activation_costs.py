"""Memory and time of recomputed blocks and of the fused loss, next to their plain twins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.workloads import Workload, build_batch, build_model
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import slipstream
from slipstream.activations.tiled import fused_linear_cross_entropy

pytestmark = [pytest.mark.slow, pytest.mark.alone]

GPT = Workload(name="costs", width=256, depth=12, heads=8, vocab=2048, batch=4, length=256)
ROUNDS = 7
Call = Callable[[], object]


class Live(TorchDispatchMode):
    """The peak of bytes alive at once in storages that operations inside made."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if type(tensor) is Tensor}
        out = func(*args, **(kwargs or {}))
        self._alive = {key: item for key, item in self._alive.items() if not item[0].expired()}
        for tensor in tree_leaves(out):
            if type(tensor) is Tensor and (storage := tensor.untyped_storage())._cdata not in inputs:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return out


def ratios(plain: Call, other: Call) -> tuple[float, float]:
    """Peak bytes and seconds of `other` over those of `plain`; of the fastest of some turns, which noise only makes slower."""
    peaks, fastest = [], [float("inf"), float("inf")]
    for call in (plain, other):
        call()
        with Live() as live:
            call()
        peaks.append(live.peak)
    for _ in range(ROUNDS):
        for i, call in enumerate((plain, other)):
            start = time.perf_counter()
            call()
            fastest[i] = min(fastest[i], time.perf_counter() - start)
    return peaks[1] / peaks[0], fastest[1] / fastest[0]


def test_recomputing_halves_the_peak_for_a_second_forward() -> None:
    batch = build_batch(GPT, 0)

    def step(activations: str) -> Call:
        settings = {"train_micro_batch_size_per_gpu": GPT.batch, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
        engine, *_ = slipstream.initialize(model=build_model(GPT), config=settings | {"slipstream": {"activations": activations}})

        def call() -> None:
            engine.backward(engine(*batch))
            engine.step()

        return call

    memory, seconds = ratios(step("keep"), step("recompute"))
    assert memory <= 0.5
    assert seconds <= 1.4, "a second forward is 4/3"


def test_the_fused_loss_needs_a_quarter_of_the_memory_and_no_more_time() -> None:
    tokens, width, words = 2048, 256, 16384
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(words, width).mul_(width**-0.5).requires_grad_()
    target = torch.randint(words, (tokens,))

    def plain() -> object:
        return torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), target), [hidden, weight])

    def fused() -> object:
        return torch.autograd.grad(fused_linear_cross_entropy(hidden, weight, target), [hidden, weight])

    memory, seconds = ratios(plain, fused)
    assert memory <= 0.25
    assert seconds <= 1.05
