"""The contenders of the legs on layouts, in a rank. Names: SYSTEM:LAYOUT[:VARIANT].

compute:M      the forwards and backwards of M micro-batches of the whole model divided by the ranks, without communication
slipstream:pp  a pipeline; variants: the schedules.     slipstream:dp  data parallelism (ZeRO-1).    slipstream:tp  sliced layers
deepspeed:pp   its PipelineModule.                      deepspeed:tp   AutoTP.                       torch:tp  parallelize_module
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Block, Linear, Workload, build_batch

if TYPE_CHECKING:
    from benchmarks.worker import Channel

ADAMW: dict[str, Any] = {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}


class PlainBlock(Block):
    """With torch's own linear layers: fp32 needs no other, and only these let their weights' gradients wait."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        for child in self.children():
            if isinstance(child, Linear):
                child.__class__ = nn.Linear


class First(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(work.vocab, work.width), nn.Embedding(work.length, work.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return x


class Last(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(work.width), nn.Linear(work.width, work.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


def layers(work: Workload) -> list[tuple[Any, ...]]:
    """The GPT of the other legs as a list of layers: classes with their arguments."""
    return [(First, work), *[(PlainBlock, work.width, work.heads)] * work.depth, (Last, work)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def config(work: Workload, micros: int, stage: int, **blocks: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": micros,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "steps_per_print": 2**31,
        **blocks,
    }


def batches(work: Workload, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same micro-batches again and again."""
    micros = [build_batch(work, first + i) for i in range(16)]
    while True:
        yield from micros


def train(channel: Channel, system: str, work: dict[str, Any], micros: int, stage: int = 1) -> None:
    """The target of a rank. Its handler makes steps of `micros` micro-batches for a replica and returns times and the last loss."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    kind, layout, *rest = system.split(":")
    step = _BUILDERS[f"{kind}:{layout}"](Workload(**work), micros, stage, rest[0] if rest else "")

    def steps(count: int) -> dict[str, Any]:
        times = []
        loss: Any = 0.0
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            loss = step()
            times.append(time.perf_counter() - start)
        return {"times": times, "loss": float(loss)}

    channel.serve({"steps": steps})


def _model(work: Workload) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(cls(*arguments) for cls, *arguments in layers(work)))


def _compute(work: Workload, micros: int, stage: int, variant: str) -> Callable[[], Any]:
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    model, items = _model(work), batches(work, 0)

    def step() -> Any:
        loss = torch.zeros(())
        for _ in range(micros // dist.get_world_size()):
            tokens, targets = next(items)
            loss = loss_of(model(tokens), targets)
            torch.autograd.backward(loss)
        for param in model.parameters():
            param.grad = None
        return loss.detach()

    return step


def _pipeline(work: Workload, micros: int, stage: int, variant: str) -> Callable[[], Any]:
    import slipstream

    slipstream.init_distributed(verbose=False)
    torch.manual_seed(0)
    specs = [slipstream.LayerSpec(*each) for each in layers(work)]
    model = slipstream.PipelineModule(specs, num_stages=dist.get_world_size(), loss_fn=loss_of, partition_method="parameters")
    own = {"pipeline": {"schedule": variant or "1f1b"}} | ({"transport": "gloo"} if os.environ.get("SLIPSTREAM_BENCH_GLOO") else {})
    engine = slipstream.initialize(model=model, config=config(work, micros, stage, slipstream=own))[0]
    items = batches(work, 0)
    return lambda: engine.train_batch(items)  # type: ignore[attr-defined]


def _data(work: Workload, micros: int, stage: int, variant: str) -> Callable[[], Any]:
    import slipstream

    slipstream.init_distributed(verbose=False)
    size = dist.get_world_size()
    own = {"transport": "gloo"} if os.environ.get("SLIPSTREAM_BENCH_GLOO") else {}
    engine = slipstream.initialize(model=_model(work), config=config(work, micros // size, stage, slipstream=own))[0]
    items = batches(work, dist.get_rank())

    def step() -> Any:
        loss: Any = 0.0
        for _ in range(micros // size):
            tokens, targets = next(items)
            loss = loss_of(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return step


def _deepspeed_pipeline(work: Workload, micros: int, stage: int, variant: str) -> Callable[[], Any]:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = PipelineModule(
        [LayerSpec(*each) for each in layers(work)],
        num_stages=dist.get_world_size(),
        loss_fn=loss_of,
        partition_method="parameters",
    )
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config(work, micros, stage))[0]
    items = batches(work, 0)
    return lambda: engine.train_batch(items)


_BUILDERS: dict[str, Callable[[Workload, int, int, str], Callable[[], Any]]] = {
    "compute:half": _compute,
    "slipstream:pp": _pipeline,
    "slipstream:dp": _data,
    "deepspeed:pp": _deepspeed_pipeline,
}
