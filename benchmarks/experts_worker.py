"""The contenders of the leg on experts, in a rank.

layer    one layer's forward and backward: SYSTEM[:gated][, KIND]. dense has the active products of k experts in one MLP; deepspeed
         is its MoE, padded to the fullest expert, or with a capacity of 1 (it drops, and pads the others); mixtral:WAY is
         transformers' block, whose experts are computed in that way. Peers multiply as torch does, the others as our engine lets
         it (`slipstream.products`). skewed: half of the tokens prefer expert 0; bf16
split    the same of a layer whose experts are split over the ranks, and the bytes that its rows have to send
travel   a layer split over two ranks with a shared expert, and its parts
model    a GPT's step: dense, or with experts (ep: split over the ranks); and `swap`, the exchanges of that alone
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.layouts_worker import First, Last, PlainBlock, batches, config, loss_of
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from benchmarks.worker import Channel

TOKENS, WIDTH, GATED = 2048, 512, 1376  # 1376: the gated MLP's features, 8/3 of the width
EXPERTS, TOP = 8, 2  # of the GPT's layers


def layer(channel: Channel, system: str, num_experts: int, k: int) -> None:
    """A rank's target: times of forward and backward of one layer, whose gradients start empty each time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, _, kind = system.partition(", ")
    if name.partition(":")[0] in ("slipstream", "dense"):
        from slipstream.ops import matmul

        matmul.use(True)
    module, call = _LAYERS[name](num_experts, k)
    x = torch.randn(TOKENS, WIDTH)
    if kind == "skewed":
        x = _skewed(module, x)
    if kind == "bf16":
        module, x = module.bfloat16(), x.bfloat16()
    x.requires_grad_()

    def steps(count: int) -> dict[str, Any]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            call(x).backward()
            times.append(time.perf_counter() - start)
            module.zero_grad(set_to_none=True)
            x.grad = None
        return {"times": times}

    channel.serve({"steps": steps})


def _skewed(module: nn.Module, x: Tensor) -> Tensor:
    """Tokens of which half prefer expert 0: the router's logits spread by 0.6, and those of expert 0 are 0.8 larger."""
    direction = nn.functional.normalize(torch.randn(WIDTH), dim=0)
    for name, param in module.named_parameters():
        if name.endswith(("router.weight", "wg.weight")):
            with torch.no_grad():
                param[0] += 0.8 * direction
    return x + direction


def split(channel: Channel, system: str, num_experts: int, k: int) -> None:
    """A rank's target: times of forward and backward of a layer whose experts are split over the ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = int(os.environ["WORLD_SIZE"])
    if system == "deepspeed":
        module, call = _deepspeed(False, ep=world)(num_experts, k)
    else:
        import slipstream

        slipstream.init_distributed(verbose=False)
        module, call = _ours(num_experts, k)
        blocks: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": world}}
        blocks |= {"slipstream": {"transport": "gloo" if system.endswith("gloo") else "auto"}}
        module = slipstream.initialize(model=module, config={"train_micro_batch_size_per_gpu": 1, **blocks})[0].module
    torch.manual_seed(dist.get_rank())
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    params = [x, *module.parameters()]
    counts = module(x)[2].view(world, -1).sum(1)
    leaving = int(counts.sum() - counts[dist.get_rank()])
    arriving = torch.zeros(world, dtype=torch.int64)
    dist.all_to_all_single(arriving, counts.to(torch.int64))
    rows = leaving + int(arriving.sum() - arriving[dist.get_rank()])  # there and, of the others' tokens, back

    def steps(count: int) -> dict[str, Any]:
        times = []
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            torch.autograd.grad(call(x), params, allow_unused=True)
            times.append(time.perf_counter() - start)
        return {"times": times, "bytes": 2 * rows * WIDTH * 4}  # forward and backward

    channel.serve({"steps": steps})


def mlp(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, features), nn.GELU(), nn.Linear(features, WIDTH))


def _summed(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        result = module(x)
        return result.sum() if isinstance(result, Tensor) else result[0].sum() + 0.01 * result[1]

    return call


def _dense(num_experts: int, k: int) -> Any:
    module = mlp(4 * WIDTH * k)
    return module, _summed(module)


def _dense_gated(num_experts: int, k: int) -> Any:
    from slipstream.moe import GatedMLP

    module = GatedMLP(WIDTH, GATED * k)
    return module, _summed(module)


def _ours(num_experts: int, k: int) -> Any:
    from slipstream.moe import MoE

    module = MoE(WIDTH, mlp(4 * WIDTH), num_experts, k=k)
    return module, _summed(module)


def _ours_gated(num_experts: int, k: int) -> Any:
    from slipstream.moe import MoE

    module = MoE(WIDTH, None, num_experts, k=k, expert_size=GATED)
    return module, _summed(module)


def _deepspeed(drops: bool, ep: int = 1) -> Callable[[int, int], Any]:
    def build(num_experts: int, k: int) -> Any:
        import deepspeed
        from deepspeed.moe.layer import MoE

        deepspeed.init_distributed("gloo", verbose=False)
        module = MoE(WIDTH, mlp(4 * WIDTH), num_experts, ep_size=ep, k=k, drop_tokens=drops)
        module.set_deepspeed_parallelism()
        return module, _summed(module)

    return build


def _mixtral(way: str) -> Callable[[int, int], Any]:
    def build(num_experts: int, k: int) -> Any:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        sizes = {"hidden_size": WIDTH, "intermediate_size": GATED, "num_local_experts": num_experts, "num_experts_per_tok": k}
        settings: dict[str, Any] = {**sizes, "experts_implementation": way}
        module = MixtralSparseMoeBlock(MixtralConfig(**settings))
        for param in module.parameters():
            nn.init.normal_(param, std=0.02)
        return module, lambda x: module(x[None]).sum()

    return build


_LAYERS: dict[str, Callable[[int, int], Any]] = {
    "dense": _dense,
    "slipstream": _ours,
    "deepspeed": _deepspeed(False),
    "deepspeed:drops": _deepspeed(True),
    "dense:gated": _dense_gated,
    "slipstream:gated": _ours_gated,
    "mixtral:eager": _mixtral("eager"),
    "mixtral:grouped_mm": _mixtral("grouped_mm"),
}


# -- a model's step --


class ExpertBlock(PlainBlock):
    """A GPT's block with experts in place of its MLP, each with half of its features: two of them have its products."""

    def __init__(self, work: Workload) -> None:
        from slipstream.moe import MoE

        super().__init__(work.width, work.heads)
        del self.up, self.down
        self.moe = MoE(work.width, mlp(2 * work.width), EXPERTS, k=TOP)

    def mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.moe(x)[0]
        return out


