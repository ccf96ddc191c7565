"""LoRA adapters that a surgery adds to sliced layers: built for the whole layer, then cut like it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.parallel.slicing import adapters_of, become, keep_part
from slipstream.parallel.tensor import Column, Row
from slipstream.world.mesh import Split
from slipstream.zero.leaves import mark_part, parts_of, whole_shape
from slipstream.zero.wrap import repeated_blocks


@contextmanager
def whole_features(model: nn.Module) -> Iterator[None]:
    """Inside, sliced linear layers have `in_features` and `out_features` of the whole, by which PEFT sizes an adapter. Weights of
    other layers (`Conv1D`) have the whole's shape as `ds_shape`."""
    own: list[tuple[Any, int, int]] = []
    sliced: list[Any] = [module for module in model.modules() if isinstance(module, Column | Row) and module.slices is not None]
    convs = [(module.weight, getattr(module.weight, "ds_shape", None)) for module in sliced if {"nx", "nf"} <= vars(module).keys()]
    for module in sliced:
        if {"nx", "nf"} <= vars(module).keys():
            module.weight.ds_shape = torch.Size((module.nx, module.nf))
    for linear in (module for module in sliced if "in_features" in vars(module)):
        own.append((linear, linear.out_features, linear.in_features))
        linear.out_features, linear.in_features = whole_shape(linear.weight, own[-1][1:])
    try:
        yield
    finally:
        for module, out_features, in_features in own:
            module.out_features, module.in_features = out_features, in_features
        for weight, shape in convs:
            vars(weight).pop("ds_shape", None)
            if shape is not None:
                weight.ds_shape = shape


def slice_adapters(model: nn.Module) -> None:
    """Cut whole adapters of sliced layers, with the values of the axis's first rank. Collective over the axis.

    Raises ValueError, the same on all ranks of the axis, for adapters that cannot be cut.
    """
    blocks = tuple(f"{block}." for block in repeated_blocks(model))
    for path, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        whole: tuple[str, ...] = ("lora_A", "lora_B") if _has_share(base) else ()
        if isinstance(base, Column | Row) and base.slices is not None:
            name, other, dim = ("lora_B", "lora_A", 0) if isinstance(base, Column) else ("lora_A", "lora_B", 1)
            for layer in adapters_of(module, name):
                if not parts_of(layer.weight):
                    _cut(f"{path}.{name}", layer, base, dim)
            whole = (other,) if base.slices.shares_tokens and f"{path}.".startswith(blocks) else ()
        for layer in (layer for name in whole for layer in adapters_of(module, name)):
            for param in (param for param in layer.parameters() if not parts_of(param)):
                mark_part(param, "tp", 1)  # each rank sees a share of the tokens, or the gradient of its share of the outputs


def _has_share(layer: Any) -> bool:
    """Whether a layer that is whole on all ranks sees only a share of the activations."""
    return any(part.split == Split("tp", 1) for part in parts_of(getattr(layer, "weight", torch.empty(0))))


def _cut(path: str, layer: Any, base: Any, dim: int) -> None:
    part = next(part for part in parts_of(base.weight) if part.split.axis == "tp")
    if layer.weight.shape[dim] != part.numel or part.ranges is None:
        raise ValueError(
            f"engine.surgery() cannot slice {path!r} of shape {tuple(layer.weight.shape)} like its layer, whose whole has "
            f"{part.numel} features: add the adapter before initialize()"
        )
    for param, along in ((layer.weight, dim), *(((layer.bias, 0),) if layer.bias is not None and dim == 0 else ())):
        param.data = base.slices.axis.gather(param.detach().cpu())[0].to(param.device)
        keep_part(param, "tp", part.split.size, along, part.ranges)
    kind, how = (Column, {"gathers": base.gathers, "enters": base.enters}) if dim == 0 else (Row, {"splits": base.splits})
    become(layer, kind, base.slices, shares=base.shares, is_transposed=False, **how)
