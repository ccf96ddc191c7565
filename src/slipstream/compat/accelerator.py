"""`deepspeed.accelerator.get_accelerator()`: CUDA where it is, else the CPU. Other methods are torch.cuda's."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from slipstream.distributed import local_rank, local_world_size


class Accelerator:
    def __init__(self, kind: str) -> None:
        self._name = kind
        self.on_cuda = kind == "cuda"

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or not self.on_cuda else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(self.device_name(device_index))

    def current_device(self) -> Any:
        return torch.cuda.current_device() if self.on_cuda else local_rank()

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}" if self.on_cuda else "cpu"

    def set_device(self, device_index: Any) -> None:
        if self.on_cuda:
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        return torch.cuda.device_count() if self.on_cuda else local_world_size()

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return not self.on_cuda

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

    def __getattr__(self, name: str) -> Any:
        if self.on_cuda and hasattr(torch.cuda, name):
            return getattr(torch.cuda, name)
        raise AttributeError(f"the accelerator ({self._name}) of Slipstream's deepspeed has no {name!r}")


def _resident(key: str = "VmRSS") -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{key}:"))


@functools.cache
def get_accelerator() -> Accelerator:
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")
