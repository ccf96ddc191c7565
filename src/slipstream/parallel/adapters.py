"""LoRA adapters that a surgery adds to sliced layers: sized for the whole layer, then cut like it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.parallel.slicing import adapters_of, sliced_class
from slipstream.parallel.tensor import Column, Row
from slipstream.zero.comm import gather_objects
from slipstream.zero.leaves import mark_part, parts_of, whole_shape


@contextmanager
def whole_features(model: nn.Module) -> Iterator[None]:
    """Inside, sliced linear layers have `in_features` and `out_features` of the whole, by which PEFT sizes an adapter."""
    own: list[tuple[Any, int, int]] = []
    sliced = (module for module in model.modules() if isinstance(module, Column | Row) and module.slices is not None)
    linears: list[Any] = [module for module in sliced if "in_features" in vars(module)]
    for linear in linears:
        own.append((linear, linear.out_features, linear.in_features))
        linear.out_features, linear.in_features = whole_shape(linear.weight, own[-1][1:])
    try:
        yield
    finally:
        for module, out_features, in_features in own:
            module.out_features, module.in_features = out_features, in_features


def slice_adapters(model: nn.Module) -> None:
    """Cut the adapters of sliced layers that are whole, with the values of the first rank of the axis. Collective over the axis.

    Raises ValueError, the same on all ranks of the axis, for adapters that cannot be cut.
    """
    for path, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, Column | Row) and base.slices is not None:
            name, dim = ("lora_B", 0) if isinstance(base, Column) else ("lora_A", 1)
            for layer in adapters_of(module, name):
                if not parts_of(layer.weight):
                    _cut(f"{path}.{name}", layer, base, dim)


def _cut(path: str, layer: Any, base: Any, dim: int) -> None:
    part = next(part for part in parts_of(base.weight) if part.split.axis == "tp")
    if base.slices.tokens is not None or layer.weight.shape[dim] != part.numel or part.ranges is None:
        raise ValueError(
            f"engine.surgery() cannot slice {path!r} of shape {tuple(layer.weight.shape)} like its layer, whose whole has "
            f"{part.numel} features (it slices adapters of linear layers, without slipstream.tensor.sequence_parallel): add the "
            f"adapter before initialize()"
        )
    for param, along in ((layer.weight, dim), *(((layer.bias, 0),) if layer.bias is not None and dim == 0 else ())):
        first = gather_objects(param.detach().cpu(), base.slices.axis)[0]
        own = torch.cat([first.narrow(along, start, stop - start) for start, stop in part.ranges], along)
        param.data = own.to(param.device)
        mark_part(param, "tp", part.split.size, along, whole=part.numel, ranges=part.ranges)
    kind, how = (Column, {"gathers": base.gathers}) if dim == 0 else (Row, {"splits": base.splits})
    layer.__class__ = sliced_class(type(layer), kind)
    vars(layer).update(how, slices=base.slices, shares=base.shares, is_transposed=False)
    layer.out_features, layer.in_features = layer.weight.shape
