"""Activation checkpointing (recompute activations in the backward) and activation offload (save them in host memory).

    from slipstream.activations.recompute import HostMemory, checkpoint

    h = checkpoint(block, h, mask=mask)        # saves the inputs, and runs the block again in the backward
    host = HostMemory(keep=model.parameters())
    h = checkpoint(block, h, host=host)        # saves the inputs in host memory
    with host.saving():                        # no recompute: saves all activations in host memory
        h = block(h)

The config does the same to a model's repeated blocks (`activations/blocks.py`). There is no `configure()`, which would need
globals: its settings are arguments here.

A `HostMemory` copies each storage once, however many views of it are saved, and views keep their strides. `_Parcel` is one such
storage. `_SavedCall` is one `saving` block, the unit of synchronization: its storages are off the device when the next call ends,
and a backward that enters a call fetches its storages and the previous call's. So the device holds the activations of at most two
calls.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as torch_checkpoint

from slipstream.activations.random_states import tracked

MIN_BYTES = 1 << 18  # a transfer of 10 microseconds: for less, the launch costs more than the transfer saves


def checkpoint(fn: Callable[..., Any], *args: Any, host: HostMemory | None = None, **kwargs: Any) -> Any:
    """Return `fn(*args, **kwargs)`, saving only the tensor arguments: the backward runs `fn` again.

    This is torch's non-reentrant checkpoint: it restores random states (also those of `random_states`) and autocast, supports any
    output and nesting, and inputs need not require gradients. Tensors inside lists or dictionaries are kept as they are. With
    `host`, the tensor arguments are saved in host memory, which has no effect if they are there already.
    """
    names, positional = tuple(kwargs), len(args)
    if states := tracked.get_states():
        fn = _drawing_again(fn, states)

    def run(*flat: Any) -> Any:
        return fn(*flat[:positional], **dict(zip(names, flat[positional:], strict=True)))

    with nullcontext() if host is None else host.saving():  # torch saves the inputs outside its own hooks, so inside these
        return torch_checkpoint.checkpoint(run, *args, *kwargs.values(), use_reentrant=False)


def _drawing_again(fn: Callable[..., Any], states: Mapping[str, Tensor]) -> Callable[..., Any]:
    """`fn`, drawing from these states even if it is called again."""
    calls = itertools.count()

    def run(*args: Any, **kwargs: Any) -> Any:
        with tracked.again(states) if next(calls) else nullcontext():
            return fn(*args, **kwargs)

    return run


def inside_checkpoint() -> bool:
    """Whether one of torch's checkpoints will recompute the current operations, or is recomputing them."""
    return bool(_checkpoint_hook()) or is_recomputing()  # a reentrant checkpoint's first forward has no gradients


def is_recomputing() -> bool:
    """Whether a backward runs on this thread, so that a forward inside it is a recompute."""
    return torch._C._current_graph_task_id() != -1


def is_repeating() -> bool:
    """Whether a forward with gradients repeats an earlier one: a reentrant checkpoint's first forward had no gradients."""
    return is_recomputing() and _checkpoint_hook().startswith("_recomputation_hook")


def _checkpoint_hook() -> str:
    """The name of the non-reentrant checkpoint's hook that currently packs what autograd saves; "" if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0].__qualname__ if hooks is not None and hooks[0].__module__ == torch_checkpoint.__name__ else ""


class HostTransfer(Protocol):
    """Copies storages of one device to the host and back, asynchronously."""

    def send(self, storage: torch.UntypedStorage) -> Arrival: ...

    def fetch(self, host: Tensor) -> Arrival: ...


class Arrival(NamedTuple):
    """A copy in flight: its target, and a function that makes the device wait for it."""

    there: Tensor  # uint8, 1D
    wait: Callable[[], None]


class CudaTransfer:
    """Pinned memory, a separate stream, and an event for each copy."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def send(self, storage: torch.UntypedStorage) -> Arrival:
        # torch caches pinned memory, and reuses it only after the copies that use it
        raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return self._copy(raw, torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True))

    def fetch(self, host: Tensor) -> Arrival:
        arrival = self._copy(host, torch.empty(host.numel(), dtype=torch.uint8, device=self.device))
        arrival.there.record_stream(self.stream)  # a failing backward may free it during the copy
        return arrival

    def _copy(self, source: Tensor, target: Tensor) -> Arrival:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # for the writes of the source and the target's last use
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            copied = self.stream.record_event()
        return Arrival(target, lambda: torch.cuda.current_stream(self.device).wait_event(copied))


