"""Failure records of ranks, and the summary of a failed run. Pure functions.

There is one record per failed rank; the summary explains the first failure. `worker` writes a record for an exception, with its
traceback; `agent` makes one for a signal or an exit code. Between hosts a record is sent as one marked line of JSON on stderr,
which `Extract` removes from the stream.

Invariant: a rank that we stopped, or that failed because a peer was gone, is never reported as the first failure if another record
explains it.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from slipstream.world.host import Pressure

MARK = "\x1eslipstream-failure "
LONGEST = 16_000  # characters of a traceback or message; a longer one is cut in the middle

# torch's messages when the peer of one of its own connections is gone. That is a consequence, never the cause. A message must
# contain one of these phrases after a C++ source location (gloo) or after the type of torch's error (NCCL, the store). A user's
# connection, to a download or database, fails with the same phrases, but without those prefixes.
_PHRASES = "|".join(
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
    r"slipstream\.world\.watch\.PeerLostError"
    r"|torch\.distributed\.DistNetworkError"
    rf"|(torch\.distributed\.Dist\w*Error: |\w\.(cc|cpp|hpp):\d+\] ).*({_PHRASES})",
    re.DOTALL,
)


_EXPLANATIONS: dict[int, str] = {
    signal.SIGSEGV: "segmentation fault (SIGSEGV): native code accessed invalid memory",
    signal.SIGABRT: "aborted (SIGABRT) by native code; its message is above",
    signal.SIGILL: "illegal instruction (SIGILL); possible cause: a library built for a newer processor than this host's",
    signal.SIGFPE: "arithmetic exception (SIGFPE) in native code; possible cause: an integer division by zero",
    signal.SIGTERM: "terminated (SIGTERM), not by slipstream; possible causes: the scheduler, a time limit, another user",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    rank: int
    host: str
    time_ns: int  # of the exception or the death
    exit_code: int  # negative: the signal that killed it
    message: str = ""  # one line, "ValueError: ..."; empty if the rank left no record
    traceback: str = ""
    stack: str = ""  # Python's stack at a fatal signal, from faulthandler
    consequence: bool = False  # it failed because a peer was gone
    stopped: bool = False  # we stopped it, because another rank had failed


def is_consequence(message: str) -> bool:
    """Whether an exception's message only reports that a peer is gone."""
    return _PEER_GONE.search(message) is not None


def first(failures: Sequence[Failure]) -> Failure:
    """The root failure: the earliest one that is neither our stop nor a consequence, if there is one."""
    return min(failures, key=lambda failure: (failure.stopped, failure.consequence, failure.time_ns, failure.rank))


