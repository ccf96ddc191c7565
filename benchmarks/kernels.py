"""The leg `kernels`: each family of native kernels on every vector instruction set that this machine has, in turns.

One thread. The optimizers, the sum over ranks and quantization work on arrays that stay in second-level cache, where the
arithmetic is what limits, and on arrays that do not ("from memory"). The decoder is a Llama of 88 million random weights: one
sequence alone, where reading the weights is what limits, sixteen together, and a prompt.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.report import Spread, host, table, verdict, verdicts
from slipstream import ops
from slipstream.inference.config import DecoderConfig
from slipstream.inference.core import Batch, Chunk, Request, SamplingParams
from slipstream.inference.models import from_hf, from_state
from slipstream.inference.native import NativeDecoder
from slipstream.inference.quantize import quantize
from slipstream.inference.weights import DecoderWeights
from slipstream.ops import Blocks, Stochastic, cpu
from slipstream.ops.rows import RowForm, dequantize_rows, quantize_rows

SETS = ("avx2", "avx512", "avx512vnni", "avx512bf16")  # the first is what the others are held against
BF16, FP32 = torch.bfloat16, torch.float32
ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "decoupled": True, "bias_correction": True}
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
TURN = 0.01  # seconds that a turn takes at least


class Case(NamedTuple):
    kernel: str
    where: str
    run: Callable[[], object]
    count: int  # of what the figure is per: elements, or tokens


def optimizers(numel: int, where: str) -> Iterator[Case]:
    """AdamW in its recipes, then the other rules with fp32 states; gradients in bf16, and weights out where the master is fp32."""
    grad, out = torch.randn(numel).bfloat16(), torch.empty(numel, dtype=BF16)
    recipes: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
        "AdamW, fp32 master and moments": (FP32, FP32),
        "AdamW, fp32 master, bf16 moments": (FP32, BF16),
        "AdamW, fp32 master, 8-bit moments": (FP32, None),
        "AdamW, bf16 weights at random, bf16 moments": (BF16, BF16),
        "AdamW, bf16 weights at random, 8-bit moments": (BF16, None),
    }
    for name, (master, moments) in recipes.items():
        weights = torch.randn(numel).to(master)
        kinds = (torch.int8, torch.uint8)
        states = [Blocks.zeros(numel, kind) if moments is None else torch.zeros(numel, dtype=moments) for kind in kinds]
        to, rounding = (out, None) if master is FP32 else (None, Stochastic(0, 1, 0))
        options = {"scale": 0.5, "lr": 1e-3, "step": 10, "rounding": rounding, **ADAM}
        yield Case(name, where, partial(ops.adamw, weights, grad, *states, to, **options), numel)
    weights, m, v = torch.randn(numel), torch.zeros(numel), torch.ones(numel)
    common: dict[str, Any] = {"scale": 0.5, "weight_decay": 0.01}
    lion = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.99, **common}
    yield Case("Lion", where, partial(ops.lion, weights, grad, m, out, **lion), numel)
    sgd = {"lr": 1e-6, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "first": False, **common}
    yield Case("SGD with momentum", where, partial(ops.sgd, weights, grad, m, out, **sgd), numel)
    adagrad = {"lr": 1e-6, "lr_decay": 0.0, "eps": 1e-10, "step": 3, **common}
    yield Case("Adagrad", where, partial(ops.adagrad, weights, grad, v, out, **adagrad), numel)
    lamb = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "eps_inside_sqrt": False, "step": 3, "bias_correction": True, **common}
    yield Case("LAMB, its first pass", where, partial(ops.lamb_update, weights, grad, m, v, **lamb), numel)


def movements(numel: int, where: str) -> Iterator[Case]:
    """The sum over ranks, quantization and its reverse, which make no use of threads here."""
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


def weights_of(kind: str, config: DecoderConfig) -> DecoderWeights:
    hidden, inner, head = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["head_dim"]
    queries, keys = LLAMA["num_attention_heads"] * head, LLAMA["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (LLAMA["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(LLAMA["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in parts.items()}
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(kind, torch.bfloat16)
    state = {name: (torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 1)).to(dtype) for name, shape in shapes.items()}
    weights = from_state(config, state)
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


def turns(case: Case, found: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds per call on each instruction set, round by round; the first round is not counted."""
    case.run()
    calls = max(1, int(TURN / seconds(case.run, 1)))
    times: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(rounds + 1):
        for name in found:
            assert cpu.use_isa(name), name
            took = seconds(case.run, calls)
            if turn:
                times[name].append(took)
    return times


def per_unit(case: Case, took: float) -> str:
    return f"{took / case.count * 1e3:.3g} ms/token" if "decoder" in case.kernel else f"{took / case.count * 1e9:.3f} ns/element"


def groups(quick: bool) -> dict[str, Callable[[], Iterator[Case]]]:
    """What `--only` chooses among. A group's arrays are there while its cases run."""

    def flat(numel: int, where: str) -> Iterator[Case]:
        yield from optimizers(numel, where)
        yield from movements(numel, where)

    made: dict[str, Callable[[], Iterator[Case]]] = {
        "cache": lambda: flat(16384, "in cache"),
        "memory": lambda: flat((4 if quick else 32) << 20, "from memory"),
    }
    return made | {kind: partial(decoder, kind) for kind in ("fp32", "fp16", "bf16", "int8", "int4")}


def sets() -> list[str]:
    """The vector instruction sets that run here."""
    used = cpu.isa()
    found = list(filter(cpu.use_isa, SETS))
    cpu.use_isa(used)
    return found


def run(*, quick: bool, only: Sequence[str] = ()) -> str:
    used, found = cpu.isa(), sets()
    if len(found) < 2:
        raise SystemExit(f"the kernels run as {used or 'torch'} here, which leaves nothing to compare: {ops.report()[0].reason}")
    threads, rounds = torch.get_num_threads(), 5 if quick else 11
    rows: list[list[str]] = []
    gains: dict[str, float] = {}  # of what runs by default
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        for group, made in groups(quick).items():
            for case in made() if not only or group in only else ():
                times = turns(case, found, rounds)
                row = [case.kernel, case.where, *(per_unit(case, statistics.median(times[name])) for name in found)]
                for name in found[1:]:
                    gain = Spread.of([a / b for a, b in zip(times["avx2"], times[name], strict=True)])
                    row.append(gain.show(2))
                    if name == used:
                        gains[f"{case.kernel}, {case.where}"] = gain.median
                rows.append(row)
                if quick:
                    print(*row, sep=" | ", flush=True)
    finally:
        cpu.use_isa(used)
        torch.set_num_threads(threads)
    head = ["kernel", "on", *found, *(f"{name} over avx2" for name in found[1:])]
    slowest = min(gains, key=gains.__getitem__, default="")
    judged = [verdict(f"{used} over avx2, least ({slowest})", gains[slowest], 0.95, at_least=True)] if gains else []
    return "\n\n".join(
        [
            host(f"one thread; what runs unless told otherwise is {used}"),
            f"{rounds} rounds in turns; medians, and the ratio of times in the same round with (min-max).",
            table(head, rows),
            verdicts(judged),
        ]
    )
