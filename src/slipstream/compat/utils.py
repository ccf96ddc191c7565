"""`deepspeed.utils` and `deepspeed.runtime.utils`: logging, seeds, memory, leaf modules."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn as nn

from slipstream.compat.accelerator import get_accelerator
from slipstream.compat.comm import get_rank

logger = logging.getLogger("slipstream")  # Slipstream's own: its level is the level of everything below
LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """On the ranks of `ranks`; on all where it holds -1; on the first one by default."""
    if get_rank() in (ranks or [0]) or -1 in (ranks or []):
        logger.log(level, "[rank %d] %s", get_rank(), message)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    if log_level_str.lower() not in LEVELS:
        raise ValueError(f"log level {log_level_str!r} is none of {sorted(LEVELS)}")
    (custom_logger or logger).setLevel(LEVELS[log_level_str.lower()])


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs what the device (or, on the CPU, this process) takes, on the first rank, where `force` says so."""
    if not force or get_rank() != 0:
        return
    gc.collect()
    device, gib = get_accelerator(), 1 << 30
    logger.warning(
        "%s: %.2f GiB allocated, %.2f GiB at most, %.2f GiB free",
        message,
        device.memory_allocated() / gib,
        device.max_memory_allocated() / gib,
        device.available_memory() / gib,
    )


def set_random_seed(seed: int) -> None:
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """A tree of tensors on `device`; where `criterion_func` is given, those of which it is true."""
    if isinstance(item, torch.Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(each, device, criterion_func) for each in item)
    if isinstance(item, dict):
        return {key: move_to_device(each, device, criterion_func) for key, each in item.items()}
    return item


class OnDevice:
    """`with OnDevice(dtype=torch.bfloat16, device="meta"):` the default dtype and device of what is built inside."""

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


# -- leaf modules: Slipstream gathers whole blocks, so every module inside one is a leaf already; the marks are for who asks --


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str]) -> list[nn.Module]:
    """Returns the modules of these classes. Raises ValueError where there is none."""
    wanted = list(leaf_module_classes)

    def chosen(name: str, module: nn.Module) -> bool:
        kind = type(module)
        names = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        return any(each in names if isinstance(each, str) else isinstance(module, each) for each in wanted)

    return _mark(model, chosen, True, f"of class {wanted}")


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type]) -> list[nn.Module]:
    wanted = tuple(leaf_module_classes)
    return _mark(model, lambda name, module: isinstance(module, wanted), False, f"of class {wanted}")


def set_z3_leaf_modules_by_name(model: nn.Module, module_names: Sequence[str]) -> list[nn.Module]:
    return _mark(model, lambda name, module: name in module_names, True, f"named {list(module_names)}")


def set_z3_leaf_modules_by_suffix(model: nn.Module, module_name_suffixes: Sequence[str]) -> list[nn.Module]:
    suffixes = tuple(module_name_suffixes)
    return _mark(model, lambda name, module: name.endswith(suffixes), True, f"with a name that ends in {suffixes}")


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    model._z3_leaf = flag  # type: ignore[assignment]


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    return bool(vars(model).get("_z3_leaf", False))


def _mark(model: nn.Module, chosen: Any, flag: bool, what: str) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if chosen(name, module)]
    if not found:
        raise ValueError(f"no module of {type(model).__name__} is {what}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found
