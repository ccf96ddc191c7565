"""DeepSpeedCPUAdam for the leg `optimizer`: a worker in the peers' interpreter."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

if TYPE_CHECKING:
    from benchmarks.worker import Channel


def adam(channel: Channel, numel: int, threads: int, factor: float, lr: float) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(numel))
    grad = torch.randn(numel).bfloat16()
    weights.grad, out = torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([weights], lr=lr, weight_decay=0.01, adamw_mode=True)

    def step() -> float:
        """Seconds, with the casts."""
        start = time.perf_counter()
        torch.mul(grad, factor, out=weights.grad)
        optimizer.step()
        out.copy_(weights.detach())
        return time.perf_counter() - start

    channel.serve({"step": step, "weights": lambda: out[:4096].tolist()})
