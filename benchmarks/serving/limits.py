"""The limits of every server on this machine: reading the weights once per forward, and multiplying them.

`measure` is a worker, so that both rates are those of a process of its own; the rest is arithmetic.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.serving.traces import Ask
from benchmarks.workloads import has_bf16_instructions

if TYPE_CHECKING:
    from benchmarks.worker import Channel

# Bits per weight of (the layers' matrices, the output matrix), scales included.
_BITS = {"fp32": (32.0, 32.0), "bf16": (16.0, 16.0), "int8": (8.0, 8.0), "int4": (5.0, 8.0), "q8_0": (8.5, 8.5), "q4_0": (4.5, 8.5)}


class Rates(NamedTuple):
    read: float  # bytes/s, the sum of a tensor that no cache holds, all threads
    bf16: float  # FLOP/s of torch's matrix product
    fp32: float

    @property
    def multiply(self) -> float:
        """bf16 weights can be widened, which is faster than torch's own product on a CPU without bf16 instructions."""
        return max(self.bf16, self.fp32)


class Shape(NamedTuple):
    """Of the model: the number of weights in the layers' matrices and in the output's, and attention's cost per position."""

    matrices: int
    head: int
    attention_flops: int  # for each position that one token attends to
    kv_bytes: int  # of one position, bf16

    @classmethod
    def read(cls, folder: Path) -> Shape:
        config = json.loads((folder / "config.json").read_text())
        width, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        kv_width = width // heads * config["num_key_value_heads"]
        layer = 2 * width * width + 2 * width * kv_width + 3 * width * config["intermediate_size"]
        return cls(layers * layer, width * config["vocab_size"], 4 * width * layers, 2 * kv_width * layers * 2)

    def weight_bytes(self, precision: str) -> float:
        inner, outer = _BITS[precision]
        return (self.matrices * inner + self.head * outer) / 8

    def prompt_flops(self, length: int) -> float:
        return 2.0 * self.matrices * length + self.attention_flops * length * (length + 1) / 2 + 2 * self.head

    def seconds(self, trace: Sequence[Ask], precision: str, rates: Rates) -> float:
        """The least for requests that arrive together: all prompts at the rate of multiplication, then each step of all
        generations at that rate or at the rate of reading, whichever takes longer."""
        total = sum(map(self.prompt_flops, (len(ask.prompt) for ask in trace))) / rates.multiply
        for step in range(1, max(ask.outputs for ask in trace)):
            positions = [len(ask.prompt) + step for ask in trace if ask.outputs > step]
            flops = len(positions) * 2 * (self.matrices + self.head) + self.attention_flops * sum(positions)
            read = self.weight_bytes(precision) + self.kv_bytes * sum(positions)
            total += max(flops / rates.multiply, read / rates.read)
        return total


def measure(channel: Channel) -> None:
    import os

    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def best(work: Callable[[], object]) -> float:
        """Seconds: the minimum of the calls of one second, of three at least."""
        work()
        seconds: list[float] = []
        while len(seconds) < 3 or sum(seconds) < 1:
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    big = torch.ones(1 << 27)  # 512 MiB
    read = big.nbytes / best(big.sum)
    rates = []
    for dtype in (torch.bfloat16, torch.float32):
        size = 2048 if dtype is torch.float32 or has_bf16_instructions() else 512  # by loops it takes seconds
        left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        rates.append(2 * size**3 / best(lambda left=left, right=right: left @ right))  # type: ignore[misc]
    channel.serve({"rates": lambda: Rates(read, *rates)})