def model(channel: Channel, system: str, work: dict[str, Any]) -> None:
    """A rank's target: times of training steps of a GPT, or of the exchanges of one."""
    torch.set_num_threads(1)
    import slipstream

    sizes = Workload(**work)
    slipstream.init_distributed(verbose=False)
    torch.manual_seed(0)
    block = (lambda: PlainBlock(sizes.width, sizes.heads)) if system == "dense" else (lambda: ExpertBlock(sizes))
    net = nn.Sequential(First(sizes), *(block() for _ in range(sizes.depth)), Last(sizes))
    split = {"expert_parallel": {"enabled": True, "autoep_size": dist.get_world_size()}} if system in ("ep", "swap") else {}
    engine = slipstream.initialize(model=net, config=config(sizes, 1, 1, **split))[0]
    items = batches(sizes, dist.get_rank())

    def train() -> None:
        tokens, targets = next(items)
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()

    def swap() -> None:
        """Forward and backward of each layer: two all-to-alls of the rows each, evenly, and one of the counts."""
        exchange: Any = next(module.exchange for module in net.modules() if getattr(module, "exchange", None) is not None)
        rows = torch.ones(sizes.batch * sizes.length * TOP, sizes.width)
        even = [len(rows) // exchange.size] * exchange.size
        own = [EXPERTS // exchange.size] * exchange.size
        for _ in range(sizes.depth):
            exchange.all_to_all(torch.zeros(EXPERTS), own, own)
            for _ in range(4):
                exchange.all_to_all(rows, even, even)

    def steps(count: int) -> dict[str, Any]:
        times = []
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            swap() if system == "swap" else train()
            times.append(time.perf_counter() - start)
        return {"times": times}

    channel.serve({"steps": steps})


# -- rows over a slow link --


def travel(channel: Channel, system: str) -> None:
    """A rank's target: times of a layer with a shared expert that computes while rows travel, or after; and of each alone."""
    torch.set_num_threads(1)
    import slipstream
    from slipstream.moe import MoE

    slipstream.init_distributed(verbose=False)
    torch.manual_seed(0)
    shared = mlp(8 * WIDTH)
    layer = MoE(WIDTH, mlp(WIDTH // 4), EXPERTS, k=TOP, shared=shared if system == "overlapped" else None)
    model = nn.ModuleList([layer, shared])
    blocks = {"expert_parallel": {"enabled": True, "autoep_size": 2}, "slipstream": {"transport": "gloo"}}
    engine = slipstream.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, **blocks})[0]
    x = torch.randn(TOKENS // 4, WIDTH, requires_grad=True)
    calls: dict[str, Callable[[], Tensor]] = {
        "overlapped": lambda: layer(x)[0],
        "in turn": lambda: layer(x)[0] + shared(x),
        "rows alone": lambda: layer(x)[0],
        "shared alone": lambda: shared(x),
    }
    params = [x, *engine.module.parameters()]

    def steps(count: int) -> dict[str, Any]:
        times = []
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            torch.autograd.grad(calls[system]().square().sum(), params, allow_unused=True)
            times.append(time.perf_counter() - start)
        return {"times": times}

    channel.serve({"steps": steps})
