"""Shared words between processes: publication, waking, wrapping, adds, signals; natively and in Python.

The other process imports neither torch nor the package's `__init__`, so that it starts in milliseconds.
"""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slipstream.ops
from slipstream.ops import build, words

KINDS = ("native", "fallback")
OPS = Path(slipstream.ops.__file__).parent

# argv: ops directory, kind, descriptor, code. The code sees `words`, `base` (the mapping's address), `array`:
# 1,000 uint64 from byte 4096 on.
CHILD = """
import ctypes, mmap, sys, types
for name, place in (("slipstream", sys.argv[1] + "/.."), ("slipstream.ops", sys.argv[1])):
    package = types.ModuleType(name)
    package.__path__ = [place]
    sys.modules[name] = package
from slipstream.ops import words
if sys.argv[2] == "fallback":
    bound = words._fallback()
    words._words = lambda: bound
mapping = mmap.mmap(int(sys.argv[3]), 1 << 16)
base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
array = (ctypes.c_uint64 * 1000).from_address(base + 4096)
exec(sys.argv[4])
"""

Start = Callable[[str, str], subprocess.Popen[bytes]]


@pytest.fixture
def shared() -> Iterator[int]:
    """A descriptor of 64 KiB of anonymous shared memory."""
    descriptor = os.memfd_create("slipstream-test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 1 << 16)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def base(shared: int) -> Iterator[int]:
    """The address of this process's mapping, which the ctypes view keeps alive."""
    view = ctypes.c_char.from_buffer(mmap.mmap(shared, 1 << 16))
    yield ctypes.addressof(view)
    del view


@pytest.fixture
def start(shared: int) -> Iterator[Start]:
    children: list[subprocess.Popen[bytes]] = []

    def start(kind: str, code: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", CHILD, str(OPS), kind, str(shared), code]
        children.append(subprocess.Popen(command, pass_fds=[shared]))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(request.param, monkeypatch)
    return str(request.param)


def use(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "fallback":
        bound = words._fallback()
        monkeypatch.setattr(words, "_words", lambda: bound)
    elif build.load().kernels is None:
        pytest.skip(f"no native words: {build.load().reason}")


@pytest.mark.parametrize("peer_kind", KINDS)
def test_what_was_written_before_a_store_is_seen_after_the_wait(start: Start, base: int, kind: str, peer_kind: str) -> None:
    """Two processes hand an array to and fro, each adding one; each generation is published by a word."""
    if peer_kind == "native" and build.load().kernels is None:
        pytest.skip(f"no native words: {build.load().reason}")
    rounds = 100 if kind == peer_kind else 10  # a store in Python wakes no futex: it is seen at the next look
    child = start(
        peer_kind,
        f"""
for i in range(1, {rounds} + 1):
    assert words.wait_at_least(base, i, 20, 20000)
    assert set(array) == {{2 * i - 1}}, i
    array[:] = [2 * i] * 1000
    words.store_release_and_wake(base + 64, i)
""",
    )
    array = (ctypes.c_uint64 * 1000).from_address(base + 4096)
    for i in range(1, rounds + 1):
        array[:] = [2 * i - 1] * 1000
        words.store_release_and_wake(base, i)
        assert words.wait_at_least(base + 64, i, 20, 20_000)
        assert set(array) == {2 * i}
    assert child.wait(20) == 0


def test_adds_of_two_processes_all_count(start: Start, base: int, kind: str) -> None:
    code = "for i in range(20000): words.add(base, 3)\n"
    go = "words.wait_at_least(base + 64, 1, 0, 20000)\n"
    children = [start(other, go + code) for other in (kind, "fallback")]
    words.store_release_and_wake(base + 64, 1)
    for _ in range(20_000):
        words.add(base, 0xFFFFFFFF)
    assert [child.wait(60) for child in children] == [0, 0]
    assert words.load_acquire(base) == 5 * 20_000


def test_an_add_wakes_and_returns_the_value_before(start: Start, base: int, kind: str) -> None:
    words.store_release_and_wake(base, 0xFFFFFFFF)
    child = start(kind, "import time; time.sleep(0.2); words.add(base, 2)")
    assert words.wait_at_least(base, 1, 0, 20_000)
    assert child.wait(20) == 0
    assert words.add(base, 4) == 1
    assert words.load_acquire(base) == 5


def test_a_sleeping_waiter_is_woken_and_burns_no_time(start: Start, base: int, kind: str) -> None:
    child = start(kind, "import time; time.sleep(0.5); words.store_release_and_wake(base, 1)")
    used = time.thread_time()  # other threads of this process may be at work
    assert words.wait_at_least(base, 1, 50, 20_000)
    used = time.thread_time() - used
    assert child.wait(20) == 0
    assert used < (0.05 if kind == "native" else 0.4)


def test_a_wait_ends_at_its_time(base: int, kind: str) -> None:
    for timeout in (0, 1, 120):
        begin = time.monotonic()
        assert not words.wait_at_least(base, 1, 10, timeout)
        assert time.monotonic() - begin >= timeout / 1000
    words.store_release_and_wake(base, 1)
    assert words.wait_at_least(base, 1, 0, 0)


def test_a_signal_interrupts_a_wait(base: int, kind: str) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        begin = time.monotonic()
        with pytest.raises(Interrupted):
            words.wait_at_least(base, 1, 0, 60_000)
        assert time.monotonic() - begin < 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@given(value=st.integers(0, 2**32 - 1), ahead=st.integers(-(2**31), 2**31 - 1))
def test_values_are_compared_by_signed_difference(value: int, ahead: int) -> None:
    word = ctypes.c_uint32((value + ahead) % 2**32)
    address = ctypes.addressof(word)
    for bound in {id(x): x for x in (words._words(), words._fallback())}.values():
        assert bound.load(address) == (value + ahead) % 2**32
        assert bool(bound.wait(address, value, 0, 0)) == (ahead >= 0)


@given(value=st.integers(0, 2**64 - 1))
def test_heartbeats_hold_64_bits(value: int) -> None:
    beat = ctypes.c_uint64(7)
    for bound in (words._words(), words._fallback()):
        bound.store64(ctypes.addressof(beat), value)
        assert bound.load64(ctypes.addressof(beat)) == beat.value == value
    words.store64(ctypes.addressof(beat), 5)
    assert words.load64(ctypes.addressof(beat)) == 5


def test_misaligned_addresses_are_refused(base: int) -> None:
    for call in (
        lambda: words.store_release_and_wake(base + 1, 0),
        lambda: words.load_acquire(base + 2),
        lambda: words.add(base + 3, 1),
        lambda: words.wait_at_least(base + 1, 0, 0, 0),
    ):
        with pytest.raises(ValueError, match="not a multiple of 4"):
            call()
    for call in (lambda: words.store64(base + 4, 0), lambda: words.load64(base + 4)):
        with pytest.raises(ValueError, match="not a multiple of 8"):
            call()
