"""The leg `sparse`: block-sparse attention over dense attention, and the longest sequence under a limit of memory.

The limit of a pattern is the reciprocal of its density: dense attention's time times the share of scores that are computed.
A causal pattern is compared with causal dense attention, of the scores below the diagonal.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import memory
from benchmarks.cgroup import meter
from benchmarks.legs import Options
from benchmarks.ranks import Ranks, Seat
from benchmarks.report import table, verdict, verdicts
from benchmarks.sequences import peak_of
from benchmarks.worker import Failed
from slipstream import attention
from slipstream.ops.block_sparse import BlockLayout, block_sparse_attention

if TYPE_CHECKING:
    from benchmarks.worker import Channel

HEADS, DIM = 4, 64
LENGTHS, BLOCKS = (2048, 4096, 8192, 16_384), (16, 32, 64)
JUDGED = 4096
SEED = "Fixed, 16 local blocks"  # the pattern of which DeepSpeed's paper claims 6 times dense attention's speed, in blocks of 16
PATTERNS: dict[str, Callable[[int], attention.SparsityConfig]] = {
    "Fixed": lambda block: attention.FixedSparsityConfig(HEADS, block),
    SEED: lambda block: attention.FixedSparsityConfig(HEADS, block, num_local_blocks=16),
    "BigBird": lambda block: attention.BigBirdSparsityConfig(HEADS, block),
    "BSLongformer": lambda block: attention.BSLongformerSparsityConfig(HEADS, block),
    "sliding window, causal": lambda block: attention.LocalSlidingWindowSparsityConfig(HEADS, block, 5),
}
SHARE = {64: 0.9, 16: 0.5}  # of the limit
LIMIT = 4_000_000_000  # bytes of a process
LAYERS = 2
STEP = 512  # tokens by which lengths differ


def run(options: Options) -> str:
    torch.set_num_threads(1)
    rows, judged = [], []
    for length in LENGTHS[: 1 if options.quick else None]:
        q, k, v = inputs = _inputs(length)
        turns = options.num_rounds(5 if length <= JUDGED else 3)
        contenders: dict[Any, Callable[[], Tensor]] = {
            causal: partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal) for causal in (False, True)
        }
        layouts: dict[Any, BlockLayout] = {}
        for name, pattern in PATTERNS.items():
            for block in BLOCKS if name != SEED else (16,):
                random.seed(0)
                layouts[name, block] = BlockLayout(pattern(block).make_layout(length), block, causal="causal" in name)
                contenders[name, block] = partial(block_sparse_attention, q, k, v, layouts[name, block])
        if length == LENGTHS[0]:
            contenders["dense"] = partial(
                block_sparse_attention, q, k, v, BlockLayout(torch.ones(1, length // 64, length // 64), 64)
            )
        seconds = _take_turns(contenders, inputs, turns)
        for (name, block), layout in layouts.items():
            mine = seconds[name, block]
            gain = statistics.median(a / b for a, b in zip(seconds[layout.causal], mine, strict=True))
            share = gain * density(layout)
            rows.append(
                [
                    *(f"{length:,}", name, str(block), f"1/{1 / density(layout):.1f}", f"{statistics.median(mine) * 1e3:.0f}"),
                    *(f"{gain:.1f}", f"{share:.2f}"),
                ]
            )
            if length == JUDGED and name == SEED:
                judged.append(verdict(f"{name}: dense over it (the seed's 6 times, at its own density)", gain, 6, at_least=True))
            if length == JUDGED and block in SHARE:
                judged.append(verdict(f"{name}, block {block}: share of the limit", share, SHARE[block], at_least=True))
        if "dense" in seconds:
            gain = statistics.median(a / b for a, b in zip(seconds[False], seconds["dense"], strict=True))
            judged.append(verdict("a dense layout: SDPA over ours", gain, 1.1, at_least=True))
        print(f"  sparse {length:,} tokens: done", flush=True)
    lengths, told = _longest(options)
    if len(lengths) == 2:
        judged.append(
            verdict("the longest sequence over eager attention's", lengths["sparse"] / lengths["eager"], 10, at_least=True)
        )
    return "\n\n".join(
        (
            f"One sequence, {HEADS} heads of {DIM} features, fp32, one thread; forward and backward, medians of turns. Dense is "
            "torch's scaled_dot_product_attention.",
            table(["tokens", "pattern", "block", "density", "ms", "dense over it", "share of the limit"], rows),
            f"Gradients of {LAYERS} layers of BERT-base (transformers) on a sequence, fp32, layers recomputed, MLPs "
            f"in chunks of {STEP} tokens, eager attention and BigBird's blocks of 64; at most {LIMIT / 1e9} GB:",
            table(["attention", "longest sequence", "GB", "s"], told),
            verdicts(judged),
        )
    )


def _inputs(length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in range(3)]


def density(layout: BlockLayout) -> float:
    """Of the scores that dense attention computes: all, or those up to the diagonal."""
    if not layout.causal:
        return layout.density
    blocks, size = layout.blocks[0].float(), layout.block
    diagonal = blocks.diagonal().sum()
    scores = (blocks.sum() - diagonal) * size * size + diagonal * size * (size + 1) / 2
    return float(scores / (layout.length * (layout.length + 1) / 2))


def _take_turns(contenders: dict[Any, Callable[[], Tensor]], inputs: list[Tensor], turns: int) -> dict[Any, list[float]]:
    weight = torch.randn_like(inputs[0])
    seconds: dict[Any, list[float]] = {name: [] for name in contenders}
    for turn in range(-1, turns):  # the first warms up
        for name, attend in contenders.items():
            begin = time.perf_counter()
            torch.autograd.grad(attend(), inputs, weight)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def _longest(options: Options) -> tuple[dict[str, int], list[list[str]]]:
    """The longest sequence of each attention under the limit: it doubles until it does not fit, then steps are halved."""
    longest, rows = dict[str, int](), []
    for system in ("eager", "sparse"):
        try:
            with meter() as gauge:
                seat = Seat(env=memory.MALLOC, enter=gauge.enter)
                with Ranks("benchmarks.sparse:bert", {"system": system}, 1, name=system, seat=seat) as ranks:
                    fits, peak, length = 0, 0.0, STEP
                    step = 0
                    while length > fits and length <= (STEP if options.quick else 1 << 20):
                        begin = time.perf_counter()
                        most = peak_of(ranks, gauge, 1, length)
                        took = time.perf_counter() - begin
                        print(f"  sparse {system}: {length:,} tokens, {most / 1e9:.3f} GB, {took:.1f} s", flush=True)
                        if most <= LIMIT:
                            fits, peak, seconds = length, most, took
                            step = step // 2 if step else 0
                        else:
                            step = (step or length // 2) // 2
                        length = fits + step if step else 2 * length
                        length -= length % STEP
                        if step and step < max(STEP, fits // 16):
                            break
        except (OSError, Failed) as error:
            rows.append([system, str(error).splitlines()[0], "", ""])
            continue
        longest[system] = fits
        rows.append([system, f"{fits:,}", f"{peak / 1e9:.2f}", f"{seconds:.0f}"])
    return longest, rows


def bert(channel: Channel, system: str) -> None:
    """The target of a rank. Its handler computes the gradients of one sequence of `length` tokens."""
    torch.set_num_threads(2)
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "max_position_embeddings": 1 << 17,
        "chunk_size_feed_forward": STEP,
        "vocab_size": 1024,
        "num_hidden_layers": LAYERS,
    }
    dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertModel(BertConfig(**sizes, **dropout), add_pooling_layer=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.set_attn_implementation("eager")
    if system == "sparse":
        attention.use_sparse_attention(model, {"mode": "bigbird", "block": 64})
    model.train()

    def step(length: int) -> float:
        model.zero_grad(set_to_none=True)
        loss = model(torch.randint(1024, (1, length))).last_hidden_state.square().mean()
        loss.backward()
        return float(loss.detach())

    channel.serve({"step": step})
