"""The contenders of the legs on layouts, in a rank. Names: SYSTEM:LAYOUT[:VARIANT].

compute:half   forwards and backwards of half of the micro-batches on each rank, without communication; compute:llama: of the Llama
slipstream:pp  a pipeline; variants: the schedules, and stages of a rank      slipstream:dp  data parallelism (ZeRO-1)
slipstream:tp  sliced layers; variants: overlap (tp_overlap_comm), tokens, or sums: its sums alone
slipstream:mesh:pp2.tp2  any mesh; with the word gloo off shared memory
slipstream:sp  shares of sequences in a Llama of transformers
half:tp        a model with half of the heads and half of each MLP, and AdamW: the products and updates of one of two slices
deepspeed:pp   its PipelineModule                       deepspeed:tp   AutoTP; variant: overlap
torch:tp       parallelize_module, with DTensors
The last variant `gloo` takes ours off shared memory.
"""

from __future__ import annotations

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
                child.__class__ = nn.Linear  # type: ignore[assignment]


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
    kind, layout, *variants = system.split(":")
    step = _BUILDERS[f"{kind}:{layout}"](Workload(**work), micros, stage, variants)

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


def _compute(work: Workload, micros: int, stage: int, variants: list[str]) -> Callable[[], Any]:
    return _computing(_model(work), work, micros, lambda model, tokens, targets: loss_of(model(tokens), targets))


def _compute_llama(work: Workload, micros: int, stage: int, variants: list[str]) -> Callable[[], Any]:
    torch.manual_seed(0)
    return _computing(Llama(work), work, micros, lambda model, tokens, targets: model(tokens, targets))


def _multiply_as_ours() -> None:
    """For bounds and ideals: nothing of ours is below them by its products (`slipstream.products`) alone."""
    from slipstream.ops import matmul

    matmul.use(True)


