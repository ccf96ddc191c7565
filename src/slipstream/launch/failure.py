"""How a rank ended, and how the user is told: one record per failed rank, the first chosen, explained and
printed once.

Everything here is pure. A record is written by `worker` (an exception, with its traceback) or made by `agent`
(a signal, an exit code), and travels between hosts as one marked line of JSON on stderr, which `Extract`
takes out of the stream again.

Invariant: a rank that was stopped by us, or that failed because a peer had gone, is never named as the first
while another record explains it.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from slipstream.observe.host import Pressure

__all__ = ["Extract", "Failure", "decode", "encode", "explain", "first", "in_brief", "is_consequence", "render", "shell_code"]

MARK = "\x1eslipstream-failure "
LONGEST = 16_000  # characters of a traceback or message; what is cut is its middle

# What torch says when the other end of one of its own connections has gone, which is never the cause: a sign after the place
# in its C++ source (gloo) or after the type of its error (NCCL, the store). A connection of the user's, to a download or a
# database, breaks with the same words and without those.
_SIGNS = "|".join(
    (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "remote process exited",
        "socket closed",
        "failed to recv, got 0 bytes",
        "Connection was likely closed",
        "store may have been destroyed",
    )
)
_PEER_GONE = re.compile(
    r"slipstream\.zero\.watch\.PeerLostError"
    r"|torch\.distributed\.DistNetworkError"
    rf"|(torch\.distributed\.Dist\w*Error: |\w\.(cc|cpp|hpp):\d+\] ).*({_SIGNS})",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One rank that did not end well."""

    rank: int
    host: str
    time_ns: int  # when it raised or died
    exit_code: int  # negative: the signal that ended it
    message: str = ""  # one line, "ValueError: ..."; empty if it left no word
    traceback: str = ""
    stack: str = ""  # Python's stack at a fatal signal, from faulthandler
    consequence: bool = False  # it failed because a peer had gone
    stopped: bool = False  # we ended it, because another had failed


def is_consequence(message: str) -> bool:
    """Whether an exception only says that a peer has gone."""
    return _PEER_GONE.search(message) is not None


def first(failures: Sequence[Failure]) -> Failure:
    """The failure to show: the earliest that is neither our doing nor a consequence."""
    return min(failures, key=lambda failure: (failure.stopped, failure.consequence, failure.time_ns, failure.rank))


