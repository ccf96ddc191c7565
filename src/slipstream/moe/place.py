"""Expert parallelism: each rank of an `ep` axis keeps consecutive experts of each layer, and tokens travel to them.

`ep` divides the ranks of a pipeline stage differently: neighbors hold different experts, and the ranks with the same experts
reduce, shard and copy them among themselves, at any ZeRO stage (world/mesh.py). Experts that are also sliced over `tp` are split
among the ranks of one slice.

[Note: Tokens over tp] The ranks of a replica have the same tokens. If experts are split over them, too, each sends a share of the
tokens. Otherwise an expert would see every token several times, and its gradient would be too large by that factor.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import nn

from slipstream.config.plan import ExpertPlan
from slipstream.moe.huggingface import adopt, is_foreign, run_shared_ahead
from slipstream.moe.layer import Experts, mark_experts
from slipstream.moe.listed import ListedExperts, adopt_list, experts_in, why_whole
from slipstream.moe.routers import keys_of_routers, set_routers
from slipstream.parallel.cuts import model_types
from slipstream.parallel.exchange import Exchange
from slipstream.parallel.slicing import keep_part
from slipstream.world.mesh import Axis, Differs, Mesh, Split
from slipstream.zero.leaves import Part, Ranges, cuts_of, is_quantized, parts_of
from slipstream.zero.wrap import expert_lists

logger = logging.getLogger("slipstream.train")

# What AutoEP's presets of DeepSpeed 0.19.8 apply to: types of transformers' configs, or layer names
_PRESETS: Mapping[str, Sequence[str]] = {
    "mixtral": ("mixtral",),
    "qwen3_moe": ("qwen3_moe", "qwen2_moe"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe"),
    "deepseek_v2": ("deepseek_v2",),
    "deepseek_v3": ("deepseek_v3",),
    "minimax_m3": ("minimax_m3_vl_text", "minimax_m3_vl"),
}
_OF_PRESETS = re.compile(r"(^|\.)layers\.\d+\.mlp\.experts$")

Connect = Callable[[str | Axis], Exchange]  # returns the exchange over an axis; the first call is collective
Join = Callable[[Connect], None]  # connects a model's layers of experts to the ranks that have the others; collective


class _RoutedLayer(NamedTuple):
    name: str
    module: Any  # Experts, transformers' module, or a list, with the same attributes
    size: int  # number of ranks over which they are split

    @property
    def slices(self) -> int:
        """The number of slices of each expert over the tp ranks."""
        return max((part.split.size for param in self.module.parameters() for part in _over_tp(param)), default=1)

    @property
    def split(self) -> Split:
        return Split("ep", self.size, slices=self.slices)

    def differs(self) -> Differs:
        """The family of the experts' parameters, or of the sliced ones among them."""
        keys = [tuple(sorted({*(part.split for part in _over_tp(param)), self.split})) for param in self.module.parameters()]
        return max(keys, key=lambda key: max((split.size for split in key if split.axis == "tp"), default=0))

    @property
    def is_sliced(self) -> bool:
        """Whether parameters of the experts are marked over tp: as slices, or as whole ones with partial gradients."""
        return any(_over_tp(param) for param in self.module.parameters())


def _over_tp(param: nn.Parameter) -> list[Part]:
    return [part for part in parts_of(param) if part.split.axis == "tp"]


