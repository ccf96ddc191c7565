"""Copies between a device and the host that overlap with the device's computation.

event   the end of an operation on the device. Either the caller waits for it (`wait`), or only the device's later work does
        (`fence`)
copy    starts after other events and ends with one. Uses of its two tensors must wait for that event
lane    runs the copies, and allocates the pinned host memory for them

If the device is the host, there is no lane (`lane_of`), and nothing here is called.
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
    """The end of an operation on the device."""

    @abstractmethod
    def wait(self) -> None:
        """Block the caller until the event."""

    @abstractmethod
    def fence(self) -> None:
        """Make the device's later work from this thread wait for the event. Does not block the caller."""


class Lane(ABC):
    """A device's copies to and from the host. Any thread may call."""

    @abstractmethod
    def memory(self, nbytes: int) -> Tensor:
        """Zeroed, page-aligned pinned host memory, uint8 [nbytes], freed only with the lane: for long-lived states."""

    @abstractmethod
    def now(self) -> Event:
        """The end of all computation that this thread has queued on the device so far."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor, after: Sequence[Event | None]) -> Event:
        """Start target = source, of one dtype, one of them on the device, once all of `after` have ended."""

    @abstractmethod
    def behind(self, copy: Event) -> AbstractContextManager[None]:
        """Inside, launches (of a collective) run after a copy to the device, and overlap with the device's computation."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all copies and free the memory. Safe to call twice."""


class CudaEvent(Event):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps, because the optimizer needs the CPU
        self.event.record(stream)
        self.device = stream.device

    def wait(self) -> None:
        self.event.synchronize()

    def fence(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class CudaLane(Lane):
    """A stream for each direction, because the bus transfers in both at once.

    A stream waits only for events recorded earlier, so streams that wait for one another cannot deadlock.

    Memory is pinned in place: torch rounds its own pinned allocations up to a power of two, which wastes tens of gigabytes for
    masters and moments of billions of parameters.
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
                pinned = sum(block.nbytes for block in self._pinned)
                raise RuntimeError(
                    f"CUDA could not pin {memory.nbytes / 1e9:.2f} GB of host memory for offloaded states (error {error}), "
                    f"after {pinned / 1e9:.2f} GB; give this process more host memory, or offload states to disk (device: nvme)"
                )
            self._pinned.append(memory)
        return memory[:nbytes]

    def now(self) -> Event:
        return CudaEvent(torch.cuda.current_stream(self.device))

    def copy(self, target: Tensor, source: Tensor, after: Sequence[Event | None]) -> Event:
        assert target.dtype == source.dtype, "a casting copy would be a kernel with temporary memory"
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
    """The lane of a device, or None if the device is the host."""
    return CudaLane(device) if device.type == "cuda" else None