def shorten(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n  ... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def encode(failure: Failure) -> str:
    return MARK + json.dumps(asdict(failure)) + "\n"


def decode(text: str) -> Failure | None:
    """The record in a marked line's payload; None if it is not one (the line is then the user's)."""
    try:
        return Failure(**json.loads(text))
    except (ValueError, TypeError):
        return None


class Extract:
    """Takes marked lines out of a byte stream. What is not marked passes at once, so progress bars stay
    alive."""

    __slots__ = ("_held", "failures")

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self._held = b""  # begins with the mark's first byte, has no newline yet

    def feed(self, data: bytes) -> bytes:
        """Bytes to pass on."""
        mark = MARK.encode()
        data, self._held = self._held + data, b""
        passed = b""
        while True:
            start = data.find(mark[:1])
            if start < 0:
                return passed + data
            passed, data = passed + data[:start], data[start:]
            if not mark.startswith(data[: len(mark)]):
                passed, data = passed + data[:1], data[1:]
                continue
            end = data.find(b"\n")
            if end < 0:
                self._held = data
                return passed
            failure = decode(data[len(mark) : end].decode(errors="replace"))
            if failure is None:
                passed += data[: end + 1]
            else:
                self.failures.append(failure)
            data = data[end + 1 :]

    def rest(self) -> bytes:
        """What was held back when the stream ended."""
        held, self._held = self._held, b""
        return held


def shell_code(exit_code: int) -> int:
    """A process's exit status as a shell reports it: 128 + N for signal N."""
    return 128 - exit_code if exit_code < 0 else exit_code


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def _explain_kill(before: Pressure, after: Pressure) -> str:
    limit = f" (limit {_gib(after.limit)})" if after.limit else ""
    if (after.cgroup_kills or 0) > (before.cgroup_kills or 0):
        return (
            f"the kernel's out-of-memory killer ended it: this container or control group{limit} ran out of host memory; "
            "use fewer ranks per host, a smaller micro-batch or a higher ZeRO stage, or raise the limit"
        )
    if (after.host_kills or 0) > (before.host_kills or 0):
        return (
            "the kernel's out-of-memory killer ran on this host during the run: the host ran out of memory; "
            "use fewer ranks per host, a smaller micro-batch or a higher ZeRO stage"
        )
    if before.cgroup_kills is None and before.host_kills is None:
        return (
            "killed (SIGKILL), most often by the out-of-memory killer, whose counters cannot be read here; ask `dmesg` on that host"
        )
    return "killed (SIGKILL), but the out-of-memory killer did not run here: the scheduler, another user or a time limit ended it"


def _explain_bus(after: Pressure) -> str:
    shm = f" (/dev/shm has {_gib(after.shm.free)} of {_gib(after.shm.total)} free)" if after.shm else ""
    return (
        f"bus error (SIGBUS): memory behind a shared or file mapping could not be had{shm}; data loader workers fill "
        "/dev/shm (raise the container's --shm-size or lower num_workers), or a mapped file was cut short"
    )


def explain(exit_code: int, before: Pressure, after: Pressure) -> str:
    """What an exit code means on this host, in one sentence; empty where it says nothing beyond itself.

    Codes above 128 are what a shell or wrapper reports for a signal, and mean the same.
    """
    number = -exit_code if exit_code < 0 else exit_code - 128 if 128 < exit_code < 128 + 65 else 0
    match number:
        case signal.SIGKILL:
            return _explain_kill(before, after)
        case signal.SIGBUS:
            return _explain_bus(after)
        case signal.SIGSEGV:
            return "segmentation fault (SIGSEGV): native code read or wrote memory that is not its own"
        case signal.SIGABRT:
            return "aborted (SIGABRT): native code gave up; its message is above"
        case signal.SIGILL:
            return "illegal instruction (SIGILL): a library was built for a newer processor than this host's"
        case signal.SIGFPE:
            return "arithmetic fault (SIGFPE) in native code, most often an integer division by zero"
        case signal.SIGTERM:
            return "told to stop (SIGTERM), not by slipstream: by the scheduler or another user"
        case 0:
            return ""
        case _:
            return f"ended by signal {number}"


def with_reason(failure: Failure, before: Pressure, after: Pressure) -> Failure:
    """The failure with its exit code explained where it left no word of its own."""
    if failure.message:
        return failure
    return replace(failure, message=explain(failure.exit_code, before, after))


def _outcome(failure: Failure) -> str:
    code = failure.exit_code
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"exit code {code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"exit code {code}"


def in_brief(failure: Failure) -> str:
    """One failure in half a line: the rank, and its message or its end."""
    if failure.message:
        return f"rank {failure.rank}: {failure.message.splitlines()[0]}"
    if failure.exit_code >= 0:
        return f"rank {failure.rank} left with exit code {failure.exit_code} and no message"
    try:
        name = signal.Signals(-failure.exit_code).name
    except ValueError:
        name = f"signal {-failure.exit_code}"
    return f"rank {failure.rank} was ended by {name}"


def render(failures: Sequence[Failure]) -> str:
    """The summary that ends a failed run: the first failure, and a line on the others."""
    shown = first(failures)
    lines = [f"slipstream run: rank {shown.rank} on {shown.host} failed first ({_outcome(shown)})"]
    if shown.traceback:
        lines += ["", shown.traceback.rstrip("\n"), ""]
    elif shown.message:
        lines.append(f"  {shown.message}")
    if shown.stack:
        lines += ["", shown.stack.rstrip("\n"), ""]
    if shown.consequence:
        lines.append("  A peer of it had gone without a record here: it ended its script, or its node's output says why.")
    others = sorted(failure.rank for failure in failures if failure is not shown and not failure.stopped)
    if others:
        lines.append(f"slipstream run: after it failed rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}")
    return "\n".join(lines) + "\n"
