"""Layouts of ranks over the axes pp, dp, sp and tp, and a model of the time and memory of a step on each. Pure arithmetic.

A decoder has L blocks of P parameters each, width h, and E parameters outside of them. A step has B sequences of S tokens; a micro-
batch of a replica has b of them, and m = B / (d b) micro-batches follow each other. Ranks are ordered pp, dp, sp, tp (innermost):
an axis crosses hosts if it and all axes inside it need more ranks than a host has.

compute    6 P FLOPs per token for the products of forward and backward (Kaplan et al., arXiv:2001.08361), and 6 S h for a block's
           scores and values, causal; 4/3 of it with recomputation
bubble     parallel/schedule.py's simulation of the step, minus the busiest rank's computing
tp         4 sums per block and micro-batch (Megatron-LM, arXiv:1909.08053), each 2 (t-1)/t of b S h / s elements on a ring
sp         4 all-to-alls per block and micro-batch (Ulysses, arXiv:2309.14509), together 8 (s-1)/s of b S h / (s t) elements
pp         b S h / s elements each way at a boundary; between hosts each tp rank sends a share of them. A transfer delays the stages
           by one hop
dp         ZeRO 0 and 1: 2 (d-1)/d of the rank's parameters, reduced and gathered once a step; 3: gathered in each forward and
           backward, and reduced once in a pipeline, else for each micro-batch (arXiv:1910.02054). Counted: the part that computing
           does not hide, and one block's
memory     states by ZeRO's formula, 16 bytes per parameter in mixed precision, and activations of (10 + 24 / t) b S h / s bytes per
           block (Korthikanti et al., arXiv:2205.05198, with attention that keeps no scores); 2 b S h / s with recomputation;
           for as many micro-batches as a stage keeps. The busiest stage is the last: it has the head, and fewer blocks to balance
           the stages' times. With a very large vocabulary it has no blocks, and is still the longest

Between hosts, the ranks of a host share its link. Ranks that wait for each other inside layers are never equally fast: tp and sp
cost 3 % of computing besides their bytes (`python -m benchmarks slices` has measured 3 to 7 %).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.parallel.schedule import Costs, Style, rank_of, simulate, style_of

if TYPE_CHECKING:
    import torch

    from slipstream.config.plan import Plan

_WAITS = 0.03  # fraction of computing, on ranks that meet inside layers
_MOST_SIMULATED = 512  # micro-batches, over all stages; longer steps take the formula


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a decoder and of its step."""

    blocks: int
    block_params: int
    other_params: int  # embeddings and head
    width: int
    heads: int
    length: int  # tokens of a sequence
    batch: int  # sequences of a step, over all replicas

    @property
    def num_params(self) -> int:
        return self.blocks * self.block_params + self.other_params


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The ranks' resources: per second and rank; links in bytes per second, per rank within a host and per host between hosts."""

    ranks: int
    hosts: int
    flops: float
    inside: float  # bytes/s between two ranks of a host
    between: float  # bytes/s of a host's link
    memory: float = math.inf  # bytes of a rank
    element: int = 2  # bytes of an activation and a gradient
    state: int = 16  # bytes of weights, gradient and optimizer states per parameter

    @property
    def per_host(self) -> int:
        return self.ranks // self.hosts

    def link(self, stride: int, size: int) -> float:
        """Bytes per second of a rank along an axis whose neighbors are `stride` ranks apart."""
        if stride * size <= self.per_host and self.per_host % (stride * size) == 0:
            return self.inside
        return min(self.inside, self.between / min(stride, self.per_host))


class MeshLayout(NamedTuple):
    """Sizes of the axes, ZeRO stage, schedule and micro-batch."""

    pp: int
    dp: int
    sp: int
    tp: int
    zero: int
    schedule: str
    micro_batch: int
    recompute: bool
    chunks: int = 1  # stages on each rank

    def __str__(self) -> str:
        axes = [f"{name} {size}" for name, size in zip(("pp", "dp", "sp", "tp"), self[:4], strict=True) if size > 1]
        return " x ".join(axes) or "one rank"


