"""The contenders. Each builder takes a model and gives back a function that makes one training step and returns the loss.

Runs inside a rank (worker.py). A contender's packages are imported by its own builder only, so that none weighs on
another's memory or start. Names: `floor`, `ddp`, `fsdp2:keep`, `fsdp2:reshard`, `deepspeed:STAGE[:VARIANT]` and
`slipstream:STAGE[:gloo][:torch]` (`torch`: without the native kernels).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from benchmarks.workloads import BETAS, CLIPPING, EPS, LEARNING_RATE, WEIGHT_DECAY

Step = Callable[[Tensor, Tensor], Tensor]

ADAMW = {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}

LABELS = {
    "floor": "floor: forward + backward + a rank's share of a fused AdamW",
    "ddp": "DDP",
    "fsdp2:keep": "FSDP2, no reshard",
    "fsdp2:reshard": "FSDP2, reshard after forward",
}


def label(system: str) -> str:
    kind, *rest = system.split(":")
    if kind == "slipstream":
        how = {"gloo": ", gloo", "torch": ", without native kernels", "again": ", again"}
        return f"Slipstream, stage {rest[0]}" + "".join(how[part] for part in rest[1:])
    if kind == "deepspeed":
        return f"DeepSpeed, ZeRO-{rest[0]}" + (f", {rest[1]}" if rest[1:] else "")
    return LABELS[system]


def environment(system: str) -> dict[str, str]:
    """What a contender's processes need set before they start."""
    kind, *rest = system.split(":")
    if kind == "deepspeed":
        return {"DS_ACCELERATOR": "cpu"}
    return {"SLIPSTREAM_NATIVE": "0"} if "torch" in rest else {}


def needs_peers(system: str) -> bool:
    return system.startswith("deepspeed")


def build(system: str, model: nn.Module, dtype: torch.dtype, batch: int) -> Step:
    """Give `model` to a contender. The process group is made here where the contender does not make its own."""
    kind, *rest = system.split(":")
    if kind == "slipstream":
        return _slipstream(model, dtype, batch, int(rest[0]), "gloo" if "gloo" in rest else "auto")
    if kind == "deepspeed":
        return _deepspeed(model, dtype, batch, int(rest[0]), rest[1] if rest[1:] else "")
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    if kind == "fsdp2":
        return _fsdp2(model, dtype, reshard=rest == ["reshard"])
    return {"ddp": _ddp, "floor": _floor}[kind](model, dtype)


def _config(dtype: torch.dtype, batch: int, stage: int) -> dict[str, Any]:
    """The JSON that DeepSpeed and Slipstream share."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage},
    }


def _slipstream(model: nn.Module, dtype: torch.dtype, batch: int, stage: int, transport: str) -> Step:
    import slipstream

    config = {**_config(dtype, batch, stage), "slipstream": {"transport": transport}}
    engine, *_ = slipstream.initialize(model=model, config=config, model_parameters=model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _deepspeed(model: nn.Module, dtype: torch.dtype, batch: int, stage: int, variant: str) -> Step:
    import deepspeed  # type: ignore[import-not-found]

    config = _config(dtype, batch, stage)
    config["steps_per_print"] = 2**31
    if variant:
        config["zero_optimization"].update(_variant(model, stage, variant))
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _variant(model: nn.Module, stage: int, variant: str) -> dict[str, Any]:
    """`scatter`: gradients are reduce-scattered, not all-reduced in one bucket of all ranks, its default of stages 1 and 2.
    `lean`: its documented knobs, set so that as few gathered weights and gradients as possible are alive at a time."""
    if variant == "scatter":
        return {"use_multi_rank_bucket_allreduce": False}
    assert variant == "lean", variant
    block = max(sum(param.numel() for param in child.parameters()) for child in model.blocks)  # type: ignore[union-attr]
    knobs: dict[str, Any] = {"reduce_bucket_size": block, "allgather_bucket_size": block}
    if stage == 3:
        knobs |= {
            "stage3_prefetch_bucket_size": block,
            "stage3_max_live_parameters": block,
            "stage3_max_reuse_distance": block,
            "stage3_param_persistence_threshold": 0,
        }
    return knobs


def _adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)


def _fsdp2(model: nn.Module, dtype: torch.dtype, *, reshard: bool) -> Step:
    """fp32 shards are the masters; blocks and the rest are gathered and reduced in `dtype`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=None if dtype is torch.float32 else dtype)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = _adamw(model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def _ddp(model: nn.Module, dtype: torch.dtype) -> Step:
    """fp32 weights and gradients; autocast where the others run in bf16."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = _adamw(model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss: Tensor = wrapped(tokens, targets)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def _floor(model: nn.Module, dtype: torch.dtype) -> Step:
    """What no data-parallel system can save: the model in `dtype` and AdamW on this rank's share, with nothing moved.

    It does not train: the optimizer's fp32 tensors are of the right size and not the model's.
    """
    model.to(dtype)
    params = list(model.parameters())
    world = int(os.environ["WORLD_SIZE"])
    share = torch.zeros(-(-sum(param.numel() for param in params) // world))
    share.grad = torch.full_like(share, 1e-3)
    optimizer = _adamw([share])

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        torch.autograd.backward(loss)
        for param in params:
            param.grad = None
        optimizer.step()
        return loss

    return step