def choose_slices(model: nn.Module, mesh: Mesh, plan: ExpertPlan) -> None:
    """Let tp ranks slice the experts of our layers, unless these are split over more ranks than each slice has."""
    for module in model.modules():
        if isinstance(module, Experts):
            size = plan.size if module.ep_size is None else module.ep_size
            module.is_whole = (mesh.world.size // mesh.pp.size // mesh.tp.size) % size != 0


def split_experts(model: nn.Module, mesh: Mesh, plan: ExpertPlan, *, token_shares: bool) -> tuple[Mesh, Join]:
    """Cut the experts of every layer in place for this rank, after slicing over tp. Returns the mesh with their families, and a
    function that connects the layers.

    token_shares: whether tp ranks have different tokens between sliced layers

    Collective over the world. Raises ValueError, before any layer is cut, for experts that cannot be split.
    """
    every = list(_layers(model, plan))
    if plan.enabled:
        _check_found(model, mesh, plan, every)
        _check_preset(model, plan, every)
    set_routers(model, [(layer.name, layer.module) for layer in every], plan)
    for layer in every:
        mark_experts(layer.module, layer.size)
    _check_uncut(every, mesh)
    layers = [layer for layer in every if layer.size > 1]
    for layer in layers:
        _check(layer, mesh)
    mesh = mesh.with_families(layer.differs() for layer in layers)
    done: set[int] = set()
    placed = []
    for layer in layers:
        axis = mesh.families[layer.differs()].parts_of(layer.split)
        _cut(layer, axis, done)
        run_shared_ahead(layer.module, model.get_submodule(layer.name.rpartition(".")[0]))
        placed.append((layer, axis))

    def join(connect: Connect) -> None:
        for layer in every if mesh.tp.size > 1 and token_shares else ():  # the ranks of a replica give these different tokens
            layer.module.apart = connect("tp")
        for layer, axis in placed:
            layer.module.exchange = connect(axis)
            if mesh.tp.size > 1 and not token_shares and not layer.is_sliced:
                layer.module.tokens = connect("tp")

    return mesh, join


def adopt_added(model: nn.Module, plan: ExpertPlan, known: Set[int]) -> None:
    """Adopt layers of experts that were added to an engine's model, whose parameters' ids are `known`, and set their routers. They
    stay whole on each rank. Raises ValueError for settings that a router does not support."""
    added = [layer for layer in _layers(model, plan) if known.isdisjoint(map(id, layer.module.parameters()))]
    set_routers(model, [(layer.name, layer.module) for layer in added], plan)
    for layer in added:
        mark_experts(layer.module, 1)


def _check_found(model: nn.Module, mesh: Mesh, plan: ExpertPlan, layers: Sequence[_RoutedLayer]) -> None:
    """Name experts that the config does not reach: in an error if there are no others, or if the config's pattern or settings refer
    to them, otherwise in a warning."""
    known = {layer.name.rpartition(".")[0] for layer in layers}
    whole = next((name for name in _described(model, plan) if name.rpartition(".")[0] not in known), None)
    keys = _keys_of_experts(plan)
    given = (
        f"expert_parallel.autoep_size is {plan.size}" if plan.size > 1 else f"the config sets {keys or 'expert_parallel.enabled'}"
    )
    if whole is not None:
        is_meant = bool(keys) if plan.size == 1 else plan.layer_pattern is not None or not layers
        _tell_whole(model, mesh, plan, whole, given if is_meant else "")
    elif not layers and mesh.pp.size == 1:
        pattern = "" if plan.layer_pattern is None else f", and none is named by moe_layer_pattern {plan.layer_pattern!r}"
        text = (
            f"{given}, and {type(model).__name__} has no layers of experts "
            f"(slipstream.moe.MoE, transformers' experts, or a list of modules that is named experts){pattern}"
        )
        if plan.size > 1 or keys or pattern:
            raise ValueError(f"{text}: drop the key")
        if mesh.is_first:
            logger.warning("%s: the block has no effect", text)


def _keys_of_experts(plan: ExpertPlan) -> str:
    """The config keys that concern experts on any number of ranks; "" for none."""
    others = {"slipstream.rest_unused_experts": plan.rest_unused, "expert_parallel.preset_model": plan.preset}
    return ", ".join(filter(None, (keys_of_routers(plan), *(key for key, value in others.items() if value))))


def _check_preset(model: nn.Module, plan: ExpertPlan, layers: Sequence[_RoutedLayer]) -> None:
    """Raise ValueError if the config's preset is for other models."""
    if plan.preset is None:
        return
    types, config = _PRESETS[plan.preset], getattr(model, "config", None)
    model_kinds = [*model_types(config), *model_types(getattr(config, "text_config", None))]
    other = next((layer.name for layer in layers if not _OF_PRESETS.search(layer.name)), None)
    text = ""
    if model_kinds and not set(types) & set(model_kinds):
        text = f"is for models of type {' or '.join(types)}, and this {type(model).__name__} is of type {model_kinds[0]}"
    elif not model_kinds and other is not None and plan.layer_pattern is None:
        text = f"is for experts named layers.N.mlp.experts, and this {type(model).__name__}, which has no type, has {other!r}"
    if text:
        raise ValueError(f"expert_parallel.preset_model {plan.preset!r} {text}: drop the key, and experts are found by their class")


def _tell_whole(model: nn.Module, mesh: Mesh, plan: ExpertPlan, name: str, given: str) -> None:
    """Warn of a list of experts that is not adopted. Raise ValueError if the config refers to it, by the keys `given`."""
    layer = name.rpartition(".")[0]
    text = f"the experts of {layer!r} ({type(model.get_submodule(layer)).__name__}) {why_whole(model, name)}"
    outcome, remedy = "their load is not counted", "drop the keys, which do not reach them"
    if plan.size > 1:
        text += ", and cannot be split"
        outcome = "each rank has all of them, beside its part of other layers' experts"
        remedy = "drop the block expert_parallel, and each rank has all of them"
    if given:
        raise ValueError(f"{given}, and {text}: use slipstream.moe.MoE in its place, or {remedy}")
    if mesh.is_first:
        logger.warning("%s: %s", text, outcome)


def _described(model: nn.Module, plan: ExpertPlan) -> list[str]:
    """The experts that the config's patterns name, or else all lists of experts."""
    if plan.layer_pattern is None:
        return expert_lists(model)
    try:
        layer, experts = re.compile(plan.layer_pattern), re.compile(plan.expert_pattern or "experts")
    except re.error as error:
        key = "expert_pattern" if error.pattern == plan.expert_pattern else "moe_layer_pattern"
        raise ValueError(f"expert_parallel.{key} {error.pattern!r} is no regular expression: {error}") from error
    return [
        f"{name}.{child}".lstrip(".")
        for name, module in model.named_modules()
        if layer.search(name)
        for child, _ in module.named_children()
        if experts.fullmatch(child)
    ]


def _check_uncut(layers: Sequence[_RoutedLayer], mesh: Mesh) -> None:
    for layer in layers:
        if any(part.split.axis == "ep" for param in layer.module.parameters() for part in parts_of(param)):
            raise ValueError(
                f"{layer.name!r} has only the experts that an earlier engine left on this rank: build the model anew, and load a "
                "checkpoint"
            )
        if mesh.tp.size > 1 and getattr(layer.module, "is_sliced", False) and not layer.is_sliced:
            raise ValueError(
                f"{layer.name!r}: enable_expert_tensor_parallelism, and no parameter of the experts is a slice over the "
                f"{mesh.tp.size} tp ranks: set tensor_model_parallel and partition_dim on those that are, name them in "
                "tensor_parallel.partition_config, or drop the flag, and the ranks share the tokens"
            )


def draws(model: nn.Module) -> bool:
    """Whether a router draws random numbers in training."""
    modules = model.modules()
    return any(getattr(module, "draws", False) or getattr(module, "jitter_noise", 0) for module in modules)


def _layers(model: nn.Module, plan: ExpertPlan) -> Iterator[_RoutedLayer]:
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            yield _RoutedLayer(name, module, plan.size if module.ep_size is None else module.ep_size)
        elif is_foreign(module):
            adopt(module)
            yield _RoutedLayer(name, module, plan.size)
    lists = sorted(_described(model, plan), key=lambda name: "shared" in name.rpartition(".")[2])  # the routed one first
    for name in lists if plan.enabled else ():
        if not why_whole(model, name):
            yield _RoutedLayer(name, adopt_list(model, name), plan.size)


def _check(layer: _RoutedLayer, mesh: Mesh) -> None:
    num, ranks = layer.module.num_experts, mesh.world.size // mesh.pp.size
    least = ranks // mesh.tp.size if layer.is_sliced else ranks
    if num % layer.size or least % layer.size:
        fits = [size for size in range(1, layer.size + 1) if num % size == 0 and least % size == 0]
        raise ValueError(
            f"{layer.name!r}: {num} experts cannot be split over {layer.size} ranks where {least} have other tokens"
            f"{' (tp ranks, which slice the experts, have the same)' if layer.is_sliced and mesh.tp.size > 1 else ''}: "
            f"expert_parallel.autoep_size must divide both; use {fits[-1]}"
        )
    for name, param in layer.module.named_parameters():
        if is_quantized(param):
            raise ValueError(f"parameter '{layer.name}.{name}' is quantized; quantized experts cannot be split: use autoep_size 1")
        if not isinstance(layer.module, ListedExperts) and param.shape[0] != num:
            raise ValueError(
                f"parameter '{layer.name}.{name}' of shape {tuple(param.shape)} is not a stack of {num} experts; use autoep_size 1"
            )


def _cut(layer: _RoutedLayer, axis: Axis, done: set[int]) -> None:
    own = layer.module.num_experts // axis.size
    first = own * axis.index
    experts = range(first, first + own)
    if isinstance(layer.module, ListedExperts):
        layer.module.owned = experts
    deal = _deal_list if isinstance(layer.module, ListedExperts) else _deal_stack
    for param, dim, ranges in deal(layer.module, experts):
        if id(param) in done:
            continue
        done.add(id(param))
        keep_part(param, "ep", axis.size, dim, ranges, slices=layer.slices)


_Dealt = Iterator[tuple[nn.Parameter, int, Ranges]]  # (parameter, cut dimension, ranges that a rank keeps)


def _deal_stack(stack: nn.Module, experts: range) -> _Dealt:
    for param in stack.parameters():
        yield param, 0, ((experts.start, experts.stop),)


def _deal_list(experts: nn.Module, own: range) -> _Dealt:
    """Keep all or nothing of an expert's parameter, along a dimension that slices leave whole; without one, each rank keeps it."""
    for place, expert in enumerate(experts_in(experts)):
        for param in expert.parameters():
            sliced = {part.dim for part in cuts_of(param)}
            dim = next((dim for dim in range(param.dim()) if dim not in sliced), None)
            if dim is not None:
                yield param, dim, ((0, param.shape[dim] if place in own else 0),)
