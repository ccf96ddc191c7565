"""Before `initialize`: a model without memory, and where its values come from."""

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
    """`with slipstream.zero.Init():` models built inside are on meta and take no memory before `initialize`.

        with slipstream.zero.Init():
            model = AutoModelForCausalLM.from_config(config)
        slipstream.zero.load(model, folder)  # or nothing: its constructors' own values
        engine, *_ = slipstream.initialize(model=model, config="ds_config.json")

    What the constructors do to parameters and buffers inside (`nn.init`, `model.apply`, `p.data.normal_()`) is recorded, and
    `initialize` replays it block by block: on one seed, the same values as without `Init` (zero/recording.py).

    DeepSpeed's call. `dtype` is the default dtype inside; in which precision the engine computes is the config's to say, and
    masters start from values that have not been rounded. `enabled=False` does nothing. The other arguments say what `initialize`
    is told anyway, and have no effect here; `module` is refused.
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
                f"zero.Init(module=): this {type(module).__name__} has been built already; give it to slipstream.initialize(), "
                f"which shards it, or build it inside `with slipstream.zero.Init():`"
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"zero.Init(dtype={dtype}) is to be a floating point dtype")
        self.enabled, self.dtype = enabled, dtype
        self._open: list[ExitStack] = []
        reasons = {
            "data_parallel_group, mpu": (data_parallel_group, mpu),
            "mem_efficient_linear": (mem_efficient_linear,),
            "remote_device, pin_memory": (remote_device, pin_memory),
            "config_dict_or_path, config": (config_dict_or_path, config),
        }
        given = [name for name, values in reasons.items() if any(value not in (None, False) for value in values)]
        if enabled and given and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning(
                "zero.Init: no effect of %s: nothing is allocated here, and initialize() is told by its mpu= which ranks share the "
                "states and by its config (offload_param) where they rest",
                "; ".join(given),
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
    """What `load` was told."""

    path: Path | Sequence[Path]
    rename: Callable[[str], str] | None
    strict: bool


_asked: weakref.WeakKeyDictionary[nn.Module, Load | Reader] = weakref.WeakKeyDictionary()


def load(model: nn.Module, path: Path | Sequence[Path], *, rename: Callable[[str], str] | None = None, strict: bool = True) -> None:
    """Say that `model`'s weights are in safetensors files. `slipstream.initialize(model=model, ...)` reads them.

    path    a folder with `model.safetensors.index.json` or `model.safetensors`, a file, or several files
    rename  from a name in the files to the model's, for checkpoints of another class: `lambda name: "transformer." + name`
    strict  every parameter and saved buffer is in the files, and nothing else. False: what is missing is initialized as in a model
            without files, and what is surplus stays unread

    Nothing is read here, and the model may be on meta (`zero.Init`): each rank reads its own part of what is sharded, straight into
    place. One file entry serves all names of a tied parameter. Weights are cast to the precision that the config asks for; fp32
    masters start from the files' own values. What does not fit raises ValueError in `initialize`, the same on every rank, before
    anything is changed.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"zero.load: a {type(model).__name__} is no nn.Module; give the model, then the path")
    _asked[model] = Load(path=path, rename=rename, strict=strict)


def supply(model: nn.Module, reader: Reader) -> None:
    """Say that `reader` has values of `model`'s parameters, which then need no memory before `initialize`."""
    _asked[model] = reader


def asked(model: nn.Module) -> Load | Reader | None:
    """What `load` or `supply` was last told of `model`."""
    return _asked.get(model)


def forget(model: nn.Module) -> None:
    """It has been done."""
    _asked.pop(model, None)