def _computing(model: nn.Module, work: Workload, micros: int, loss_with: Callable[..., Tensor]) -> Callable[[], Any]:
    _multiply_as_ours()
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    items = batches(work, 0)

    def step() -> Any:
        loss = torch.zeros(())
        for _ in range(micros // dist.get_world_size()):
            tokens, targets = next(items)
            loss = loss_with(model, tokens, targets)
            torch.autograd.backward(loss)
        for param in model.parameters():
            param.grad = None
        return loss.detach()

    return step


def _pipeline(work: Workload, micros: int, stage: int, variants: list[str]) -> Callable[[], Any]:
    import slipstream

    slipstream.init_distributed(verbose=False)
    torch.manual_seed(0)
    specs = [slipstream.LayerSpec(*each) for each in layers(work)]
    chunks = next((int(word) for word in variants if word.isdigit()), 1)
    num_stages = dist.get_world_size()
    model = slipstream.PipelineModule(
        specs, num_stages=num_stages, num_chunks=chunks, loss_fn=loss_of, partition_method="parameters"
    )
    own = {"pipeline": {"schedule": variants[0]}, "transport": _transport(variants)}
    engine = slipstream.initialize(model=model, config=config(work, micros, stage, slipstream=own))[0]
    items = batches(work, 0)
    return lambda: engine.train_batch(items)


def _data(work: Workload, micros: int, stage: int, variants: list[str]) -> Callable[[], Any]:
    import slipstream

    slipstream.init_distributed(verbose=False)
    size = dist.get_world_size()
    own = {"transport": _transport(variants)}
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


def _deepspeed_pipeline(work: Workload, micros: int, stage: int, variants: list[str]) -> Callable[[], Any]:
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


def _transport(variants: list[str]) -> str:
    return "gloo" if "gloo" in variants else "auto"


class Slice(nn.Module):
    """A block as Llama has it; `share` is the share of its heads and of its MLP."""

    def __init__(self, width: int, heads: int, share: float = 1.0) -> None:
        super().__init__()
        self.head_dim, self.num_heads = width // heads, int(heads * share)
        inner, hidden = int(width * share), int(4 * width * share)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        result: Tensor = x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return result


class Llama(nn.Module):
    """forward(tokens, targets) -> mean cross entropy."""

    def __init__(self, work: Workload, share: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Embedding(work.vocab, work.width)
        self.layers = nn.ModuleList(Slice(work.width, work.heads, share) for _ in range(work.depth))
        self.norm, self.last = nn.RMSNorm(work.width), nn.Linear(work.width, work.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.first(tokens)
        for layer in self.layers:
            x = layer(x)
        return loss_of(self.last(self.norm(x)), targets)


_SPECS = [
    {"patterns": [r".*\.(q|k|v|gate|up)_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
]


def _parallel(variants: list[str]) -> dict[str, Any]:
    specs = {"layer_specs": _SPECS, "use_default_specs": False}
    return {"autotp_size": dist.get_world_size(), "tp_overlap_comm": "overlap" in variants, "partition_config": specs}


def _trained(
    model: Callable[..., Tensor], work: Workload, backward: Callable[[Tensor], Any], update: Callable[[], Any]
) -> Callable[[], Any]:
    items = batches(work, 0)

    def step() -> Any:
        tokens, targets = next(items)
        loss = model(tokens, targets)
        backward(loss)
        update()
        return loss.detach()

    return step


def _slices(work: Workload, micros: int, stage: int, variants: list[str]) -> Callable[[], Any]:
    import slipstream

    slipstream.init_distributed(verbose=False)
    torch.manual_seed(0)
    own = {"transport": _transport(variants), "tensor": {"sequence_parallel": "tokens" in variants}}
    settings = config(work, 1, 0, slipstream=own, tensor_parallel=_parallel(variants))
    engine = slipstream.initialize(model=Llama(work), config=settings)[0]
    if variants[:1] == ["sums"]:
        exchange, x = engine.exchange("tp"), torch.randn(work.batch, work.length, work.width)

        def sums() -> Any:
            for _ in range(4 * work.depth):
                exchange.sum(x)
            return 0.0

        return sums
    return _trained(engine, work, engine.backward, engine.step)


def _mesh(work: Workload, micros: int, stage: int, variants: list[str]) -> Callable[[], Any]:
    """A Llama on a mesh such as `pp2.tp2`."""
    import slipstream

    slipstream.init_distributed(verbose=False)
    torch.manual_seed(0)
    words = variants[0].split(".")
    sizes = {word[:2]: int(word[2:]) for word in words if word[:2] in ("pp", "dp", "sp", "tp")}
    stage = 3 if "zero3" in words else stage
    mesh = {axis: size for axis, size in sizes.items() if axis != "dp"}
    parallel = {"partition_config": {"layer_specs": _SPECS, "use_default_specs": False}}
    pipeline = {"reduce": variants[1] if variants[1:] else "step", "schedule": "zero_bubble" if "zero_bubble" in words else "1f1b"}
    micros //= sizes.get("dp", 1)
    own = {"mesh": mesh, "pipeline": pipeline, "transport": _transport(words)}
    settings = config(work, micros, stage, slipstream=own, tensor_parallel=parallel)
    if sizes.get("pp", 1) == 1:
        engine = slipstream.initialize(model=Llama(work), config=settings)[0]
        one = _trained(engine, work, engine.backward, engine.step)
        return lambda: [one() for _ in range(micros)][-1]
    specs: list[tuple[Any, ...]] = [
        (nn.Embedding, work.vocab, work.width),
        *[(Slice, work.width, work.heads)] * work.depth,
        (Last, work),
    ]
    model = slipstream.PipelineModule(
        [slipstream.LayerSpec(*each) for each in specs], num_stages=sizes["pp"], loss_fn=loss_of, partition_method="type:Slice"
    )
    engine = slipstream.initialize(model=model, config=settings)[0]
    items = batches(work, engine.mesh.batch.index)
    return lambda: engine.train_batch(items)


def _shares(work: Workload, micros: int, stage: int, variants: list[str]) -> Callable[[], Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    import slipstream

    slipstream.init_distributed(verbose=False)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": work.depth, "num_attention_heads": work.heads}
    llama = LlamaConfig(vocab_size=work.vocab, hidden_size=work.width, intermediate_size=4 * work.width, **sizes)
    own = {"mesh": {"sp": dist.get_world_size()}, "transport": _transport(variants)}
    engine = slipstream.initialize(model=LlamaForCausalLM(llama), config=config(work, micros, stage, slipstream=own))[0]

    def loss_with(tokens: Tensor, targets: Tensor) -> Tensor:
        tokens, targets = (whole.chunk(dist.get_world_size(), 1)[dist.get_rank()] for whole in (tokens, targets))
        loss: Tensor = engine(input_ids=tokens, labels=targets, shift_labels=targets).loss
        return loss

    one = _trained(loss_with, work, engine.backward, engine.step)
    return lambda: [one() for _ in range(micros)][-1]


def _half(work: Workload, micros: int, stage: int, variants: list[str]) -> Callable[[], Any]:
    _multiply_as_ours()
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(0)
    model = Llama(work, share=1 / dist.get_world_size())
    return _by_torch(model, work)


def _by_torch(model: nn.Module, work: Workload, fused: bool = True) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=fused
    )

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return _trained(model, work, torch.autograd.backward, update)


def _torch_slices(work: Workload, micros: int, stage: int, variants: list[str]) -> Callable[[], Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(0)
    model, mesh = Llama(work), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        plan: dict[str, Any] = {f"{name}_proj": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        parallelize_module(layer, mesh, plan | {f"{name}_proj": RowwiseParallel() for name in ("o", "down")})
    return _by_torch(model, work, fused=False)


def _autotp(work: Workload, micros: int, stage: int, variants: list[str]) -> Callable[[], Any]:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = Llama(work)
    settings = config(work, 1, 0, tensor_parallel=_parallel(variants))
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]
    return _trained(engine, work, engine.backward, engine.step)


_BUILDERS: dict[str, Callable[[Workload, int, int, list[str]], Callable[[], Any]]] = {
    "compute:half": _compute,
    "compute:llama": _compute_llama,
    "slipstream:pp": _pipeline,
    "slipstream:dp": _data,
    "deepspeed:pp": _deepspeed_pipeline,
    "slipstream:tp": _slices,
    "slipstream:mesh": _mesh,
    "slipstream:sp": _shares,
    "half:tp": _half,
    "torch:tp": _torch_slices,
    "deepspeed:tp": _autotp,
}
