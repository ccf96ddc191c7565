"""Which failure is the first, what an exit code means, and records that travel in a stream."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.launch.failure import (
    LONGEST,
    MARK,
    Extract,
    Failure,
    encode,
    explain,
    first,
    is_consequence,
    render,
    shell_code,
    shorten,
)
from slipstream.world.host import Pressure

CALM = Pressure(cgroup_kills=3, host_kills=5, limit=8 << 30, shm=(64 << 20, 63 << 20, 1 << 20))
BLIND = Pressure(cgroup_kills=None, host_kills=None, limit=None, shm=None)


def failed(rank: int, time_ns: int, **fields: object) -> Failure:
    return Failure(**({"rank": rank, "host": "h", "time_ns": time_ns, "exit_code": 1} | fields))  # type: ignore[arg-type]


def test_the_earliest_is_first() -> None:
    assert first([failed(0, 20), failed(1, 10), failed(2, 30)]).rank == 1


def test_consequences_and_those_we_stopped_are_not_first() -> None:
    gone = failed(0, 5, message="RuntimeError: Connection closed by peer", consequence=True)
    stopped = failed(2, 1, exit_code=-15, stopped=True)
    assert first([gone, stopped, failed(1, 10, exit_code=-9)]).rank == 1
    assert first([gone, stopped]) is gone


def test_consequences_are_known() -> None:
    assert is_consequence("RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:3277")
    assert is_consequence("slipstream.world.watch.PeerLostError: rank 1 has ended")
    assert is_consequence("torch.distributed.DistNetworkError: failed to recv, got 0 bytes")
    assert is_consequence("torch.distributed.DistBackendError: NCCL error in: x.cpp:3\nremote process exited")
    assert not is_consequence("ValueError: bad shape")


def test_a_users_own_broken_connections_are_causes() -> None:
    for message in (
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
        "RuntimeError: download of shard 3: socket closed",
    ):
        assert not is_consequence(message)


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (replace(CALM, cgroup_kills=4), r"killed by the kernel's out-of-memory killer: .*\(limit 8.0 GiB\)"),
        (replace(CALM, host_kills=6), "out-of-memory killer ran on this host"),
        (CALM, "not by the out-of-memory killer; possible causes: the scheduler, a time limit, another user$"),
    ],
)
def test_sigkill(after: Pressure, says: str) -> None:
    for code in (-9, 137):
        assert re.search(says, explain(code, CALM, after))


def test_sigkill_without_counters() -> None:
    assert "possible causes: the out-of-memory killer, whose counters are not readable here" in explain(-9, BLIND, BLIND)


def test_other_signals() -> None:
    assert "/dev/shm has 1 MiB of 64 MiB free" in explain(-7, CALM, CALM)
    assert "segmentation fault" in explain(-11, CALM, CALM)
    assert "newer processor" in explain(-signal.SIGILL, CALM, CALM)
    assert "not by slipstream" in explain(-15, CALM, CALM)
    assert explain(-40, CALM, CALM) == "killed by signal 40"
    assert explain(1, CALM, CALM) == ""


def test_shell_codes() -> None:
    assert [shell_code(code) for code in (0, 3, -9, -11)] == [0, 3, 137, 139]


def test_summary() -> None:
    raised = failed(1, 10, message="ValueError: bad", traceback="Traceback ...\nValueError: bad\n")
    text = render([failed(0, 20, message="RuntimeError: x", traceback="Traceback of rank 0"), raised, failed(2, 30)])
    assert text == (
        "slipstream run: rank 1 on host h failed first (exit code 1)\n\n"
        "Traceback ...\nValueError: bad\n\n"
        "slipstream run: failed afterwards: ranks 0, 2\n"
    )


def test_summary_of_a_signal() -> None:
    text = render([failed(3, 1, exit_code=-11, message="segmentation fault", stack="File x, line 3")])
    assert text.startswith("slipstream run: rank 3 on host h failed first (exit code -11, SIGSEGV)\n  segmentation fault\n")
    assert "File x, line 3" in text


def test_summary_of_a_consequence_points_elsewhere() -> None:
    assert "or its node's output has the reason" in render([failed(0, 1, message="x", consequence=True)])


def test_long_tracebacks_lose_their_middle() -> None:
    text = shorten("a" * LONGEST + "b" * LONGEST)
    assert len(text) < LONGEST + 100
    assert text.startswith("aaa")
    assert text.endswith("bbb")


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[start:stop] for start, stop in pairwise(places)]


@given(st.lists(st.integers(0, 400)), st.text(max_size=30), st.text(max_size=30))
def test_records_are_taken_out_of_a_stream_however_it_is_cut(cuts: list[int], before: str, after: str) -> None:
    failure = failed(1, 10, message="ValueError: \x1e odd\n", traceback="line\nline")
    before, after = before.replace("\x1e", ""), after.replace("\x1e", "")
    data = before.encode() + encode(failure).encode() + after.encode()
    extract = Extract()
    passed = b"".join(extract.feed(piece) for piece in pieces(data, cuts)) + extract.flush()
    assert passed == before.encode() + after.encode()
    assert extract.failures == [failure]


def test_what_only_looks_like_a_record_is_passed_on() -> None:
    extract = Extract()
    for text in (b"50%\r", b"\x1e other\n", MARK.encode() + b"no json\n", b"\x1eslip"):
        assert extract.feed(text) + extract.flush() == text
    assert extract.failures == []
