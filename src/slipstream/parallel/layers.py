"""The layers of a pipeline before they are built, and their division into stages.

A layer is a `LayerSpec`, a module, or a function. `partition` returns bounds: stage i has the layers bounds[i] to bounds[i + 1].
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slipstream.zero.trees import tensors_in

TIMINGS = 5  # measurements per layer; the fastest counts


class LayerSpec:
    """A layer that is built only on the rank that holds it: `typename(*module_args, **module_kwargs)`."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise RuntimeError(
                f"LayerSpec only supports torch.nn.Module types, and {typename!r} is none; pass functions as they are"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(arguments)})"

    def build(self, log: bool = False) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares one module with the layers of the same `key`, over all stages.

    forward_fn        called as forward_fn(module, x) in place of module(x)
    tied_weight_attr  names of the shared parameters, dotted below the module, for DeepSpeed's queries. All parameters of the
                      module are tied, as if it were on one stage
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


def name_of(layer: Any) -> str:
    """The class name of a layer, or the name of a function; "" if it has none."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "")


def partition(layers: Sequence[Any], num_parts: int, method: str, example: Any = None) -> list[int]:
    """Divide layers by `method`, in any case: uniform, parameters, type:REGEX or profile.

    example  for `profile`: an input of the first layer
    """
    kind, _, pattern = method.partition(":")
    match kind.lower():
        case "uniform":
            return partition_uniform(len(layers), num_parts)
        case "parameters":
            return partition_balanced(list(map(num_trainable, layers)), num_parts)
        case "type":
            weights = [int(bool(re.search(pattern, name_of(layer), re.IGNORECASE))) for layer in layers]
            if not any(weights):
                raise RuntimeError(
                    f"partition_method {method!r} matches none of the layers' classes {sorted(set(map(name_of, layers)))}"
                )
            return partition_balanced(weights, num_parts)
        case "profile":
            if example is None:
                raise ValueError("partition_method 'profile' measures the layers: pass PipelineModule(example=an input of layer 0)")
            return partition_balanced(seconds_of(layers, example), num_parts)
    raise NotImplementedError(f"partition_method {method!r} is none of uniform, parameters, type:REGEX, profile")


def num_trainable(layer: Any) -> int:
    """The number of trainable elements of a layer. A `LayerSpec` is built on meta, which allocates nothing."""
    if isinstance(layer, LayerSpec):
        with torch.device("meta"):
            layer = layer.build()
    return sum(param.numel() for param in layer.parameters() if param.requires_grad) if isinstance(layer, nn.Module) else 0


def seconds_of(layers: Sequence[Any], example: Any) -> list[float]:
    """The time of each layer's forward and backward. Each layer is built only for its measurement, tied layers repeatedly."""
    x, seconds = example, []
    device = next((t.device for t in tensors_in(example)), torch.device("cpu"))
    for spec in layers:
        with torch.random.fork_rng(devices=[]):
            layer: Any = spec
            if isinstance(spec, LayerSpec):
                module: Any = spec.build().to(device)
                forward_fn = getattr(spec, "forward_fn", None)
                layer = module if forward_fn is None else lambda x, fn=forward_fn, module=module: fn(module, x)
            best = math.inf
            for _ in range(TIMINGS):
                inputs = _leaves(x)
                _finish(device)
                start = time.perf_counter()
                output = layer(inputs)
                roots = [t for t in tensors_in(output) if t.requires_grad]
                params = [p for p in layer.parameters() if p.requires_grad] if isinstance(layer, nn.Module) else []
                wanted = [*params, *(t for t in tensors_in(inputs) if t.requires_grad)]
                if roots and wanted:
                    torch.autograd.grad(roots, wanted, [torch.ones_like(t) for t in roots], allow_unused=True)
                _finish(device)
                best = min(best, time.perf_counter() - start)
        x = _leaves(output)
        seconds.append(best)
    return seconds


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _leaves(value: Any) -> Any:
    """The tree detached from any graph; floating point tensors require gradients, like a stage's inputs."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()), value)


def prefix_sum_inc(weights: Iterable[Any]) -> list[Any]:
    """[3, 4, 5] -> [3, 7, 12]."""
    return list(itertools.accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the bounds of parts of equal length; the first parts get the remainder. Parts may be empty."""
    size, longer = divmod(num_items, num_parts)
    return [part * size + min(part, longer) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds of non-empty parts that minimize (heaviest - lightest part), by dynamic programming.

    If several are equal, the later cut wins, as in DeepSpeed.
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = [0, *itertools.accumulate(weights)]
    # by end of the last part: (heaviest - lightest weight, heaviest, lightest, bounds)
    best: dict[int, tuple[float, float, float, list[int]]] = {0: (0.0, 0.0, math.inf, [0])}
    for part in range(1, num_parts + 1):
        ends: dict[int, tuple[float, float, float, list[int]]] = {}
        for end in range(part, count + 1):
            for start, (_, heaviest, lightest, bounds) in best.items():
                if start < end:
                    weight = sums[end] - sums[start]
                    high, low = max(heaviest, weight), min(lightest, weight)
                    if end not in ends or high - low <= ends[end][0]:
                        ends[end] = (high - low, high, low, [*bounds, end])
        best = ends
    return best[count][-1]
