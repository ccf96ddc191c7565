"""Errors whose words say it all: a script that ends by one shows these and its own line, not the frames of libraries below it.

SLIPSTREAM_TRACEBACK=1 in the environment asks for the frames, too.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from traceback import FrameSummary

SWITCH = "SLIPSTREAM_TRACEBACK"


class BriefError(RuntimeError):
    """An error that is printed briefly where nothing catches it. The first one made in a process sets `sys.excepthook` for that."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        _install()


def describe(error: BaseException) -> str:
    """What is printed of an error: its words, where the script was and, where asked for, the traceback, which repeats the words."""
    words = "".join(traceback.format_exception_only(error))
    return tell(words, traceback.extract_tb(error.__traceback__), "".join(traceback.format_exception(error)))


def tell(words: str, frames: Sequence[FrameSummary], whole: str) -> str:
    """`words`, and the innermost of `frames` that is neither torch's nor ours; or `whole`, where the environment asks for it."""
    if os.environ.get(SWITCH, "0") not in ("", "0"):
        return f"{words}{whole}"
    own = [frame for frame in frames if not frame.filename.startswith(_libraries())] or list(frames[:1])
    lines = [FrameSummary(frame.filename, frame.lineno, frame.name, line=frame.line) for frame in own[-1:]]
    return f"{words}{''.join(traceback.format_list(lines))}{SWITCH}=1 shows the whole traceback\n"


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
