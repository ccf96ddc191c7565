"""The leg `anymodule`: a random GPT-2 of 124 million weights in transformers' own code, whose linear layers `slipstream.quantize`
has replaced, beside torch's in fp32, in turns.

One stream: tokens after a prompt, one forward each, over transformers' cache of keys and values. Prompts: one forward of many rows.
"dequantized at each use" is what served such models before there were kernels for one product: the same int8 codes, multiplied by
torch in fp32, a slice of a matrix at a time.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import slipstream
from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from benchmarks.serving.measure import judged
from slipstream.ops.matrices import dequantize
from slipstream.quantized import PackedLinear

FP32, AT_USE = "torch, fp32", "int8, dequantized at each use"
KINDS = ("int8", "int4", "bf16")
PROMPT, TOKENS = 32, 16
ROWS = (16, 128, 512)  # of prompts


class _AtUse(torch.nn.Module):
    """int8 codes that torch multiplies in fp32."""

    def __init__(self, layer: PackedLinear) -> None:
        super().__init__()
        self.matrix: Any = layer.matrix.matrix
        self.bias = None if layer.bias is None else layer.bias.clone()

    def forward(self, x: Tensor) -> Tensor:
        step = max(1, (1 << 19) // x.shape[-1])
        slices = zip(*(part.split(step) for part in self.matrix), strict=True)
        parts = [torch.nn.functional.linear(x, dequantize(type(self.matrix)(*some))) for some in slices]
        y = torch.cat(parts, -1)
        return y if self.bias is None else y + self.bias


def _at_use(model: torch.nn.Module) -> torch.nn.Module:
    for name, layer in [pair for pair in model.named_modules() if isinstance(pair[1], PackedLinear)]:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _AtUse(layer))
    return model


def _stream(model: Any, ids: Tensor) -> tuple[float, Tensor]:
    """Seconds per token after the prompt, and the last logits."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :PROMPT], past_key_values=cache)
    start = time.perf_counter()
    for at in range(PROMPT, PROMPT + TOKENS):
        logits = model(ids[:, at : at + 1], past_key_values=cache).logits
    return (time.perf_counter() - start) / TOKENS, logits[0, -1]


def _prompt(model: Any, ids: Tensor) -> float:
    start = time.perf_counter()
    model(ids, logits_to_keep=1)
    return time.perf_counter() - start


@torch.inference_mode()
def run(options: Options) -> str:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    models: dict[str, Any] = {FP32: model} | {kind: slipstream.quantize(copy.deepcopy(model), kind) for kind in KINDS}
    models[AT_USE] = _at_use(copy.deepcopy(models["int8"]))
    ids = torch.randint(0, 50000, (1, max(ROWS)))
    times: dict[str, list[list[float]]] = {name: [] for name in models}
    last = {}
    for _ in range(options.num_rounds(5)):
        for name, one in models.items():
            seconds, last[name] = _stream(one, ids)
            times[name].append([seconds, *(_prompt(one, ids[:, :rows]) for rows in ROWS)])
    far = {name: float((logits - last[FP32]).norm() / last[FP32].norm()) for name, logits in last.items()}
    medians = {name: [statistics.median(column) for column in zip(*rounds, strict=True)] for name, rounds in times.items()}
    rows = [[name, *(f"{1e3 * seconds:.1f}" for seconds in median), f"{far[name]:.4f}"] for name, median in medians.items()]

    def over(peer: str, ours: str, column: int) -> list[float]:
        return [a[column] / b[column] for a, b in zip(times[peer], times[ours], strict=True)]

    judgments = [
        judged("one stream, int8: over dequantizing at each use", over(AT_USE, "int8", 0), 4.0),
        judged("one stream, int8: over torch fp32", over(FP32, "int8", 0), 2.5),
        judged("one stream, bf16: over torch fp32", over(FP32, "bf16", 0), 1.0),
        judged(f"a prompt of {max(ROWS)}, int8: over torch fp32", over(FP32, "int8", len(ROWS)), 1.0),
        verdict("int8: relative difference of the last logits from fp32's", far["int8"], 0.05),
    ]
    about = f"GPT-2, random weights, transformers' forward, {torch.get_num_threads()} threads, milliseconds:"
    columns = ["", "a token of one stream", *(f"a prompt of {rows}" for rows in ROWS), "logits off fp32's"]
    return "\n\n".join((about, table(columns, rows), verdicts(judgments)))
