"""The leg `kernels`: the native kernels by themselves, on one thread, in turns.

First ours over torch's fused AdamW (with the passes that bf16 gradients and weights need there) and over memcpy of as many bytes,
from memory; then the cost of a call on 64 elements; then each family on every vector instruction set of this machine. There the
optimizers, the sum over ranks and quantization work on arrays that stay in second-level cache, limited by arithmetic, and on
arrays that do not ("from memory"). The decoder is a Llama of 88 million random weights: one sequence, limited by reading the
weights, sixteen, and a prompt. Last, sampling the rows of a forward, on one thread and on all.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import optimizer
from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdict, verdicts
from slipstream import ops
from slipstream.inference.config import TransformerConfig
from slipstream.inference.core import Batch, Chunk, Request, SamplingParams
from slipstream.inference.models import from_hf, from_state
from slipstream.inference.native import NativeDecoder
from slipstream.inference.sampler import LogitsRow, Sampler
from slipstream.inference.weights import DecoderWeights, quantize
from slipstream.ops import cpu, onebit
from slipstream.ops.rows import RowForm, dequantize_rows, quantize_rows

SETS = ("avx2", "avx512", "avx512vnni", "avx512bf16")  # the first is the reference
BF16, FP32 = torch.bfloat16, torch.float32
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
PROMPT, TOGETHER = 256, 16  # tokens; sequences
TURN = 0.01  # seconds of a turn, at least
VOCABULARY, ROWS = 151_936, 64  # of Qwen; sequences that run by default
SAMPLINGS: dict[str, dict[str, Any]] = {
    "top-p 0.9": {"top_p": 0.9},
    "no filter": {},
    "top-k 50": {"top_k": 50},
    "min-p 0.05": {"min_p": 0.05},
    "top-p 0.9 and a repetition penalty": {"top_p": 0.9, "repetition_penalty": 1.1},
    "top-p 0.9 at temperature 2.5": {"top_p": 0.9, "temperature": 2.5},
    "greedy": {"temperature": 0.0},
}


class Case(NamedTuple):
    kernel: str
    where: str
    run: Callable[[], object]
    num: int  # of elements or tokens, by which the time is divided


def movements(numel: int, where: str) -> Iterator[Case]:
    """The sum over ranks, quantization and its reverse."""
    out, wide = torch.empty(numel, dtype=BF16), torch.empty(numel)
    narrow, full = ([torch.randn(numel).to(dtype) for _ in range(count)] for dtype, count in ((BF16, 4), (FP32, 2)))
    yield Case("sum of 4 in bf16", where, partial(ops.sum_ranks, out, narrow, alpha=0.5, accumulate=False), numel)
    yield Case("sum of 2 in fp32", where, partial(ops.sum_ranks, wide, full, alpha=0.5, accumulate=False), numel)
    matrix = torch.randn(numel // 1024, 1024)
    int8, int4 = cpu.quantize_int8(matrix), cpu.quantize_int4(matrix, 32)
    yield Case("to int8", where, partial(cpu.quantize_int8, matrix), numel)
    yield Case("from int8", where, partial(cpu.dequantize_int8, *int8), numel)
    yield Case("to int4", where, partial(cpu.quantize_int4, matrix, 32), numel)
    yield Case("from int4", where, partial(cpu.dequantize_int4, *int4), numel)
    for bits in (8, 4):
        form = RowForm(bits=bits, columns=1024)
        packed = quantize_rows(matrix, form)
        yield Case(f"rows of {bits} bits to bf16", where, partial(dequantize_rows, packed, form, BF16), numel)


def weights_of(kind: str, config: TransformerConfig) -> DecoderWeights:
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(kind, torch.bfloat16)
    model: Any = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in LLAMA.items() if key != "model_type"}))
    weights = from_state(config, model.to(dtype).state_dict())
    return quantize(weights, kind, 32) if kind in ("int8", "int4") else weights


def decoder(kind: str) -> Iterator[Case]:
    config = from_hf(LLAMA)
    runner = NativeDecoder(config, weights_of(kind, config), num_blocks=PROMPT // 16 * (TOGETHER + 1), threads=1)
    per = PROMPT // 16

    def request(i: int) -> Request:
        tokens = torch.randint(LLAMA["vocab_size"], (PROMPT,)).tolist()
        return Request(id=str(i), tokens=tokens, params=SamplingParams(), blocks=list(range(i * per, (i + 1) * per)))

    requests = [request(i) for i in range(TOGETHER)]
    whole = Batch((Chunk(requests[0], 0, PROMPT),), ())
    for each in requests:
        runner.forward(Batch((Chunk(each, 0, PROMPT),), ()))
    last = [Chunk(each, PROMPT - 1, PROMPT) for each in requests]
    try:
        yield Case(f"decoder in {kind}", "a sequence alone", lambda: runner.forward(Batch((last[0],), ())), 1)
        yield Case(f"decoder in {kind}", f"{TOGETHER} sequences", lambda: runner.forward(Batch(tuple(last), ())), TOGETHER)
        yield Case(f"decoder in {kind}", f"a prompt of {PROMPT}", lambda: runner.forward(whole), PROMPT)
    finally:
        runner.close()


def seconds(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def turns(case: Case, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds per call on each instruction set, round by round; the first round is not counted."""
    case.run()
    calls = max(1, int(TURN / seconds(case.run, 1)))
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names:
            assert cpu.use_isa(name), name
            took = seconds(case.run, calls)
            if turn:
                times[name].append(took)
    return times


