"""`deepspeed.accelerator.get_accelerator()`: CUDA if available, else the CPU. Methods not defined here are torch.cuda's."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.observe.memory import MemoryReading
from slipstream.world import host
from slipstream.world.join import local_world_size

SUPPORTED = ("cuda", "cpu")


class DeepSpeedAccelerator:
    def __init__(self, kind: str) -> None:
        self._name = kind
        self.on_cuda = kind == "cuda"
        self._compile_backend = "inductor"

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or not self.on_cuda else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(self.device_name(device_index))

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        current_env[_VISIBLE] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        backends = torch._dynamo.list_backends(exclude_tags=())
        if backend not in backends:
            raise ValueError(f"set_compile_backend({backend!r}): torch.compile knows {', '.join(backends)}")
        self._compile_backend = backend

    def get_op_builder(self, class_name: str) -> Any:
        """Return the builder's class, or NotImplementedBuilder if the name is unknown."""
        builders = importlib.import_module("slipstream.compat.op_builders").BUILDERS
        return builders.get(class_name, builders["NotImplementedBuilder"])

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look up dunder methods on an instance that has no name yet
            raise AttributeError(name)
        own, cuda = _ON_CUDA if self.on_cuda else _ON_CPU, _CUDA_NAMES.get(name, name)
        for table in (_EVERYWHERE, own):
            if name in table:
                return table[name]
        if self.on_cuda and hasattr(torch.cuda, cuda):
            return getattr(torch.cuda, cuda)
        raise AttributeError(f"the accelerator ({self._name}) of Slipstream's deepspeed has no {name!r}")


def _no_op(*args: Any, **kwargs: Any) -> None:
    """A CPU has no devices, streams or cached memory to act on."""


def _memory() -> MemoryReading:
    return MemoryReading.of(torch.device("cpu"))


def _memory_stats(device_index: Any = None) -> dict[str, int]:
    now = _memory()
    return {"allocated_bytes.all.current": now.allocated, "allocated_bytes.all.peak": now.peak}


_VISIBLE = "CUDA_VISIBLE_DEVICES"
_EVERYWHERE: Mapping[str, Any] = {  # independent of the device
    "is_available": lambda: True,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "is_fp16_supported": lambda: True,
    "random": lambda: torch.random,
    "supported_dtypes": lambda: [torch.float32, torch.float16, torch.bfloat16],
    "visible_devices_envs": lambda: [_VISIBLE],
    "op_builder_dir": lambda: "deepspeed.ops.op_builder",
    "export_envs": list,
    "is_fp64_supported": lambda: True,
    "is_pinned": lambda tensor: tensor.is_pinned(),
}
_SYNCHRONIZED = ("is_synchronized_device", "use_host_timers", "resolves_data_dependency", "handles_memory_backpressure")
_CUDA_NAMES = {"memory_cached": "memory_reserved", "max_memory_cached": "max_memory_reserved"}
_ON_CUDA: Mapping[str, Any] = {
    **dict.fromkeys(_SYNCHRONIZED, lambda: False),
    "current_device_name": lambda: f"cuda:{torch.cuda.current_device()}",
    "communication_backend_name": lambda: "nccl",
    "total_memory": lambda device_index=None: torch.cuda.get_device_properties(device_index).total_memory,
    "available_memory": lambda device_index=None: torch.cuda.mem_get_info(device_index)[0],
    "pin_memory": lambda tensor, *args, **kwargs: tensor.pin_memory(),
    "range_push": lambda message, *args, **kwargs: torch.cuda.nvtx.range_push(message),
    "range_pop": lambda *args, **kwargs: torch.cuda.nvtx.range_pop(),
}
_TENSORS = "BFloat16Tensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor"
_NO_OPS = """set_device synchronize empty_cache current_stream default_stream range_push range_pop reset_peak_memory_stats
reset_max_memory_allocated reset_max_memory_cached"""
# CPU counterparts of torch.cuda's functions
_ON_CPU: Mapping[str, Any] = {
    **{name: getattr(torch, name) for name in _TENSORS.split()},
    **dict.fromkeys(("Stream", "Event")),
    **dict.fromkeys(_SYNCHRONIZED, lambda: True),
    **dict.fromkeys(_NO_OPS.split(), _no_op),
    **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), lambda device_index=None: _memory().allocated),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), lambda device_index=None: _memory().peak),
    "current_device": lambda: torch.device("cpu"),  # for `torch.tensor(device=)`
    "current_device_name": lambda: "cpu",
    "communication_backend_name": lambda: "gloo",
    "is_bf16_supported": lambda: True,
    "total_memory": lambda device_index=None: host.memory_total(),
    "available_memory": lambda device_index=None: host.available_memory(),
    "pin_memory": lambda tensor, *args, **kwargs: tensor,
    # the ranks of this host: LOCAL_SIZE, or the launcher's count
    "device_count": lambda: int(os.environ.get("LOCAL_SIZE", "0")) or local_world_size(),
    "stream": lambda stream: contextlib.nullcontext(),
    "get_rng_state": lambda device_index=None: torch.get_rng_state(),
    "set_rng_state": lambda new_state, device_index=None: torch.set_rng_state(new_state),
    "initial_seed": torch.initial_seed,
    "default_generator": lambda device_index=None: torch.default_generator,
    "lazy_call": lambda callback: callback(),
    "memory_stats": _memory_stats,
    "is_triton_supported": lambda: False,
}

_chosen: list[DeepSpeedAccelerator] = []


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator set by `set_accelerator`; by default CUDA if available, else the CPU."""
    if not _chosen:
        _chosen.append(DeepSpeedAccelerator("cuda" if torch.cuda.is_available() else "cpu"))
    return _chosen[0]


def set_accelerator(accelerator: DeepSpeedAccelerator) -> None:
    """Set what `get_accelerator` returns. Raises AssertionError if it is not a DeepSpeedAccelerator."""
    if not isinstance(accelerator, DeepSpeedAccelerator):
        raise AssertionError(f"{type(accelerator).__name__} is not a subclass of DeepSpeedAccelerator")
    _chosen[:] = [accelerator]


def is_current_accelerator_supported() -> bool:
    return get_accelerator().device_name() in SUPPORTED
