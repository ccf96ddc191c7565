"""`deepspeed.accelerator.get_accelerator()`: CUDA where it is, else the CPU. Other methods are torch.cuda's."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.distributed import local_world_size

SUPPORTED = ("cuda", "cpu")


class DeepSpeedAccelerator:
    """CUDA or the CPU."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self.on_cuda = kind == "cuda"
        self._compile_backend = "inductor"

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or not self.on_cuda else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(self.device_name(device_index))

    def current_device(self) -> Any:
        """What `torch.tensor(device=)` takes: CUDA's index, or the CPU."""
        return torch.cuda.current_device() if self.on_cuda else torch.device("cpu")

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}" if self.on_cuda else "cpu"

    def set_device(self, device_index: Any) -> None:
        if self.on_cuda:
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """CUDA's devices; on a CPU the ranks of this host, as LOCAL_SIZE says, else as their starter does."""
        return torch.cuda.device_count() if self.on_cuda else int(os.environ.get("LOCAL_SIZE", "0")) or local_world_size()

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return not self.on_cuda

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def synchronize(self, device_index: Any = None) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(device_index)

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def communication_backend_name(self) -> str:
        return "nccl" if self.on_cuda else "gloo"

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self.on_cuda else True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def empty_cache(self) -> None:
        if self.on_cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: Any = None) -> int:
        return torch.cuda.memory_allocated(device_index) if self.on_cuda else _resident()

    def max_memory_allocated(self, device_index: Any = None) -> int:
        return torch.cuda.max_memory_allocated(device_index) if self.on_cuda else _resident("VmHWM")

    def memory_reserved(self, device_index: Any = None) -> int:
        return torch.cuda.memory_reserved(device_index) if self.on_cuda else _resident()

    memory_cached = memory_reserved

    def max_memory_reserved(self, device_index: Any = None) -> int:
        return torch.cuda.max_memory_reserved(device_index) if self.on_cuda else _resident("VmHWM")

    max_memory_cached = max_memory_reserved

    def reset_peak_memory_stats(self, device_index: Any = None) -> None:
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: Any = None) -> int:
        if self.on_cuda:
            return torch.cuda.get_device_properties(device_index).total_memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: Any = None) -> int:
        if self.on_cuda:
            return torch.cuda.mem_get_info(device_index)[0]
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def pin_memory(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor.pin_memory() if self.on_cuda else tensor

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def range_push(self, message: str) -> None:
        if self.on_cuda:
            torch.cuda.nvtx.range_push(message)

    def range_pop(self) -> None:
        if self.on_cuda:
            torch.cuda.nvtx.range_pop()

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        current_env.update(dict.fromkeys(self.visible_devices_envs(), ",".join(map(str, local_accelerator_ids))))

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"set_compile_backend({backend!r}): torch.compile knows {', '.join(known)}")
        self._compile_backend = backend

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """The builder's class; NotImplementedBuilder where there is none of this name."""
        builders = importlib.import_module("slipstream.compat.op_builders").BUILDERS
        return builders.get(class_name, builders["NotImplementedBuilder"])

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def __getattr__(self, name: str) -> Any:
        if self.on_cuda and hasattr(torch.cuda, name):
            return getattr(torch.cuda, name)
        if not self.on_cuda and name in _ON_CPU:
            return _ON_CPU[name]
        raise AttributeError(f"the accelerator ({self._name}) of Slipstream's deepspeed has no {name!r}")


_TENSORS = "BFloat16Tensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor"
# what torch.cuda has of itself
_ON_CPU: Mapping[str, Any] = {
    **{name: getattr(torch, name) for name in _TENSORS.split()},
    "Stream": None,
    "Event": None,
    "stream": lambda stream: contextlib.nullcontext(),
    "current_stream": lambda device_index=None: None,
    "default_stream": lambda device_index=None: None,
    "get_rng_state": lambda device_index=None: torch.get_rng_state(),
    "set_rng_state": lambda new_state, device_index=None: torch.set_rng_state(new_state),
    "initial_seed": torch.initial_seed,
    "default_generator": lambda device_index=None: torch.default_generator,
    "lazy_call": lambda callback: callback(),
    "memory_stats": lambda device_index=None: {
        "allocated_bytes.all.current": _resident(),
        "allocated_bytes.all.peak": _resident("VmHWM"),
    },
    "is_triton_supported": lambda: False,
}


def _resident(key: str = "VmRSS") -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{key}:"))


_chosen: list[DeepSpeedAccelerator] = []


def get_accelerator() -> DeepSpeedAccelerator:
    """The one that `set_accelerator` was given, else CUDA where it is, else the CPU."""
    if not _chosen:
        _chosen.append(DeepSpeedAccelerator("cuda" if torch.cuda.is_available() else "cpu"))
    return _chosen[0]


def set_accelerator(accelerator: DeepSpeedAccelerator) -> None:
    """What `get_accelerator` returns from now on. Raises AssertionError where it is no subclass of DeepSpeedAccelerator."""
    if not isinstance(accelerator, DeepSpeedAccelerator):
        raise AssertionError(f"{type(accelerator).__name__} is not a subclass of DeepSpeedAccelerator")
    _chosen[:] = [accelerator]


def is_current_accelerator_supported() -> bool:
    return get_accelerator().device_name() in SUPPORTED