class LayoutCost(NamedTuple):
    """Seconds of a step by part, and bytes of the fullest rank."""

    compute: float
    bubble: float
    pp: float
    tp: float
    sp: float
    dp: float
    memory: float

    @property
    def seconds(self) -> float:
        return sum(self[:6])


def layout_of(plan: Plan, world: int) -> MeshLayout:
    """The layout of a config on `world` ranks."""
    mesh, pipe = plan.mesh, plan.pipeline
    recomputes = plan.activations.way == "recompute" or (mesh.pp > 1 and pipe.recompute_interval > 0)
    sizes = mesh.pp, world // mesh.model_size, mesh.sp, mesh.tp
    chunks = 2 if pipe.schedule == "v" else pipe.chunks
    return MeshLayout(*sizes, plan.zero.stage, pipe.schedule, plan.batch.micro_batch_size, recomputes, chunks)


def decoder_of(model: torch.nn.Module, length: int, batch: int, heads: int | None) -> Model:
    """The sizes of a decoder for the layout model. Raises ValueError without repeated blocks, or if the heads are unknown."""
    import torch

    from slipstream.zero.wrap import repeated_blocks

    blocks = repeated_blocks(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no repeated blocks; layouts are compared for models that have")
    in_blocks = sum(parameter.numel() for name in blocks for parameter in model.get_submodule(name).parameters())
    config: Any = getattr(model, "config", None)
    heads = heads or getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ValueError(f"{type(model).__name__} has no config with num_attention_heads; pass --heads")
    widths = [module.embedding_dim for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    width = getattr(config, "hidden_size", None) or max(widths, default=0)
    if not width:
        raise ValueError(
            f"{type(model).__name__} has neither a config with hidden_size nor an embedding, so its width is not known"
        )
    total = sum(parameter.numel() for parameter in model.parameters())
    per_block = in_blocks // len(blocks)
    return Model(
        blocks=len(blocks),
        block_params=per_block,
        other_params=total - in_blocks,
        width=width,
        heads=heads,
        length=length,
        batch=batch,
    )


def cost_of(model: Model, cluster: Cluster, layout: MeshLayout) -> LayoutCost:
    """The time and memory of a step. Raises ValueError if there are more stages than blocks."""
    p, d, s, t, zero, schedule, b, recompute, chunks = layout
    if p * chunks > model.blocks:
        raise ValueError(f"the model has {model.blocks} blocks, fewer than the stages of pp {p} with {chunks} on each rank")
    micros = model.batch // (d * b)
    tokens = b * model.length / s
    table = model.other_params / 2  # the head; the other half is embeddings, which are looked up
    per_rank, head_at = _blocks_of(model.blocks, model.block_params, table, p, chunks, schedule)
    per_block = 6 * tokens * (model.block_params / t + model.length * model.width / t)
    work = max(per_block * count + 6 * tokens * table / t * (i == head_at) for i, count in enumerate(per_rank))
    blocks = max(per_rank)
    stage = work * (4 / 3 if recompute else 1) / cluster.flops
    hidden = b * model.length * model.width / s * cluster.element
    sums = 4 * blocks * 2 * (t - 1) / t * hidden / cluster.link(1, t) + _WAITS * stage * (t > 1)
    swaps = 8 * blocks * (s - 1) / s * hidden / t / cluster.link(t, s) + _WAITS * stage * (s > 1)
    busy = stage + sums + swaps
    turns = _turns(p, micros, schedule, chunks) if p > 1 else micros
    wire = cluster.link(d * s * t, p)
    sent = hidden / t if wire < cluster.inside else hidden  # between hosts, tp ranks send shares
    hops = 2 * (p * chunks - 1) * sent / wire if p > 1 else 0.0  # for the first and the last micro-batch
    tables = [table * ((i == 0) + (i == head_at)) for i in range(p)]
    owned = [(count * model.block_params + extra) / t for count, extra in zip(per_rank, tables, strict=True)]
    own = max(owned)
    passes = 2 if zero < 3 else 2 * micros + 1 if p > 1 else 3 * micros
    moved = passes * (d * s - 1) / (d * s) * own * cluster.element
    dp = moved / cluster.link(t, d * s)
    behind = stage * (micros if zero == 3 else 2 / 3)  # hides gathers, or a reduction (the last backward)
    dp = max(dp / (blocks + 1), dp - behind)
    shards = d * s
    sharded = {0: 0, 1: cluster.state - 4, 2: cluster.state - 2, 3: cluster.state}[zero]
    elements, whole = hidden / cluster.element, 10 + 24 / t  # bytes of a block's activations per element
    memory = 0.0
    for i, (count, params) in enumerate(zip(per_rank, owned, strict=True)):
        peak = {"gpipe": micros, "v": p, "zero_bubble": p, "1f1b": p - i}[schedule]
        kept = min(micros, p + (p - 1) / chunks if chunks > 1 and schedule == "1f1b" else peak)
        activations = elements * (kept * count * 2 + whole if recompute else kept * count * whole)
        memory = max(memory, params * (cluster.state - sharded + sharded / shards) + activations)
    return LayoutCost(stage * micros, (turns - micros) * busy, hops, sums * micros, swaps * micros, dp, memory)


@functools.cache
def _blocks_of(blocks: int, params: int, head: float, p: int, chunks: int, schedule: str) -> tuple[list[int], int]:
    """The number of blocks of each rank, with stages as equal as possible, where the head counts to the last; the head's rank."""
    stages = p * chunks
    ranks = [rank_of(p, Style(schedule), stage) for stage in range(stages)]

    def divided(last: int) -> list[int]:
        size, longer = divmod(blocks - last, max(stages - 1, 1))
        return [*(size + (stage < longer) for stage in range(stages - 1)), last]

    def spread(counts: list[int]) -> float:
        weights = [*(count * params for count in counts[:-1]), counts[-1] * params + head]
        return max(weights) - min(weights)

    counts = min(map(divided, range(1, blocks - stages + 2) if stages > 1 else (blocks,)), key=spread)
    return [sum(count for count, at in zip(counts, ranks, strict=True) if at == rank) for rank in range(p)], ranks[-1]


@functools.cache
def _turns(p: int, micros: int, schedule: str, chunks: int) -> float:
    """A step's length in micro-batches, at equal costs of forward, input and weight gradients."""
    if p * micros * chunks > _MOST_SIMULATED:
        return micros + (p - 1) / (3 if schedule in ("zero_bubble", "v") else 1) / chunks
    return simulate(p, micros, style_of(schedule, chunks), chunks, costs=Costs(*[1 / 3 / chunks] * 3)).makespan


def layouts(model: Model, cluster: Cluster, schedules: Sequence[str] = ("1f1b", "zero_bubble")) -> Iterator[MeshLayout]:
    """All layouts that the model's blocks, heads and batch allow."""
    for p, t, s in itertools.product(_divisors(model.blocks), _divisors(model.heads), _divisors(model.heads)):
        if cluster.ranks % (p * t * s) or model.length % s or model.heads % (s * t):
            continue
        d = cluster.ranks // (p * t * s)
        if model.batch % d:
            continue
        for b in (size for size in _divisors(model.batch // d) if size <= 16):
            ways = itertools.product((1, 3), schedules, (1, 2)) if p > 1 else ((zero, "1f1b", 1) for zero in (1, 3))
            for (zero, schedule, chunks), recompute in itertools.product(ways, (False, True)):
                if (zero == 1 or d * s > 1) and model.blocks % (p * chunks) == 0:
                    yield MeshLayout(p, d, s, t, zero, schedule, b, recompute, chunks)


def ranked(model: Model, cluster: Cluster) -> list[tuple[MeshLayout, LayoutCost]]:
    """The layouts that fit the memory, fastest first; only the best one for each set of axes and ZeRO stage."""
    best: dict[tuple[int, ...], tuple[MeshLayout, LayoutCost]] = {}
    for layout in layouts(model, cluster):
        cost = cost_of(model, cluster, layout)
        key = layout[:5]
        if cost.memory <= cluster.memory and (key not in best or cost.seconds < best[key][1].seconds):
            best[key] = layout, cost
    return sorted(best.values(), key=lambda pair: pair[1].seconds)


def efficiency(model: Model, cluster: Cluster, cost: LayoutCost) -> float:
    """The share of the ranks' arithmetic that the model's products use (without recomputation)."""
    tokens = model.batch * model.length
    needed = 6 * tokens * (model.num_params - model.other_params / 2 + model.blocks * model.length * model.width)
    return needed / (cluster.flops * cluster.ranks * cost.seconds)


def weak_scaling(model: Model, cluster: Cluster, ranks: Sequence[int]) -> list[tuple[Cluster, MeshLayout, LayoutCost]]:
    """The best layout at each number of ranks, with as many sequences per rank and ranks per host as given."""
    rows = []
    for count in ranks:
        larger = replace(cluster, ranks=count, hosts=max(1, count // cluster.per_host))
        ranking = ranked(replace(model, batch=model.batch * count // cluster.ranks), larger)
        if ranking:
            rows.append((larger, *ranking[0]))
    return rows


def scaling_table(model: Model, cluster: Cluster, rows: Sequence[tuple[Cluster, MeshLayout, LayoutCost]]) -> str:
    """The best layout for each number of ranks, at equal sequences per rank."""
    lines = [("ranks", "hosts", "layout", "ZeRO", "step", "GB/rank", "of peak")]
    for larger, layout, cost in rows:
        scaled = replace(model, batch=model.batch * larger.ranks // cluster.ranks)
        share = f"{100 * efficiency(scaled, larger, cost):.0f} %"
        facts = (f"{larger.ranks:,}", f"{larger.hosts:,}", str(layout), str(layout.zero))
        lines.append((*facts, f"{cost.seconds:.3g}", f"{cost.memory / 1e9:.1f}", share))
    return _aligned(lines)


def table(model: Model, cluster: Cluster, ranking: Sequence[tuple[MeshLayout, LayoutCost]], most: int = 8) -> str:
    """The best layouts, with the parts of their time."""
    if not ranking:
        return (
            f"no layout of {cluster.ranks} ranks fits {cluster.memory / 1e9:.1f} GB a rank: add ranks, or offload states "
            "(zero_optimization.offload_optimizer)"
        )
    head = ("layout", "ZeRO", "schedule", "micro-batch", "step", "compute", "bubble", "pp", "tp", "sp", "dp", "GB/rank", "of peak")
    rows: list[tuple[str, ...]] = [head]
    for layout, cost in ranking[:most]:
        micros = model.batch // (layout.dp * layout.micro_batch)
        parts = [f"{value:.3g}" for value in (cost.seconds, *cost[:6])]
        times = f" x {layout.chunks}" if layout.chunks > 1 else ""
        how = (layout.schedule + times if layout.pp > 1 else "") + (", recompute" if layout.recompute else "")
        rows.append(
            (
                str(layout),
                str(layout.zero),
                how.removeprefix(", ") or "-",
                f"{layout.micro_batch} x {micros}",
                *parts,
                f"{cost.memory / 1e9:.2f}",
                f"{100 * efficiency(model, cluster, cost):.0f} %",
            )
        )
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def settings(layout: MeshLayout) -> dict[str, object]:
    mesh = {name: size for name, size in (("pp", layout.pp), ("sp", layout.sp), ("tp", layout.tp)) if size > 1}
    own: dict[str, object] = {"mesh": mesh} if mesh else {}
    chosen: dict[str, object] = {"schedule": layout.schedule} if layout.schedule != "1f1b" else {}
    chosen |= {"chunks": layout.chunks} if layout.chunks > 1 else {}
    if layout.pp > 1 and chosen:
        own["pipeline"] = chosen
    if layout.recompute:
        own["activations"] = "recompute"
    keys: dict[str, object] = {"zero_optimization": {"stage": layout.zero}, "train_micro_batch_size_per_gpu": layout.micro_batch}
    return keys | ({"slipstream": own} if own else {})


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
