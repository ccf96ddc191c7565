"""The leg `long`: a token of one stream after 8,192 positions, with one key-value head and with three, on one thread and on all.

Random weights in the shape of SmolLM2-135M (with three heads, which share one key, in the model with one), and random keys and
values. The floor is the bytes of weights, keys and values at the rate at which all cores read. With `--before FOLDER`, the same of
that checkout, in turns.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.serving.limits import Rates
from benchmarks.worker import ROOT, Worker

if TYPE_CHECKING:
    from benchmarks.worker import Channel

CONTEXT, WIDTH, INNER, LAYERS, HEAD, VOCAB = 8192, 576, 1536, 30, 64, 49152
KV_HEADS = {1: 3, 3: 9}  # and the heads that share them
TARGETS = {1: 1.3, 3: 1.1}  # of two threads
TURN, ROUNDS = 10, 7  # tokens
BEFORE = "before"


def token(channel: Channel, kv_heads: int, threads: int) -> None:
    """A worker. `tokens`: the median seconds of a token."""
    import torch

    from slipstream.inference.core import Batch, Chunk, Request, SamplingParams
    from slipstream.inference.models import from_hf, from_state
    from slipstream.inference.native import NativeDecoder

    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = KV_HEADS[kv_heads]
    config = from_hf(
        {
            "model_type": "llama",
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": HEAD,
            "vocab_size": VOCAB,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        }
    )
    layer = {
        **{f"self_attn.{name}_proj": (heads * HEAD, WIDTH) if name == "q" else (kv_heads * HEAD, WIDTH) for name in "qkv"},
        "self_attn.o_proj": (WIDTH, heads * HEAD),
        **{f"mlp.{name}_proj": (INNER, WIDTH) for name in ("gate", "up")},
        "mlp.down_proj": (WIDTH, INNER),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (WIDTH,)),
    }
    shapes: dict[str, tuple[int, ...]] = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens": (VOCAB, WIDTH), "model.norm": (WIDTH,)}
    state = {f"{name}.weight": (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}
    blocks = CONTEXT // 16
    runner = NativeDecoder(config, from_state(config, state), num_blocks=blocks, threads=threads)
    for cached in (*runner.keys, *runner.values):
        cached.copy_(torch.randn(cached.shape, dtype=cached.dtype))
    ids = torch.randint(VOCAB, (CONTEXT,)).tolist()
    one = Request(id="", tokens=ids, params=SamplingParams(), blocks=list(range(blocks)))
    batch = Batch((Chunk(one, CONTEXT - 1, CONTEXT),), ())

    def tokens() -> float:
        seconds = []
        for _ in range(TURN):
            start = time.perf_counter()
            runner.forward(batch)
            seconds.append(time.perf_counter() - start)
        return median(seconds)

    channel.serve({"tokens": tokens})


def _nbytes(kv_heads: int) -> int:
    """Of weights, keys and values, in bf16."""
    heads = KV_HEADS[kv_heads]
    layer = 2 * WIDTH * HEAD * (heads + kv_heads) + 3 * WIDTH * INNER + 2 * kv_heads * HEAD * CONTEXT
    return 2 * (LAYERS * layer + VOCAB * WIDTH)


def run(options: Options) -> str:
    cores, rounds = len(os.sched_getaffinity(0)), options.num_rounds(ROUNDS)
    sides = ("ours", *([BEFORE] if options.before else []))
    seconds: dict[tuple[int, int, str], list[float]] = {}
    rates: list[Rates] = []
    for kv_heads in KV_HEADS:
        cases = [(kv_heads, threads, side) for threads in sorted({1, cores}) for side in sides]
        with ExitStack() as stack:
            measured = stack.enter_context(Worker("benchmarks.serving.limits:measure", name="rates"))
            measured.ready()  # alone: it measures as it starts
            rates += [Rates(*measured.call("rates"))] * rounds
            workers = {}
            for case in cases:
                path = {"PYTHONPATH": f"{options.before}/src{os.pathsep}{ROOT}"} if case[2] == BEFORE else {}
                arguments: dict[str, Any] = {"kv_heads": case[0], "threads": case[1]}
                workers[case] = stack.enter_context(Worker("benchmarks.serving.long:token", arguments, name=str(case), env=path))
            for worker in workers.values():
                worker.ready()
            for turn in range(rounds + 1):  # the first is not counted
                took = {case: worker.call("tokens") for case, worker in workers.items()}
                for case, one in took.items() if turn else ():
                    seconds.setdefault(case, []).append(one)
    rows, judged = [], []
    for (kv_heads, threads, side), times in seconds.items():
        own = rates[:rounds] if kv_heads == next(iter(KV_HEADS)) else rates[rounds:]
        floor = [_nbytes(kv_heads) / rate.read for rate in own]
        single = seconds[kv_heads, 1, side]
        row = [f"{kv_heads}", f"{threads}", side, Spread.of([1e3 * one for one in times]).show(2)]
        row += [Spread.ratio(times, floor).show(2) if threads == cores else "-", Spread.ratio(single, times).show(2)]
        rows.append(row)
        if side == BEFORE and threads == cores:
            gain = Spread.ratio(times, seconds[kv_heads, threads, "ours"]).median
            figure = f"{kv_heads} key-value heads, {threads} threads, tokens/s over the checkout before"
            judged.append(verdict(figure, gain, TARGETS[kv_heads], at_least=True))
    head = ["key-value heads", "threads", "of", "ms/token", "over the floor", "tokens/s over one thread's"]
    read = Spread.of([rate.read / 1e9 for rate in rates]).show(1)
    text = (
        f"A token of one stream after {CONTEXT:,} positions, in bf16; medians of {TURN} tokens in each of {rounds} turns "
        f"(min-max). All cores read {read} GB/s (the sum of a tensor), which is the floor's rate."
    )
    return "\n\n".join((text, table(head, rows), *([verdicts(judged)] if judged else [])))
