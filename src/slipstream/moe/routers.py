"""Settings of routers from the config (`expert_parallel`), for our layers and those of unmodified transformers models.

A router that has the setting gets the value, and so does transformers' config, which `save_pretrained` writes. If a router has it
fixed, the value must be the fixed one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.config.plan import ExpertPlan
from slipstream.moe.layer import Experts, MoE, check_choice


class _Setting(NamedTuple):
    ours: str  # attribute of slipstream.moe.MoE
    theirs: tuple[str, ...]  # attributes of transformers' routers, and of the layers around them
    config: str  # attribute of transformers' configs
    fixed: Any = None  # value in a router without the attribute; None: unknown


_SETTINGS: Mapping[str, _Setting] = {
    "top_k": _Setting("k", ("top_k",), "num_experts_per_tok"),
    "route_norm": _Setting("normalize", ("norm_topk_prob",), "norm_topk_prob"),
    "route_scale": _Setting("scale", ("routed_scaling_factor",), "routed_scaling_factor", 1.0),
    "num_expert_groups": _Setting("num_groups", ("num_group", "n_group"), "n_group", 1),
    "num_limited_groups": _Setting("top_groups", ("topk_group",), "topk_group", 1),
    "score_func": _Setting("score", (), "scoring_func"),
    "expert_activation": _Setting("", (), ""),
    "score_apply": _Setting("", (), "", "post"),
}
# activation of the gate, in transformers -> of the product, in DeepSpeed
_GATED: Mapping[Any, str] = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}
_NORMALIZED = {"Mixtral": True, "GptOss": True, "DeepseekV2": False}  # routers without norm_topk_prob
_BIAS = "e_score_correction_bias"  # attribute of routers like DeepSeek-V3's, which score by a sigmoid


class RouterBias:
    """The bias of a transformers router, moved against the load. Sums are fp32, even if an engine holds the bias in bf16."""

    def __init__(self, router: nn.Module, rate: float) -> None:
        self.router, self.rate = router, rate
        self.exact: Tensor | None = None

    def move(self, signs: Tensor) -> None:
        """signs: [num_experts], 1 for experts with less than the mean load"""
        bias = self.router.get_buffer(_BIAS)
        if self.exact is None or not torch.equal(self.exact.to(bias.dtype), bias):  # a checkpoint was loaded
            self.exact = bias.float()
        self.exact = self.exact + signs.to(self.exact) * self.rate
        bias.copy_(self.exact)


def set_routers(model: nn.Module, layers: Iterable[tuple[str, Any]], plan: ExpertPlan) -> None:
    """Apply the plan to layers (name, module of experts). Raises ValueError for settings that a router does not support."""
    values = _values(plan)
    if not values and plan.balance_rate is None:
        return
    config = getattr(model, "config", None)
    for name, experts in layers:
        layer = model.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, MoE):
            _set_ours(name, layer, values, plan.balance_rate)
        elif not isinstance(experts, Experts):  # transformers' module, or a list
            _set_theirs(name, layer, experts, values, config)
            _balance(name, layer, experts, plan.balance_rate)
        else:
            raise ValueError(
                f"{name!r}: {keys_of_routers(plan)} set no router of DeepSpeed's MoE: pass k and its like to the layer"
            )
    for key, value in values.items():
        if hasattr(config, name := _SETTINGS[key].config):
            setattr(config, name, value)
    if "top_k" in values and hasattr(model, "num_experts_per_tok"):  # its auxiliary loss reads it
        vars(model)["num_experts_per_tok"] = values["top_k"]


def _values(plan: ExpertPlan) -> dict[str, Any]:
    values = {name: value for name in _SETTINGS if (value := getattr(plan, name)) is not None}
    return {name: _GATED.get(value, value) if name == "expert_activation" else value for name, value in values.items()}


def keys_of_routers(plan: ExpertPlan) -> str:
    """The config keys that set routers; "" for none."""
    names = [*_values(plan), *([] if plan.balance_rate is None else ["load_balance_coeff"])]
    return ", ".join(f"expert_parallel.{name}" for name in names)


def _set_ours(name: str, layer: MoE, values: Mapping[str, Any], rate: float | None) -> None:
    for key, value in values.items():
        setting = _SETTINGS[key]
        if setting.ours:
            setattr(layer, setting.ours, value)
        elif value != setting.fixed:
            raise _refused(name, key, value, setting.fixed)
    _check(name, values, layer.num_experts, layer.k, layer.num_groups, layer.top_groups)
    if rate is not None:
        layer.balance_rate = rate
        if layer.balance is None:
            layer.balance = torch.zeros(layer.num_experts, dtype=torch.int64, device=layer.router.weight.device)


def _set_theirs(name: str, layer: nn.Module, experts: Any, values: Mapping[str, Any], config: Any) -> None:
    parts = [layer, *(child for child in layer.children() if child is not experts)]
    for key, value in values.items():
        setting = _SETTINGS[key]
        holders = [(part, attribute) for part in parts for attribute in setting.theirs if attribute in vars(part)]
        if "group" in key and any(getattr(part, "topk_method", "") == "greedy" for part in parts):
            holders = []  # the router ignores groups
        for part, attribute in holders:
            setattr(part, attribute, value)
        if not holders and value != (fixed := _fixed(key, parts, experts, config)):
            raise _refused(name, key, value, fixed)
    limits = {key: _value(_SETTINGS[key], parts) for key in ("top_k", "num_expert_groups", "num_limited_groups")}
    _check(name, values, experts.num_experts, *(1 if limit is None else limit for limit in limits.values()))


def _check(name: str, values: Mapping[str, Any], *numbers: int) -> None:
    try:
        check_choice(*numbers)
    except ValueError as error:
        given = ", ".join(f"expert_parallel.{key} {value!r}" for key, value in values.items())
        raise ValueError(f"{name!r}, with {given}: {error}") from None


def _value(setting: _Setting, parts: Iterable[nn.Module]) -> Any:
    return next((vars(part)[attribute] for part in parts for attribute in setting.theirs if attribute in vars(part)), None)


def _fixed(key: str, parts: Iterable[nn.Module], experts: Any, config: Any) -> Any:
    """The fixed value of a router without the setting; None: unknown."""
    if key == "score_func":
        return "sigmoid" if any(hasattr(part, _BIAS) for part in parts) else "softmax"
    if key == "route_norm":
        kinds = [type(part).__name__ for part in parts]
        return next((value for kind, value in _NORMALIZED.items() if any(each.startswith(kind) for each in kinds)), None)
    if key == "expert_activation":
        limited, scaled = (any(word in name for name in vars(experts)) for word in ("limit", "alpha"))  # as in GPT-OSS, DeepSeek V4
        activation = getattr(config, "hidden_act", None)
        return ("swiglu_oai" if scaled else "swiglu_clamped") if limited else _GATED.get(activation, activation)
    return _SETTINGS[key].fixed


def _balance(name: str, layer: nn.Module, experts: Any, rate: float | None) -> None:
    if rate is None:
        experts.bias = None
        return
    router = next((child for child in layer.children() if hasattr(child, _BIAS)), None)
    if router is None:
        raise ValueError(
            f"{name!r}: expert_parallel.load_balance_coeff ({rate}) moves a bias on the choice of experts, and this router has "
            f"none: drop the key, or use the model's auxiliary loss (output_router_logits)"
        )
    vars(experts)["bias"] = RouterBias(router, rate)


def _refused(name: str, key: str, value: Any, fixed: Any) -> ValueError:
    problem = "does not know the setting" if fixed is None else f"has {fixed!r}"
    text = f"expert_parallel.{key} is {value!r}, and the router of this model {problem}, which is fixed: drop the key"
    return ValueError(f"{name!r}: {text}")
