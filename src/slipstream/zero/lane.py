"""Copies between a device and the host that go beside what the device computes.

event   the end of something the device was given. Two can wait for it: the caller (`wait`), or only what the device computes
        from now on (`fence`), and the caller goes on
copy    starts after other events and ends in one. Whoever uses its two tensors before that waits for it
lane    where copies run, and the host memory that they can run beside

Where the device is the host there is one memory and no lane (`lane_of`): nothing here is ever called.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from slipstream.ops.disk import ALIGNMENT, aligned

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class Event(ABC):
    """The end of something the device was given."""

    @abstractmethod
    def wait(self) -> None:
        """Hold the caller until then."""

    @abstractmethod
    def fence(self) -> None:
        """Hold what the device is given from now on, by this thread, until then. The caller goes on."""


class Lane(ABC):
    """A device's copies to and from the host. Any thread may call."""

    @abstractmethod
    def memory(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of zeros in host memory that the device reads and writes itself, at the start of a page. It lives as long
        as the lane: ask for what stays."""

    @abstractmethod
    def now(self) -> Event:
        """The end of all that the device was given to compute so far, by this thread."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor, after: Sequence[Event | None]) -> Event:
        """Start target = source, of one dtype, one of them on the device, once all of `after` have ended."""

    @abstractmethod
    def behind(self, copy: Event) -> AbstractContextManager[None]:
        """What is launched inside, to run beside what the device computes (a collective), follows a copy to the device."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all copies and give the memory back. Always safe to call twice."""


class CudaEvent(Event):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # a thread that waits sleeps: the optimizer wants the processor
        self.event.record(stream)
        self.device = stream.device

    def wait(self) -> None:
        self.event.synchronize()

    def fence(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class CudaLane(Lane):
    """A stream for each direction, which the bus serves at once.

    A stream waits only for what was recorded before, so streams that wait for one another cannot come to a standstill.

    Memory is pinned where it lies: torch's own pinned memory is rounded up to a power of two, which for masters and moments of
    billions of parameters is tens of gigabytes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._pinned: list[Tensor] = []
        self._close = weakref.finalize(self, _unpin, self._pinned, (self._to_host, self._to_device))
        self._close.atexit = False

    def memory(self, nbytes: int) -> Tensor:
        memory = aligned(-(-nbytes // ALIGNMENT) * ALIGNMENT)
        if nbytes:
            error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
            if error:
                held = sum(each.nbytes for each in self._pinned)
                raise RuntimeError(
                    f"CUDA could not pin {memory.nbytes / 1e9:.2f} GB of host memory for states beside the device (error {error}), "
                    f"after {held / 1e9:.2f} GB; give this process more host memory, or rest states on disk (device: nvme)"
                )
            self._pinned.append(memory)
        return memory[:nbytes]

    def now(self) -> Event:
        return CudaEvent(torch.cuda.current_stream(self.device))

    def copy(self, target: Tensor, source: Tensor, after: Sequence[Event | None]) -> Event:
        assert target.dtype == source.dtype, "a copy that casts is a kernel, with memory of its own"
        stream = self._to_device if target.is_cuda else self._to_host
        with torch.cuda.stream(stream):
            for event in after:
                if event is not None:
                    event.fence()
            target.copy_(source, non_blocking=True)
        return CudaEvent(stream)

    def behind(self, copy: Event) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._to_device)

    def close(self) -> None:
        self._close()


def _unpin(pinned: list[Tensor], streams: Sequence[torch.cuda.Stream]) -> None:
    for stream in streams:
        stream.synchronize()
    while pinned:
        torch.cuda.cudart().cudaHostUnregister(pinned.pop().data_ptr())


def lane_of(device: torch.device) -> Lane | None:
    """None where the device is the host."""
    return CudaLane(device) if device.type == "cuda" else None
