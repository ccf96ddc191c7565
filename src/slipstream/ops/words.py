"""Atomic words in shared memory: store, load, add, and wait for a value.

A word is a naturally aligned uint32 (heartbeats: uint64) in a shared mapping, which the caller keeps alive. Stores and adds have
release semantics; loads and completed waits have acquire semantics. Values wrap at 2**32 and are compared by signed difference.

Without a compiler the same functions work through ctypes: waiting polls with short sleeps instead of a futex, and libstdc++'s
atomic add (torch has already loaded that library) serves as `add` and as the fences that processors other than x86 need.
"""

import ctypes
import functools
import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from slipstream.ops import build

# int __gnu_cxx::__exchange_and_add(volatile int*, int)
_ATOMIC_ADD = "_ZN9__gnu_cxx18__exchange_and_addEPVii"
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 1e-3  # seconds


class _Words(NamedTuple):
    store: Callable[[int, int], object]
    load: Callable[[int], int]
    add: Callable[[int, int], int]
    store64: Callable[[int, int], object]
    load64: Callable[[int], int]
    # address, value, spin in ns, timeout in ns; may return False before the timeout
    wait: Callable[[int, int, int, int], bool]


def store_release_and_wake(address: int, value: int) -> None:
    """Set the word and wake all waiters."""
    if address & 3:
        raise _misaligned(address, 4)
    _words().store(address, value)


def load_acquire(address: int) -> int:
    if address & 3:
        raise _misaligned(address, 4)
    return _words().load(address)


def add(address: int, delta: int) -> int:
    """Atomically add to the word, wake all waiters, and return the previous value."""
    if address & 3:
        raise _misaligned(address, 4)
    return _words().add(address, delta)


def store64(address: int, value: int) -> None:
    """Set a uint64, for instance the time of a heartbeat. Wakes no waiters."""
    if address & 7:
        raise _misaligned(address, 8)
    _words().store64(address, value)


def load64(address: int) -> int:
    if address & 7:
        raise _misaligned(address, 8)
    return _words().load64(address)


def wait_at_least(address: int, value: int, spin_us: int, timeout_ms: int) -> bool:
    """Spin, then sleep, until the word is at least `value` (signed difference). Returns False after the timeout.

    Releases the GIL, and handles signals (Ctrl-C raises) within 50 ms.
    """
    if address & 3:
        raise _misaligned(address, 4)
    wait, spin, left = _words().wait, spin_us * 1000, timeout_ms * 1_000_000
    deadline = time.monotonic_ns() + left
    while not wait(address, value, spin, left):
        left, spin = deadline - time.monotonic_ns(), 0
        if left <= 0:
            return bool(wait(address, value, 0, 0))
    return True


def _misaligned(address: int, size: int) -> ValueError:
    return ValueError(f"address {address:#x} is not a multiple of {size}; atomic words must be naturally aligned")


@functools.cache
def _words() -> _Words:
    library = build.load()
    if library.kernels is None or library.quick is None:
        return _fallback()
    pointer, u32, u64, i64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64
    quick = library.quick
    return _Words(
        store=_bound(quick.slipstream_store_release_and_wake, None, pointer, u32),
        load=_bound(quick.slipstream_load_acquire, u32, pointer),
        add=_bound(quick.slipstream_add, u32, pointer, u32),
        store64=_bound(quick.slipstream_store64, None, pointer, u64),
        load64=_bound(quick.slipstream_load64, u64, pointer),
        wait=_bound(library.kernels.slipstream_wait_at_least, ctypes.c_int, pointer, u32, i64, i64),
    )


def _bound(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def _fallback() -> _Words:
    try:
        function = getattr(ctypes.CDLL("libstdc++.so.6"), _ATOMIC_ADD)
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            "shared-memory words need a C compiler (for the native kernels) or libstdc++.so.6, and this machine has neither; "
            'install one, or set "slipstream": {"transport": "gloo"}'
        ) from error
    exchange_and_add = _bound(function, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int32)
    # x86 keeps stores in order and loads in order; elsewhere an atomic add of zero is the fence.
    ordered = platform.machine() in ("x86_64", "AMD64")

    def store(address: int, value: int) -> None:
        if not ordered:
            exchange_and_add(address, 0)
        ctypes.c_uint32.from_address(address).value = value

    def load(address: int) -> int:
        return ctypes.c_uint32.from_address(address).value if ordered else exchange_and_add(address, 0)

    def store64(address: int, value: int) -> None:
        if not ordered:
            exchange_and_add(address, 0)
        ctypes.c_uint64.from_address(address).value = value

    def load64(address: int) -> int:
        value = ctypes.c_uint64.from_address(address).value
        if not ordered:
            exchange_and_add(address, 0)
        return value

    def reached(address: int, value: int) -> bool:
        return (load(address) - value) & 0xFFFFFFFF < 0x80000000

    def wait(address: int, value: int, spin: int, timeout: int) -> bool:
        start, nap = time.monotonic_ns(), _SHORTEST_NAP
        while not reached(address, value):
            waited = time.monotonic_ns() - start
            if waited >= timeout:
                return False
            if waited >= spin:
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
        return True

    return _Words(store, load, exchange_and_add, store64, load64, wait)
