"""Upcycling: a dense decoder becomes a mixture of experts, each a copy of its MLP, with a new router (arXiv:2212.05055).

A token's weights add up to 1, so the mixture computes the same as the dense model, until training makes the copies differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.pretrained import Out

_MLP = re.compile(r"(.*\.layers\.(\d+))\.mlp\.(gate|up|down)_proj\.weight")
USED = 2  # experts per token, by default
_SHARED = 128  # largest number of features of a shared expert, which adds nothing at first


class UpcycleTarget(NamedTuple):
    """The transformers architecture that a dense one becomes."""

    model_type: str
    architecture: str
    expert: str  # the name of an expert's matrix, below its layer
    router: str
    matrices: Mapping[str, str]  # name in the dense model -> name in an expert
    settings: Mapping[str, str]  # config key -> key of the dense config, `num_experts` or `shared_size`
    biases: str = r"(?!)"  # regular expression for the attention biases that it has
    shared: str = ""  # prefix of its shared expert, below a layer


_MIXTRAL = UpcycleTarget(
    "mixtral",
    "MixtralForCausalLM",
    "block_sparse_moe.experts.{expert}.{matrix}.weight",
    "block_sparse_moe.gate.weight",
    {"gate": "w1", "up": "w3", "down": "w2"},
    {"num_local_experts": "num_experts"},
)
_QWEN = UpcycleTarget(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "mlp.experts.{expert}.{matrix}.weight",
    "mlp.gate.weight",
    {name: f"{name}_proj" for name in ("gate", "up", "down")},
    {"num_experts": "num_experts", "moe_intermediate_size": "intermediate_size"},
)
_QWEN2 = _QWEN._replace(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    settings={**_QWEN.settings, "shared_expert_intermediate_size": "shared_size"},
    biases=r".*\.self_attn\.[qkv]_proj\.bias",
    shared="mlp.shared_expert",
)
TARGETS: Mapping[str, UpcycleTarget] = {"llama": _MIXTRAL, "mistral": _MIXTRAL, "qwen2": _QWEN2, "qwen3": _QWEN}


def upcycle(
    tensors: Mapping[str, Out], config: Mapping[str, Any], num_experts: int, top_k: int = USED
) -> tuple[dict[str, Out], dict[str, Any]]:
    """The tensors and the config of the mixture; experts share the dense model's stored memory until they are written.

    Routers are normal with the config's `initializer_range`, seeded by their layer's number. A shared expert, which some mixtures
    must have, is small, and its last product begins with zeros. top_k: experts per token.

    Raises CheckpointError for a model that has no such mixture.
    """
    kind = config.get("model_type")
    target = TARGETS.get(str(kind))
    if target is None:
        raise CheckpointError(f"--upcycle: a model of type {kind!r} has no mixture of experts; use one of {', '.join(TARGETS)}")
    if not 1 <= top_k <= num_experts:
        raise CheckpointError(
            f"--upcycle {num_experts}: a token uses {top_k} experts (--top-k), so there must be as many, at least 1"
        )
    if config.get("quantization_config"):
        raise CheckpointError("--upcycle: the model is quantized (quantization_config); upcycle the model that it was made from")
    biases = (name for name in tensors if re.search(r"\.(mlp\.\w+|self_attn\.\w+)\.bias$", name))
    biased = next((name for name in biases if not re.fullmatch(target.biases, name)), None)
    if biased is not None:
        raise CheckpointError(f"--upcycle: {target.architecture} has no bias for {biased!r}")
    result: dict[str, Out] = {}
    for name, out in tensors.items():
        match = _MLP.fullmatch(name)
        if match is None:
            result[name] = out
            continue
        layer, index, matrix = match[1], int(match[2]), target.matrices[match[3]]
        for expert in range(num_experts):
            result[f"{layer}.{target.expert.format(expert=expert, matrix=matrix)}"] = out
        if match[3] == "gate":
            new = _made(target, num_experts, out.held.shape, index, float(config.get("initializer_range", 0.02)))
            result |= {f"{layer}.{name}": Out(tensor, out.dtype) for name, tensor in new.items()}
    if len(result) == len(tensors):
        raise CheckpointError("--upcycle: the checkpoint has no layers.N.mlp.gate_proj.weight")
    variables = {**config, "num_experts": num_experts, "shared_size": min(_SHARED, int(config["intermediate_size"]))}
    settings = {name: variables[source] for name, source in target.settings.items()}
    return result, {
        **{name: value for name, value in config.items() if name not in ("mlp_bias", "attention_bias", "pretraining_tp")},
        **settings,
        **_windows(config),
        "model_type": target.model_type,
        "architectures": [target.architecture],
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
    }


def _made(target: UpcycleTarget, num_experts: int, gate: Sequence[int], seed: int, std: float) -> dict[str, torch.Tensor]:
    """The new matrices of a layer. gate: the shape of its MLP's gate, [features, width]."""
    size, width = min(_SHARED, gate[0]), gate[1]
    shapes = {target.router: (num_experts, width)}
    if target.shared:
        shapes |= {f"{target.shared}.{name}_proj.weight": (size, width) for name in ("gate", "up")}
        shapes |= {f"{target.shared}_gate.weight": (1, width)}
    generator = torch.Generator().manual_seed(seed)
    new = {name: torch.randn(shape, generator=generator) * std for name, shape in shapes.items()}
    return new | ({f"{target.shared}.down_proj.weight": torch.zeros(width, size)} if target.shared else {})


def _windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """The attention windows of the mixture, whose layers all have the same."""
    window, kind = config.get("sliding_window"), config["model_type"]
    if kind in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
        window = None
    if kind == "llama" or window is None:  # Llama ignores a window in its config
        return {"sliding_window": None, "use_sliding_window": False}
    layers = int(config["num_hidden_layers"])
    last_full = int(config.get("max_window_layers", 28)) if kind in ("qwen2", "qwen3") else 0
    types = config.get("layer_types") or ["sliding_attention" if i >= last_full else "full_attention" for i in range(layers)]
    if len(set(types)) > 1:
        full = sum(each == "full_attention" for each in types)
        raise CheckpointError(
            f"--upcycle: {full} of {layers} layers attend without the window of {window} tokens (layer_types, max_window_layers), "
            "and a mixture's layers are all alike"
        )
    slides = types[0] == "sliding_attention"
    return {"sliding_window": window if slides else None, "use_sliding_window": slides}
