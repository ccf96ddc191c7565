"""Before `initialize`: build a model without memory (`Init`), and name the files with its weights (`load`)."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn

from slipstream.zero.recording import recorded

if TYPE_CHECKING:
    from slipstream.zero.materialize import Reader

logger = logging.getLogger(__name__)

Path = str | os.PathLike[str]


class Init:
    """`with slipstream.zero.Init():` models built inside are on meta and use no memory before `initialize`.

        with slipstream.zero.Init():
            model = AutoModelForCausalLM.from_config(config)
        slipstream.zero.load(model, folder)  # optional; without it, the constructors' values
        engine, *_ = slipstream.initialize(model=model, config="ds_config.json")

    `Init` records the operations of constructors on parameters and buffers (`nn.init`, `model.apply`, `p.data.normal_()`), and
    `initialize` replays them block by block: with the same seed, the values are those without `Init` (zero/recording.py).

    The arguments are DeepSpeed's. `dtype` is the default dtype inside; the config sets the engine's precision, and masters start
    from unrounded values. `enabled=False` makes it a no-op. The other arguments have no effect, because `initialize` gets the same
    information. Raises ValueError if `module` is given or `dtype` is not a floating point dtype.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool | None = None,
        remote_device: str | None = None,
        pin_memory: bool | None = None,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        if module is not None:
            raise ValueError(
                f"zero.Init(module=): this {type(module).__name__} has been built already; pass it to slipstream.initialize(), "
                f"which shards it, or build it inside `with slipstream.zero.Init():`"
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"zero.Init(dtype={dtype}): dtype must be a floating point dtype")
        self.enabled, self.dtype = enabled, dtype
        self._open: list[ExitStack] = []
        without_effect = {
            "data_parallel_group, mpu": (data_parallel_group, mpu),
            "mem_efficient_linear": (mem_efficient_linear,),
            "remote_device, pin_memory": (remote_device, pin_memory),
            "config_dict_or_path, config": (config_dict_or_path, config),
        }
        used = [name for name, values in without_effect.items() if any(value not in (None, False) for value in values)]
        if enabled and used and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning(
                "zero.Init: no effect of %s: nothing is allocated here. Pass mpu= to initialize() to choose the ranks that share "
                "the states, and set offload_param in its config to choose their memory",
                "; ".join(used),
            )

    def __enter__(self) -> None:
        stack = ExitStack()
        if self.enabled:
            stack.enter_context(recorded())
            if self.dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
        self._open.append(stack)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._open.pop().close()
        if error is not None and "meta tensor" in str(error):
            error.add_note(
                "Inside slipstream.zero.Init tensors have no values. To start from files, build the model inside (from_config, not "
                "from_pretrained) and call slipstream.zero.load(model, folder)."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    path: Path | Sequence[Path]
    rename: Callable[[str], str] | None
    strict: bool


# from where `initialize` reads a model's weights, until it has; instead of the constructors' values
sources: weakref.WeakKeyDictionary[nn.Module, Load | Reader] = weakref.WeakKeyDictionary()


def load(model: nn.Module, path: Path | Sequence[Path], *, rename: Callable[[str], str] | None = None, strict: bool = True) -> None:
    """Make `slipstream.initialize(model=model, ...)` read the weights of `model` from safetensors files.

    path    a folder with `model.safetensors.index.json` or `model.safetensors`, a file, or several files
    rename  maps a name in the files to the model's, for checkpoints of another class: `lambda name: "transformer." + name`
    strict  True: the files must have every parameter and persistent buffer, and nothing else. False: missing ones are initialized
            as in a model without files, and surplus entries are ignored

    Reads nothing yet. The model may be on meta (`zero.Init`): each rank reads its own part of sharded weights, directly into place.
    One file entry serves all names of a tied parameter. Weights are cast to the config's precision; fp32 masters start from the
    files' values. If the files do not fit, `initialize` raises ValueError, the same on every rank, before anything is changed.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"zero.load: a {type(model).__name__} is no nn.Module; pass the model, then the path")
    sources[model] = Load(path=path, rename=rename, strict=strict)
