"""`deepspeed.utils`, `deepspeed.runtime.utils`, `deepspeed.compression.helper`: logging, seeds, memory, paths, leaf modules."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cache, partial, wraps
from operator import attrgetter
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map

from slipstream.compat.accelerator import DeepSpeedAccelerator, get_accelerator
from slipstream.compat.comm import get_rank
from slipstream.zero.wrap import is_leaf, mark_leaves

logger = logging.getLogger("slipstream")  # the parent of all of Slipstream's loggers
log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


def getter(path: str) -> Callable[[Any], Any]:
    """A method that returns an attribute of its object: DeepSpeed's classes have methods for many values."""
    return lambda self: attrgetter(path)(self)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the ranks in `ranks`; on all if it contains -1; on rank 0 by default."""
    if get_rank() in (ranks or [0]) or -1 in (ranks or []):
        logger.log(level, "[rank %d] %s", get_rank(), message)


@cache
def _log_dist_once(message: str, ranks: tuple[int, ...], level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """`log_dist`, once for each message."""
    _log_dist_once(message, tuple(ranks or ()), level)


@cache
def warning_once(message: str, *args: Any, **named: Any) -> None:
    """`logger.warning`, once for each message; hashable arguments."""
    logger.warning(message, *args, **named)


vars(logger).update(warning_once=warning_once, log_dist_once=log_dist_once)


def get_log_level_from_string(log_level_str: str) -> int:
    if log_level_str.lower() not in log_levels:
        raise ValueError(f"log level {log_level_str!r} is none of {sorted(log_levels)}")
    return int(log_levels[log_level_str.lower()])


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the logger writes messages of this level: its own level is at most that."""
    return logger.getEffectiveLevel() <= get_log_level_from_string(max_log_level_str)


get_current_level = logger.getEffectiveLevel


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Show calls of a function under its name in the profiler's traces."""

    @wraps(func)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return recorded


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory of the device (on the CPU, of this process) and of the host on rank 0. A no-op unless `force`."""
    if not force or get_rank() != 0:
        return
    gc.collect()
    device, gib = get_accelerator(), 1 << 30
    names = {"MA": "memory_allocated", "Max_MA": "max_memory_allocated", "CA": "memory_reserved", "Max_CA": "max_memory_reserved"}
    logger.warning("%s", message)
    logger.warning("%s", "         ".join(f"{title} {getattr(device, name)() / gib:.2f} GB" for title, name in names.items()))
    host = DeepSpeedAccelerator("cpu")
    used = (total := host.total_memory()) - host.available_memory()
    logger.warning("CPU Virtual Memory:  used = %.2f GB, percent = %.1f%%", used / gib, 100 * used / total)


def set_random_seed(seed: int) -> None:
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # numpy's limit
    torch.manual_seed(seed % 2**63)


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """Return a copy of a tree with the items that meet `criterion_func` on `device`."""
    return tree_map(lambda leaf: leaf.to(device) if criterion_func(leaf) else leaf, item)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return a tree with its tensors on `device`. Tensors that meet a given criterion stay the same objects with new storage."""

    def move(leaf: Any) -> Any:
        if criterion_func is not None and criterion_func(leaf):
            leaf.data = leaf.to(device).data
            return leaf
        return leaf.to(device) if criterion_func is None and torch.is_tensor(leaf) else leaf

    return tree_map(move, item)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute at a path such as "encoder.layer.0"."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute at a path."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


class OnDevice:
    """`with OnDevice(dtype=torch.bfloat16, device="meta"):` sets the default dtype and device inside."""

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            self._stack.enter_context(torch.device(self.device))

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


# -- leaf modules: blocks are gathered whole, so modules inside are leaves anyway; a marked module outside becomes a block --


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True, *, flag: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes (types or names) and return them.

    Raises ValueError if there is none and `raise_if_not_found` is set.
    """
    chosen, missing = _mark(model, "classes", leaf_module_classes, flag)
    if not chosen and raise_if_not_found:
        raise ValueError(f"no module of {type(model).__name__} is of class {missing}")
    return chosen


unset_z3_leaf_modules = partial(set_z3_leaf_modules, flag=False)  # removes the marks


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in `model.named_modules()`; returns them and the names that were not found.

    Raises ValueError if a name was not found and `raise_if_not_found` is set.
    """
    return _mark_names(model, "names", module_names, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """As `set_z3_leaf_modules_by_name`, for the modules whose names end in one of the suffixes."""
    return _mark_names(model, "name_suffixes", module_name_suffixes, flag, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    model._z3_leaf = flag  # type: ignore[assignment]


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    return is_leaf(model)


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether a parameter of a stage 3 engine is inside a marked module."""
    return hasattr(model, "ds_z3_leaf_module")


def _mark(model: nn.Module, rule: str, wanted: Iterable[Any], flag: bool) -> tuple[list[nn.Module], list[Any]]:
    found = mark_leaves(model, rule, wanted, flag)
    chosen = list(dict.fromkeys(module for modules in found.values() for module in modules))
    return chosen, [each for each, modules in found.items() if not modules]


def _mark_names(
    model: nn.Module, rule: str, names: Sequence[str], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    chosen, missing = _mark(model, rule, names, flag)
    if missing and raise_if_not_found:
        how = "named" if rule == "names" else "with a name that ends in"
        raise ValueError(f"no module of {type(model).__name__} is {how} {', '.join(map(repr, missing))}")
    return chosen, missing