def shorten(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n  ... {len(text) - 2 * half} characters omitted ...\n{text[-half:]}"


def encode(failure: Failure) -> str:
    return MARK + json.dumps(asdict(failure)) + "\n"


def decode(text: str) -> Failure | None:
    """Parse the payload of a marked line; None if it is no record (the line is then the user's output)."""
    try:
        return Failure(**json.loads(text))
    except (ValueError, TypeError):
        return None


class Extract:
    """Removes marked lines from a byte stream. Unmarked bytes pass immediately, so that progress bars keep updating."""

    __slots__ = ("_pending", "failures")

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self._pending = b""  # a possible record: it starts with the mark's first byte, and its newline has not arrived

    def feed(self, data: bytes) -> bytes:
        """Add `data`; return the bytes to pass on."""
        first, mark = MARK[:1].encode(), MARK[1:].encode()
        passed, *parts = (self._pending + data).split(first)
        self._pending = b""
        for i, part in enumerate(parts, start=1):
            line, newline, after = part.partition(b"\n")
            is_record = newline and line.startswith(mark)
            if is_record and (failure := decode(line.removeprefix(mark).decode(errors="replace"))) is not None:
                self.failures.append(failure)
                passed += after
            elif i == len(parts) and not newline and (mark.startswith(line) or line.startswith(mark)):
                self._pending = first + line
            else:
                passed += first + part
        return passed

    def flush(self) -> bytes:
        """At the end of the stream, return the bytes that were held back."""
        pending, self._pending = self._pending, b""
        return pending


def shell_code(exit_code: int) -> int:
    """The exit code as a shell reports it: 128 + N for signal N."""
    return 128 - exit_code if exit_code < 0 else exit_code


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def _explain_kill(before: Pressure, after: Pressure) -> str:
    limit = f" (limit {_gib(after.limit)})" if after.limit else ""
    if (after.cgroup_kills or 0) > (before.cgroup_kills or 0):
        return (
            f"killed by the kernel's out-of-memory killer: this container or control group{limit} ran out of host memory; "
            "use fewer ranks per host, a smaller micro-batch or a higher ZeRO stage, or raise the limit"
        )
    if (after.host_kills or 0) > (before.host_kills or 0):
        return (
            "killed (SIGKILL); the kernel's out-of-memory killer ran on this host during the run: if the host ran out of memory, "
            "use fewer ranks per host, a smaller micro-batch or a higher ZeRO stage"
        )
    if before.cgroup_kills is None and before.host_kills is None:
        return (
            "killed (SIGKILL); possible causes: the out-of-memory killer, whose counters are not readable here (see `dmesg` on its "
            "host), the scheduler, a time limit, another user"
        )
    return "killed (SIGKILL), not by the out-of-memory killer; possible causes: the scheduler, a time limit, another user"


def _explain_bus(after: Pressure) -> str:
    shm = f" (/dev/shm has {_gib(after.shm[2])} of {_gib(after.shm[0])} free)" if after.shm else ""
    return (
        f"bus error (SIGBUS): a page of a shared or file mapping could not be allocated{shm}; possible causes: data loader "
        "workers filled /dev/shm (raise the container's --shm-size or lower num_workers), a mapped file was truncated"
    )


def explain(exit_code: int, before: Pressure, after: Pressure) -> str:
    """Explain an exit code on this host in one sentence; empty for codes that are not signals.

    Codes above 128 are signals as reported by a shell or wrapper.
    """
    number = -exit_code if exit_code < 0 else exit_code - 128 if 128 < exit_code < 128 + 65 else 0
    match number:
        case 0:
            return ""
        case signal.SIGKILL:
            return _explain_kill(before, after)
        case signal.SIGBUS:
            return _explain_bus(after)
        case _:
            return _EXPLANATIONS.get(number, f"killed by signal {number}")


def with_reason(failure: Failure, before: Pressure, after: Pressure) -> Failure:
    """Explain the exit code of a failure without a message."""
    if failure.message:
        return failure
    return replace(failure, message=explain(failure.exit_code, before, after))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def summary_of(failure: Failure) -> str:
    """One failure in half a line: the rank, and its message or exit code."""
    if failure.message:
        return f"rank {failure.rank}: {failure.message.splitlines()[0]}"
    if failure.exit_code >= 0:
        return f"rank {failure.rank} exited with code {failure.exit_code} and no message"
    return f"rank {failure.rank} was killed by {_signal_name(-failure.exit_code)}"


def render(failures: Sequence[Failure]) -> str:
    """The summary at the end of a failed run: the first failure, and the ranks that failed after it."""
    shown = first(failures)
    name = f", {_signal_name(-shown.exit_code)}" if shown.exit_code < 0 else ""
    lines = [f"slipstream run: rank {shown.rank} on host {shown.host} failed first (exit code {shown.exit_code}{name})"]
    if shown.traceback:
        lines += ["", shown.traceback.rstrip("\n"), ""]
    elif shown.message:
        lines.append(f"  {shown.message}")
    if shown.stack:
        lines += ["", shown.stack.rstrip("\n"), ""]
    if shown.consequence:
        lines.append("  A peer is gone and left no record here: its script ended early, or its node's output has the reason.")
    others = sorted(failure.rank for failure in failures if failure is not shown and not failure.stopped)
    if others:
        lines.append(f"slipstream run: failed afterwards: rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}")
    return "\n".join(lines) + "\n"