def transfer_of(device: torch.device) -> HostTransfer | None:
    """The transfer of a device; None for the host and for devices other than CUDA's, where saved tensors stay."""
    return CudaTransfer(device) if device.type == "cuda" else None


class HostMemory:
    """Host memory for one model's activations. Create one and use it in every step.

    keep       tensors whose storages stay on the device, with all their views: parameters and buffers
    min_bytes  smaller storages stay on the device
    """

    def __init__(
        self,
        keep: Iterable[Tensor] = (),
        min_bytes: int = MIN_BYTES,
        transfer: Callable[[torch.device], HostTransfer | None] = transfer_of,
    ) -> None:
        self.keep = {ref.cdata: ref for ref in (StorageWeakRef(tensor.untyped_storage()) for tensor in keep)}
        self.min_bytes, self.transfer = min_bytes, functools.cache(transfer)
        # By storage and version. A weak reference to a storage reserves its address, so the key of a live parcel is unique.
        self.parcels: weakref.WeakValueDictionary[tuple[int, int], _Parcel] = weakref.WeakValueDictionary()
        self.last: _SavedCall | None = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, autograd saves tensors in host memory until their backward."""
        call = _SavedCall(self.last)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._pack(tensor, call), _unpack):
            yield
        if self.last is not None:
            self.last.leave()
        self.last = call

    def _pack(self, tensor: Tensor, call: _SavedCall) -> Tensor | _Packed:
        if tensor.grad_fn is not None:
            tensor = tensor.detach()  # an operation that saves its own output would be a reference cycle
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:  # a parameter, or a tensor without a storage
            return tensor
        storage = tensor.untyped_storage()
        transfer = self.transfer(tensor.device)
        if transfer is None or storage.nbytes() < self.min_bytes or storage._cdata in self.keep:
            return tensor
        key = (storage._cdata, tensor._version)
        parcel = self.parcels.get(key)
        if parcel is None:
            parcel = self.parcels[key] = _Parcel(tensor, storage, transfer, call)
            call.parcels.append(weakref.ref(parcel))
        parcel.uses += 1
        return _Packed(parcel, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


class _Packed(NamedTuple):
    """A saved tensor: a view of a parcel."""

    parcel: _Parcel
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(packed: Tensor | _Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    parcel = packed.parcel
    parcel.call.fetch()
    view = torch.empty(0, dtype=packed.dtype, device=parcel.device)
    return view.set_(parcel.take(), packed.offset, packed.size, packed.stride)


class _SavedCall:
    """One `saving` block. Autograd's graph owns its parcels."""

    def __init__(self, before: _SavedCall | None) -> None:
        self.before = None if before is None else weakref.ref(before)
        self.parcels: list[weakref.ref[_Parcel]] = []
        self.entered = False

    def living(self) -> list[_Parcel]:
        return [parcel for ref in self.parcels if (parcel := ref()) is not None]

    def leave(self) -> None:
        """Free the device memory. The transfers have run for the duration of a call."""
        for parcel in self.living():
            parcel.leave()

    def fetch(self) -> None:
        """When the backward reaches this call, start fetching its parcels and its predecessor's."""
        if self.entered:
            return
        self.entered = True
        before = self.before and self.before()
        for call in (self, before):
            for parcel in reversed(call.living() if call else []):
                parcel.fetch()


class _Parcel:
    """One storage: on the device (`here`), copied to the host (`away`), and copied back (`back`)."""

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, transfer: HostTransfer, call: _SavedCall) -> None:
        self.device, self.transfer, self.call = tensor.device, transfer, call
        self.origin = StorageWeakRef(storage)
        self.here: Tensor | None = tensor
        self.version = tensor._version
        self.away = transfer.send(storage)
        self.back: Arrival | None = None
        self.uses = self.taken = 0

    def leave(self) -> None:
        if self.here is None:
            return
        self.away.wait()
        if self.here._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.here.shape)} that a block saved for its backward was changed in place during its "
                f"copy to the host (version {self.version} is now {self.here._version}); do not change it in place, or "
                f"keep activations on the device"
            )
        self.here = None

    def fetch(self) -> None:
        if self.here is None and self.back is None:
            self.back = self.transfer.fetch(self.away.there)

    def take(self) -> torch.UntypedStorage:
        """Return the storage, valid for later work on the device. After as many takes as saves, the parcel drops it."""
        if self.here is not None:
            return self.here.untyped_storage()
        if self.back is None:
            self.back = self.transfer.fetch(self.away.there)
        self.back.wait()
        storage = self.back.there.untyped_storage()
        self.taken += 1
        if self.taken % self.uses == 0:  # a retained graph may take it again
            self.back = None
        return storage