def per_unit(case: Case, took: float) -> str:
    return f"{took / case.num * 1e3:.3g} ms/token" if "decoder" in case.kernel else f"{took / case.num * 1e9:.3f} ns/element"


# -- ours over a peer --


class Pair(NamedTuple):
    name: str
    peer: str
    nbytes: int  # that either must at least read and write
    ours: Callable[[], object]
    reference: Callable[[], object]


def memcpy(nbytes: int) -> Callable[[], object]:
    """Half of the bytes read, half of them written."""
    source, target = torch.zeros(nbytes // 2, dtype=torch.uint8), torch.zeros(nbytes // 2, dtype=torch.uint8)

    def run(source: Tensor = source, target: Tensor = target) -> object:  # which keeps both alive
        return ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes // 2)

    return run


def pairs(numel: int) -> Iterator[Pair]:
    data = optimizer.Data.random(numel)
    rule = optimizer.adamw(data, FP32, FP32)
    yield Pair("AdamW, bf16 gradients and weights", "torch fused AdamW", 28 * numel, rule.step, optimizer.torchs(data)[0])
    source, target = torch.randn(numel), torch.empty(numel)
    yield Pair("streaming copy, fp32", "memcpy", 8 * numel, partial(ops.copy_stream, target, source), memcpy(8 * numel))
    for count in (2, 4, 8):
        sources = [torch.randn(numel // 2).bfloat16() for _ in range(count)]
        run = partial(ops.sum_ranks, torch.empty(numel // 2, dtype=BF16), sources, alpha=0.5, accumulate=False)
        yield Pair(f"sum of {count} in bf16", "memcpy", numel * (count + 1), run, memcpy(numel * (count + 1)))


def over_peers(numel: int, rounds: int) -> str:
    rows = []
    for pair in pairs(numel):
        times: list[tuple[float, float]] = [(seconds(pair.ours, 1), seconds(pair.reference, 1)) for _ in range(rounds + 1)][1:]
        ours, reference = (list(column) for column in zip(*times, strict=True))
        rate = Spread.of([pair.nbytes / took / 1e9 for took in ours])
        took = Spread.of([1e3 * one for one in ours])
        rows.append([pair.name, pair.peer, took.show(2), Spread.ratio(reference, ours).show(2), rate.show(1)])
    return table(["kernel", "peer", "ms", "faster than the peer", "GB/s"], rows)


def signs(numel: int) -> dict[str, Callable[[], object]]:
    """The passes of a rank in a step of 1-bit Adam over 4 ranks: its own momentum, its quarter of all ranks', the weights."""
    grad, inverse, master = torch.randn(numel).bfloat16(), torch.rand(numel) + 0.1, torch.randn(numel)
    out, quarter, partly = master.bfloat16(), numel // 4, onebit.partly(inverse)

    def records(count: int) -> Tensor:
        return torch.zeros(onebit.nbytes(count), dtype=torch.uint8)

    def kept(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return partly[: count // onebit.BLOCK], torch.zeros(count), torch.zeros(count // onebit.BLOCK), records(count)

    own, served, sent = kept(numel), kept(quarter), [records(quarter) for _ in range(4)]
    onebit.worker(grad, inverse, *own, beta=0.9, factor=0.1)
    return {
        "worker": partial(onebit.worker, grad, inverse, *own, beta=0.9, factor=0.1),
        "server of a quarter": partial(onebit.server, sent, inverse[:quarter], *served, alpha=0.25),
        "update": partial(onebit.update, master, own[-1], inverse, partly, out, keep=1.0, rate=1e-9),
    }


def over_adamw(numel: int, rounds: int) -> list[str]:
    """Those passes over AdamW's, with bf16 gradients and weights."""
    passes, whole = signs(numel), optimizer.adamw(optimizer.Data.random(numel), FP32, FP32).step
    times: dict[str, list[float]] = {name: [] for name in (*passes, "AdamW")}
    for turn in range(rounds + 1):
        for name, run in {**passes, "AdamW": whole}.items():
            took = seconds(run, 1)
            if turn:
                times[name].append(took)
    adamw = times.pop("AdamW")
    shares = {name: Spread.ratio(each, adamw) for name, each in times.items()}
    total = Spread.ratio([sum(row) for row in zip(*times.values(), strict=True)], adamw)
    rows = [[name, Spread.of([1e3 * one for one in times[name]]).show(2), shares[name].show(2)] for name in times]
    judged = [verdict("the passes of 1-bit Adam over AdamW's", total.median, 1.15, at_least=False)]
    return [table(["pass", "ms", "over AdamW's"], [*rows, ["together", "", total.show(2)]]), verdicts(judged)]


def call_costs() -> str:
    """Microseconds, the best of five; see [Note: Call cost] in slipstream/ops/cpu.py."""
    master, exp_avg, exp_avg_sq, grad = (torch.rand(64) for _ in range(4))
    sources, adam = [torch.rand(64) for _ in range(2)], {"scale": 0.5, "lr": 1e-3, "step": 10, **optimizer.ADAM}
    word = torch.zeros(1, dtype=torch.int32)
    calls: dict[str, Callable[[], object]] = {
        "sum_ranks, 2 sources": partial(ops.sum_ranks, grad, sources, alpha=0.5, accumulate=False),
        "adamw": partial(ops.adamw, master, grad, exp_avg, exp_avg_sq, None, **adam),
        "copy_stream": partial(ops.copy_stream, exp_avg, exp_avg_sq),
        "words.store": partial(ops.words.store_release_and_wake, word.data_ptr(), 1),
        "words.load": partial(ops.words.load_acquire, word.data_ptr()),
        "words.wait, reached": partial(ops.words.wait_at_least, word.data_ptr(), 1, 50, 1000),
    }
    rows = [[name, f"{min(seconds(call, 2000) for _ in range(5)) * 1e6:.2f}"] for name, call in calls.items()]
    return table(["call on 64 elements", "us"], rows)


def sampling(rounds: int) -> list[str]:
    """Milliseconds to sample ROWS rows, whose 50 likeliest tokens have most of the probability, with one thread and all cores."""
    logits, cores = torch.randn(ROWS, VOCABULARY) * 2, len(os.sched_getaffinity(0))
    for row in logits:
        row[torch.randint(VOCABULARY, (50,))] += torch.linspace(6, 14, 50)
    rows, judged = [], []
    for name, params in SAMPLINGS.items():
        asked = [
            LogitsRow(Request(id=str(i), tokens=list(range(200)), params=SamplingParams(**params), seed=i)) for i in range(ROWS)
        ]
        times: dict[int, list[float]] = {}
        samplers = {}
        for threads in sorted({1, cores}):
            torch.set_num_threads(threads)
            samplers[threads] = Sampler(VOCABULARY)
        for turn in range(rounds + 1):
            for threads, sampler in samplers.items():
                took = 1e3 * seconds(partial(sampler.sample, logits, asked), 1)
                if turn:
                    times.setdefault(threads, []).append(took)
        spreads = [Spread.of(each) for each in times.values()]
        rows.append([name, *(spread.show(2) for spread in spreads), Spread.ratio(times[1], times[cores]).show(2)])
        if name == "top-p 0.9" and cores == 2:
            judged.append(verdict(f"{ROWS} rows, {name}, 2 cores, ms", spreads[-1].median, 6, at_least=False))
    torch.set_num_threads(1)
    head = [f"sampling of {ROWS} rows of {VOCABULARY:,} logits, ms", *(f"threads: {num}" for num in times), "gain"]
    return [table(head, rows), *([verdicts(judged)] if judged else [])]


# -- every instruction set --


def groups(quick: bool) -> dict[str, Callable[[], Iterator[Case]]]:
    """The choices of `--only`. A group's arrays live while its cases run."""

    def flat(numel: int, where: str) -> Iterator[Case]:
        for name, rule in optimizer.rules(optimizer.Data.random(numel)):
            yield Case(name, where, rule.step, numel)
        yield from movements(numel, where)

    made: dict[str, Callable[[], Iterator[Case]]] = {
        "cache": lambda: flat(16384, "in cache"),
        "memory": lambda: flat((4 if quick else 32) << 20, "from memory"),
    }
    return made | {kind: partial(decoder, kind) for kind in ("fp32", "fp16", "bf16", "int8", "int4")}


def over_avx2(options: Options, rounds: int) -> list[str]:
    used = cpu.isa()
    names = list(filter(cpu.use_isa, SETS))
    cpu.use_isa(used)
    if len(names) < 2:
        return [f"The kernels run as {used or 'torch'}, the only vector instruction set here: none to compare."]
    rows: list[list[str]] = []
    gains: dict[str, float] = {}  # of the set that runs by default
    try:
        for group, cases in groups(options.quick).items():
            for case in cases() if not options.only or group in options.only else ():
                times = turns(case, names, rounds)
                row = [case.kernel, case.where, *(per_unit(case, statistics.median(times[name])) for name in names)]
                for name in names[1:]:
                    gain = Spread.ratio(times["avx2"], times[name])
                    row.append(gain.show(2))
                    if name == used:
                        gains[f"{case.kernel}, {case.where}"] = gain.median
                rows.append(row)
    finally:
        cpu.use_isa(used)
    head = ["kernel", "on", *names, *(f"{name} over avx2" for name in names[1:])]
    slowest = min(gains, key=gains.__getitem__, default="")
    judged = [verdict(f"{used} over avx2, least ({slowest})", gains[slowest], 0.95, at_least=True)] if gains else []
    return [f"By default {used} runs.", table(head, rows), verdicts(judged)]


def run(options: Options) -> str:
    threads, rounds = torch.get_num_threads(), options.num_rounds(11) if not options.quick else 3
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        text = [f"One thread, {rounds} rounds in turns; medians (min-max), and the ratio of times in the same round."]
        if not options.only:
            text += [
                over_peers((4 if options.quick else 64) << 20, rounds),
                *over_adamw((4 if options.quick else 16) << 20, rounds),
                call_costs(),
                *sampling(rounds),
            ]
        return "\n\n".join((*text, *over_avx2(options, rounds)))
    finally:
        torch.set_num_threads(threads)
