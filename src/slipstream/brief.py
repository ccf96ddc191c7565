"""Errors whose message suffices: an uncaught one is printed with the script's own line, without the frames of libraries.

The environment variable SLIPSTREAM_TRACEBACK=1 adds the full traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from traceback import FrameSummary

SWITCH = "SLIPSTREAM_TRACEBACK"


class BriefError(RuntimeError):
    """An error that is printed briefly if it is uncaught. The first instance in a process installs a `sys.excepthook`."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        _install()


def describe(error: BaseException) -> str:
    """Format an error: its message and the script's line, or the message and the full traceback if the environment asks for it."""
    message = "".join(traceback.format_exception_only(error))
    return tell(message, traceback.extract_tb(error.__traceback__), "".join(traceback.format_exception(error)))


def tell(message: str, frames: Sequence[FrameSummary], full: str) -> str:
    """`message` and the innermost of `frames` outside torch and Slipstream; `message` and `full` if the environment asks for it."""
    if os.environ.get(SWITCH, "0") not in ("", "0"):
        return f"{message}{full}"
    own = [frame for frame in frames if not frame.filename.startswith(_libraries())] or list(frames[:1])
    lines = [FrameSummary(frame.filename, frame.lineno, frame.name, line=frame.line) for frame in own[-1:]]
    return f"{message}{''.join(traceback.format_list(lines))}{SWITCH}=1 shows the whole traceback\n"


def _libraries() -> tuple[str, ...]:
    modules = (sys.modules.get(name) for name in ("slipstream", "torch"))
    return tuple(os.path.join(os.path.dirname(file), "") for module in modules if (file := getattr(module, "__file__", None)))


def _install() -> None:
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
        if isinstance(error, BriefError):
            sys.stderr.write(describe(error))
            sys.stderr.flush()
        else:
            before(kind, error, trace)  # type: ignore[arg-type]

    sys.excepthook = hook
