"""What a forward keeps for its backward: less, by computing it again, or the same, in host memory.

    from slipstream.checkpointing import HostMemory, checkpoint

    h = checkpoint(block, h, mask=mask)        # keeps the inputs, and runs the block again in the backward
    host = HostMemory(keep=model.parameters())
    h = checkpoint(block, h, host=host)        # the inputs wait in host memory
    with host.saving():                        # nothing is computed again: all that is saved waits there
        h = block(h)

The config does the same to a model's repeated blocks (`train/activation.py`). There is no `configure()`: it would need
globals, and what it sets are arguments here.

A storage (of a `HostMemory`) is moved whole and once, however many views of it are saved, and views keep their strides.
`_Parcel`: one such storage. `_Call`: one `saving` block, the unit of waiting: a call's storages have left the device when the
next call ends, and a backward that enters a call brings back its own and those of the call before, so that two calls'
activations are on the device at any time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as torch_checkpoint

MIN_BYTES = 1 << 18  # what a transfer of 10 microseconds moves: below that, starting it costs more than it saves


def checkpoint(fn: Callable[..., Any], *args: Any, host: HostMemory | None = None, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, of which only the tensors among the arguments are kept: the backward runs `fn` again.

    torch's non-reentrant checkpoint: random state and autocast are as they were, any output and any nesting are right, and
    inputs need not require gradients. Tensors inside lists or dictionaries are kept as they are. With `host`, the kept
    tensors wait there; that has no effect where they are in host memory already.
    """
    names, positional = tuple(kwargs), len(args)

    def run(*flat: Any) -> Any:
        return fn(*flat[:positional], **dict(zip(names, flat[positional:], strict=True)))

    with nullcontext() if host is None else host.saving():  # torch keeps the inputs outside its own hooks, so inside these
        return torch_checkpoint.checkpoint(run, *args, *kwargs.values(), use_reentrant=False)


def inside_checkpoint() -> bool:
    """Whether some checkpoint of torch's computes again what runs now, or will."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    will = hooks is not None and hooks[0].__module__ == torch_checkpoint.__name__
    return will or torch._C._current_graph_task_id() != -1  # the reentrant one's first forward runs without gradients


class Transfer(Protocol):
    """Moves storages of one device to the host and back. Both ways return at once."""

    def send(self, storage: torch.UntypedStorage) -> Arrival: ...

    def fetch(self, host: Tensor) -> Arrival: ...


class Arrival(NamedTuple):
    """Bytes on their way: where they will be, and what makes the device wait for them."""

    there: Tensor  # uint8, 1D
    wait: Callable[[], None]


class CudaTransfer:
    """Pinned memory, one stream beside the computing one, and an event for each copy."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def send(self, storage: torch.UntypedStorage) -> Arrival:
        # torch caches pinned memory and hands it out again only after the copies that use it
        return self._copy(_bytes_of(storage), torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True))

    def fetch(self, host: Tensor) -> Arrival:
        arrival = self._copy(host, torch.empty(host.numel(), dtype=torch.uint8, device=self.device))
        arrival.there.record_stream(self.stream)  # should a backward that fails drop it before it has arrived
        return arrival

    def _copy(self, source: Tensor, target: Tensor) -> Arrival:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # the source is written, the target's last use is over
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            copied = self.stream.record_event()
        return Arrival(target, lambda: torch.cuda.current_stream(self.device).wait_event(copied))


def transfer_of(device: torch.device) -> Transfer | None:
    """None where what is saved stays: the host itself, and devices other than CUDA's."""
    return CudaTransfer(device) if device.type == "cuda" else None


class HostMemory:
    """The host's part of one model's activations. Make one and use it in every step.

    keep       tensors whose memory stays on the device: parameters and buffers, and so what views them
    min_bytes  smaller storages stay
    """

    def __init__(
        self,
        keep: Iterable[Tensor] = (),
        min_bytes: int = MIN_BYTES,
        transfer: Callable[[torch.device], Transfer | None] = transfer_of,
    ) -> None:
        self.keep = {ref.cdata: ref for ref in (StorageWeakRef(tensor.untyped_storage()) for tensor in keep)}
        self.min_bytes, self.transfer = min_bytes, transfer
        self.transfers: dict[torch.device, Transfer | None] = {}
        # By storage and version. A weak reference to a storage holds its address: while a parcel lives, nobody else has its key.
        self.parcels: weakref.WeakValueDictionary[tuple[int, int], _Parcel] = weakref.WeakValueDictionary()
        self.last: _Call | None = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What autograd saves inside waits in host memory for its backward."""
        call = _Call(self.last)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._pack(tensor, call), _unpack):
            yield
        if self.last is not None:
            self.last.leave()
        self.last = call

    def _pack(self, tensor: Tensor, call: _Call) -> Tensor | _Packed:
        if tensor.grad_fn is not None:
            tensor = tensor.detach()  # an operation's own output, kept by the operation, would keep both alive for ever
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:  # a parameter, or what has no storage
            return tensor
        storage = tensor.untyped_storage()
        if tensor.device not in self.transfers:
            self.transfers[tensor.device] = self.transfer(tensor.device)
        transfer = self.transfers[tensor.device]
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


class _Call:
    """One `saving` block. Its parcels belong to autograd's graph and die with it."""

    def __init__(self, before: _Call | None) -> None:
        self.before = None if before is None else weakref.ref(before)
        self.parcels: list[weakref.ref[_Parcel]] = []
        self.entered = False

    def living(self) -> list[_Parcel]:
        return [parcel for ref in self.parcels if (parcel := ref()) is not None]

    def leave(self) -> None:
        """Give the device's memory back: the transfers have had the time of a call."""
        for parcel in self.living():
            parcel.leave()

    def fetch(self) -> None:
        """The backward is at this call: bring it and its predecessor."""
        if self.entered:
            return
        self.entered = True
        before = self.before and self.before()
        for call in (self, before):
            for parcel in reversed(call.living() if call else []):
                parcel.fetch()


class _Parcel:
    """One storage: on the device (`here`), and on its way to the host or there (`away`); or on its way back (`back`)."""

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, transfer: Transfer, call: _Call) -> None:
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
                f"a tensor of shape {tuple(self.here.shape)} that a block saved for its backward was changed in place while it "
                f"was copied to the host (version {self.version} is now {self.here._version}); do not change it in place, or "
                f"keep activations on the device"
            )
        self.here = None

    def fetch(self) -> None:
        if self.here is None and self.back is None:
            self.back = self.transfer.fetch(self.away.there)

    def take(self) -> torch.UntypedStorage:
        """The storage, readable by what the device computes from now on. After as many takes as saves it is let go."""
        self.fetch()
        if self.here is not None:
            return self.here.untyped_storage()
        assert self.back is not None, "fetch() has started it"
        self.back.wait()
        storage = self.back.there.untyped_storage()
        self.taken += 1
        if self.taken % self.uses == 0:  # a graph that was retained may ask again
            self.back = None
        return storage


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
