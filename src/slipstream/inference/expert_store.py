"""Experts of a native decoder on disk, with the most recently used ones in memory.

Memory holds `nbytes` of experts of all layers together, in slots of one expert each. If a forward needs an expert that is in no
slot, all threads read it into the slot that was used least recently (csrc/expert_store.c). The router decides first, so no read is
in vain. A read copies packed bytes, so tokens are the same as with all experts in memory. Reads pass through the kernel's page
cache: free host memory is a second cache level. Shared experts and routers stay in memory.

The file is temporary (in TMPDIR) and unnamed, so it disappears with the process.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref

import torch
from torch import Tensor

from slipstream.inference.stats import Use
from slipstream.ops.pages import Pool

_pointer, _long, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
LINE = 64


class ExpertRecord(ctypes.Structure):
    """`struct expert_store` of csrc/decoder.h."""

    _fields_ = (
        ("slots", _pointer),
        ("expert_bytes", _long),
        *((name, _pointer) for name in ("last_used", "owner", "slot", "loads")),
        *((name, _long) for name in ("clock", "hits", "misses")),
        *((name, _int) for name in ("file", "num_slots", "num_loads", "error")),
    )


class ExpertStore:
    """`num_experts`: of all layers. `least`: the number in the layer that has most. `expert_nbytes`: packed size of the largest."""

    def __init__(self, nbytes: int, *, num_experts: int, least: int, expert_nbytes: int) -> None:
        size = expert_nbytes + -expert_nbytes % LINE
        slots = min(nbytes // size, num_experts)
        if slots < least:
            raise ValueError(
                f"expert_cache_bytes ({nbytes:,}) holds {slots} experts of {size:,} bytes; a batch can need a layer's {least}: "
                f"give at least {least * size:,}"
            )
        self.expert_nbytes, self.num_slots, self.num_experts = size, slots, num_experts
        self._file, path = tempfile.mkstemp(prefix="slipstream-experts-")
        os.unlink(path)
        weakref.finalize(self, os.close, self._file)
        os.truncate(self._file, num_experts * size)  # reads are of whole experts
        self._pool = Pool()
        self._tensors = {
            "slots": self._pool.empty(slots * size),
            "last_used": torch.zeros(slots, dtype=torch.int64),
            "owner": torch.full((slots,), -1, dtype=torch.int32),
            "slot": torch.full((num_experts,), -1, dtype=torch.int32),
            "loads": torch.zeros(slots, dtype=torch.int32),
        }
        addresses = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}
        self.record = ExpertRecord(**addresses, expert_bytes=size, file=self._file, num_slots=slots)

    def write(self, expert: int, tables: list[Tensor]) -> list[int]:
        """Write an expert's packed tables, uint8; thread-safe. Returns their offsets in its part of the file. Raises OSError."""
        offsets, begin = [], 0
        for table in tables:
            offsets.append(begin)
            view, done = table.numpy().data, 0
            while done < len(view):
                done += os.pwrite(self._file, view[done:], expert * self.expert_nbytes + begin + done)
            begin += table.nbytes + -table.nbytes % LINE
        assert begin <= self.expert_nbytes, f"expert {expert} has {begin} bytes packed, more than {self.expert_nbytes}"
        return offsets

    def use(self) -> Use:
        return Use(self.record.hits, self.record.misses)

    def check(self) -> None:
        """Raise OSError if a read of the last forward failed."""
        if error := self.record.error:
            self.record.error = 0
            self._tensors["slot"].fill_(-1)  # some slots hold incomplete experts
            self._tensors["owner"].fill_(-1)
            raise OSError(error, f"cannot read experts from the temporary file: {os.strerror(error)}")
