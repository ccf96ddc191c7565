"""The contenders of training. A builder turns a model into a function that makes one training step and returns the loss.

Runs inside a rank: the target of its worker is `train`. Only a contender's own builder imports its packages, so that none adds to
another's memory. Names: `floor`, `ddp`, `fsdp2:keep`, `fsdp2:reshard`, `deepspeed:STAGE[:VARIANT]` and
`slipstream:STAGE[:gloo][:torch][:again]` (`torch`: without the native kernels; `again`: the same, to see the noise), or with a last
part of `COMPRESSED`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from benchmarks.workloads import BETAS, CLIPPING, EPS, LEARNING_RATE, WEIGHT_DECAY, Workload, build_batch, build_model

if TYPE_CHECKING:
    from benchmarks.worker import Channel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Step = Callable[[Tensor, Tensor], Tensor]

ADAMW: dict[str, Any] = {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}

LABELS = {
    "floor": "floor: forward + backward + a rank's share of a fused AdamW",
    "ddp": "DDP",
    "fsdp2:keep": "FSDP2, no reshard",
    "fsdp2:reshard": "FSDP2, reshard after forward",
}


COMPRESSED: dict[str, dict[str, Any]] = {  # keys that make ours send less
    "int8": {"communication_data_type": "int8"},
    "int4": {"communication_data_type": "int4"},
    "feedback": {"communication_data_type": "int4", "zero_optimization": {"stage": 0, "zeropp_loco_param": {}}},
    "onebit": {"optimizer": {"type": "OneBitAdam", "params": {**ADAMW, "freeze_step": 2}}},
    "onebitlamb": {"optimizer": {"type": "OneBitLamb", "params": {**ADAMW, "freeze_step": 2}}},
    "published": {
        "optimizer": {"type": "OneBitAdam", "params": {**ADAMW, "freeze_step": 2}},
        "zero_optimization": {"stage": 1, "zero_quantized_weights": True},
    },
    "local": {  # 0/1 Adam, in local steps from the 5th step on
        "optimizer": {
            "type": "ZeroOneAdam",
            "params": {**ADAMW, "var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 1 << 20},
        }
    },
    "zeropp": {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True, "zero_quantized_weights": True}},
    "hpz": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    "groups": {
        "zero_optimization": {
            "stage": 3,
            "zero_quantized_gradients": True,
            "zero_quantized_weights": True,
            "zero_hpz_partition_size": 2,
        }
    },
}
COMPRESSED_LABELS = {
    "int8": ", int8 gradients",
    "int4": ", int4 gradients",
    "feedback": ", int4 gradients with error feedback",
    "onebit": ", 1-bit Adam",
    "onebitlamb": ", 1-bit LAMB",
    "published": ", 1-bit Adam and updates in int8",
    "local": ", a local step of 0/1 Adam",
    "zeropp": ", int4 gradients and int8 weights",
    "hpz": ", groups of two ranks",
    "groups": ", int4 gradients, int8 weights, groups of two ranks",
}


def label(system: str) -> str:
    kind, *rest = system.split(":")
    if kind == "slipstream":
        how = {
            "gloo": ", gloo",
            "torch": ", without native kernels",
            "again": ", again",
            "before": ", the checkout before",
        } | COMPRESSED_LABELS
        return f"Slipstream, stage {rest[0]}" + "".join(how[part] for part in rest[1:])
    if kind == "deepspeed":
        return f"DeepSpeed, ZeRO-{rest[0]}" + (f", {rest[1]}" if rest[1:] else "")
    return LABELS[system]


def environment(system: str) -> dict[str, str]:
    """Variables of a contender's processes."""
    kind, *rest = system.split(":")
    if kind == "deepspeed":
        return {"DS_ACCELERATOR": "cpu"}
    return {"SLIPSTREAM_NATIVE": "0"} if "torch" in rest else {}


def needs_peers(system: str) -> bool:
    return system.startswith("deepspeed")


def train(channel: Channel, system: str, work: dict[str, Any], dtype: str) -> None:
    """The target of a rank. Its one handler makes steps and returns their losses and times in seconds: wall clock, and processor
    time of all threads."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    sizes = Workload(**work)
    batch = build_batch(sizes, int(os.environ["RANK"]))
    one = build(system, build_model(sizes), DTYPES[dtype], sizes.batch)

    def steps(count: int) -> dict[str, list[float]]:
        times, cpu_times, losses = [], [], []
        for _ in range(count):
            start, cpu_start = time.perf_counter(), time.process_time()
            loss = one(*batch)
            times.append(time.perf_counter() - start)
            cpu_times.append(time.process_time() - cpu_start)
            losses.append(float(loss))
        if torch.get_num_threads() != 1:
            raise RuntimeError(f"{system} has set {torch.get_num_threads()} threads; every contender is measured with one")
        return {"times": times, "cpu_times": cpu_times, "losses": losses}

    channel.serve({"steps": steps})


def build(system: str, model: nn.Module, dtype: torch.dtype, batch: int) -> Step:
    """`model` trained by a contender. Makes the process group, unless the contender makes its own."""
    kind, *rest = system.split(":")
    if kind == "slipstream":
        transport, fewer = "gloo" if "gloo" in rest else "auto", COMPRESSED.get(rest[-1], {})
        return _slipstream(model, dtype, batch, int(rest[0]), transport, fewer)
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


def _of_engine(engine: Any) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _slipstream(model: nn.Module, dtype: torch.dtype, batch: int, stage: int, transport: str, blocks: dict[str, Any]) -> Step:
    import slipstream

    config = {**_config(dtype, batch, stage), "slipstream": {"transport": transport}, **blocks}
    return _of_engine(slipstream.initialize(model=model, config=config, model_parameters=model.parameters())[0])


def _deepspeed(model: nn.Module, dtype: torch.dtype, batch: int, stage: int, variant: str) -> Step:
    import deepspeed

    config = _config(dtype, batch, stage)
    config["steps_per_print"] = 2**31
    if variant:
        config["zero_optimization"].update(_variant(model, stage, variant))
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return _of_engine(deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0])


def _variant(model: nn.Module, stage: int, variant: str) -> dict[str, Any]:
    """`scatter`: gradients are reduce-scattered; by default stages 1 and 2 all-reduce one bucket of all ranks.
    `lean`: the documented bucket, prefetch and live-parameter options, set to one block, for the least memory."""
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
    return _torch_step(model, model, autocast=False)


def _ddp(model: nn.Module, dtype: torch.dtype) -> Step:
    """fp32 weights and gradients; under autocast if the others run in bf16."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _torch_step(model, wrapped, autocast=dtype is torch.bfloat16)


def _torch_step(model: nn.Module, wrapped: nn.Module, *, autocast: bool) -> Step:
    optimizer = _adamw(model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss: Tensor = wrapped(tokens, targets)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def _floor(model: nn.Module, dtype: torch.dtype) -> Step:
    """The work of every data-parallel system: the model in `dtype` and AdamW on this rank's share, without communication.

    It does not train: the optimizer's fp32 tensors have the right size and are not the model's. It multiplies as our engine
    does, so that nothing that does this work is below it.
    """
    from slipstream.ops import matmul

    matmul.use(True)
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
