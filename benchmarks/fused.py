"""The leg `fused`: one BertLayer of transformers forward and backward, fused over eager and over torch.compile, and its memory.

fp32, one thread, B 8, S 128, width 768, 12 heads. The peers multiply as torch does, ours as the engine does (the key
`slipstream.products`); each is also shown with the other's products, which are the same on some processors. Saved bytes are those
of tensors that autograd keeps for the backward, parameters aside.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from slipstream.fused import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer, fuse_layers
from slipstream.ops import matmul

BATCH, LENGTH, WIDTH, HEADS = 8, 128, 768, 12
CASES = {"dropout 0.1": ("gelu", 0.1), "dropout 0.1, tanh GELU": ("gelu_new", 0.1), "no dropout": ("gelu", 0.0)}
SWAPPED = {"eager": "eager, our products", "fused": "fused, torch's products"}
TARGETS = {"dropout 0.1": 1.15, "dropout 0.1, tanh GELU": 1.3, "no dropout": 1.0}


def _layer(activation: str, dropout: float) -> Any:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH}
    config = BertConfig(**sizes, hidden_act=activation, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return BertLayer(config).train()


def _deepspeed(dropout: float) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "heads": HEADS, "num_hidden_layers": 12, "initializer_range": 0.02}
    config = DeepSpeedTransformerConfig(**sizes, attn_dropout_ratio=dropout, hidden_dropout_ratio=dropout, pre_layer_norm=False)
    return DeepSpeedTransformerLayer(config).train()


def _step(kind: str, layer: Callable[..., Any], x: Tensor) -> None:
    matmul.use(kind in ("fused", SWAPPED["eager"], "DeepSpeedTransformerLayer"))
    out = layer(x)
    (out[0] if isinstance(out, tuple) else out).square().mean().backward()


def _saved(layer: Any, x: Tensor) -> int:
    kept: dict[int, int] = {}
    own = {param.untyped_storage().data_ptr() for param in layer.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x)
    del out
    return sum(size for place, size in kept.items() if place not in own)


def run(options: Options) -> str:
    rounds = options.num_rounds(7)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
        rows, judged, memory = [], [], {}
        for name, (activation, dropout) in CASES.items():
            eager = _layer(activation, dropout)
            layers: dict[str, Any] = {"eager": eager, "fused": fuse_layers(copy.deepcopy(eager))}
            if not options.quick:
                layers["compiled"] = torch.compile(copy.deepcopy(eager))
            if activation != "gelu":
                layers["DeepSpeedTransformerLayer"] = _deepspeed(dropout)
            layers |= {swapped: layers[kind] for kind, swapped in SWAPPED.items()}
            for kind, layer in layers.items():
                _step(kind, layer, x)
            seconds: dict[str, list[float]] = {kind: [] for kind in layers}
            for _ in range(rounds):
                for kind, layer in layers.items():
                    start = time.perf_counter()
                    _step(kind, layer, x)
                    seconds[kind].append(time.perf_counter() - start)
            medians = {kind: statistics.median(values) for kind, values in seconds.items()}
            for note, (slower, faster) in {
                "": ("eager", "fused"),
                ", torch's products in both": ("eager", SWAPPED["fused"]),
                ", our products in both": (SWAPPED["eager"], "fused"),
            }.items():
                ratio = statistics.median(e / f for e, f in zip(seconds[slower], seconds[faster], strict=True))
                judged.append(verdict(f"{name}: eager over fused{note}", ratio, TARGETS[name], at_least=True))
            if "compiled" in seconds and name == "dropout 0.1":
                over = statistics.median(c / f for c, f in zip(seconds["compiled"], seconds["fused"], strict=True))
                judged.append(verdict(f"{name}: torch.compile over fused", over, 1.0, at_least=True))
            memory = {kind: _saved(layers[kind], x) / 1e6 for kind in ("eager", "fused")}
            rows += [
                [name, kind, f"{1e3 * median:.0f}", f"{memory[kind]:.1f}" if kind in memory else ""]
                for kind, median in medians.items()
            ]
            if name == "dropout 0.1":
                judged.append(verdict("saved bytes, fused over eager", memory["fused"] / memory["eager"], 0.6))
    finally:
        matmul.use(False)
        torch.set_num_threads(threads)
    return "\n\n".join(
        (
            f"A BertLayer of transformers, fp32, one thread, [{BATCH}, {LENGTH}, {WIDTH}], forward and backward, in turns:",
            table(["case", "layer", "ms", "saved, MB"], rows),
            verdicts(judged),
        )
    )
