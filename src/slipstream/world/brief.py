"""Errors whose message is enough: an uncaught one is printed with the script's own line, without library frames.

An interruption (Ctrl-C) is one line that names the last complete checkpoint. The environment variable SLIPSTREAM_TRACEBACK=1 adds
the full traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from traceback import FrameSummary

SWITCH = "SLIPSTREAM_TRACEBACK"
RECORDS = "SLIPSTREAM_FAILURES"  # the directory in which the ranks of one agent write their records
MEMORY = "SLIPSTREAM_MEMORY"  # a directory in the memory of this host, which its agent keeps while ranks are restarted
AGAIN = 85  # the exit code (ERESTART) of a rank that has saved a checkpoint on a signal, to be started again
_SAVES = "saves"  # a file in the directory RECORDS: the folders of the first rank's saves

_saves: list[str] = []  # the folders of this process's saves


class BriefError(Exception):
    """An error that is printed briefly if it is uncaught. The first instance in a process installs a `sys.excepthook`."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        install_hook()


def describe(error: BaseException) -> str:
    """Format an error: its message and the script's line, or the message and the full traceback if the environment asks for it."""
    message = "".join(traceback.format_exception_only(error))
    return tell(message, traceback.extract_tb(error.__traceback__), "".join(traceback.format_exception(error)))


def tell(message: str, frames: Sequence[FrameSummary], full: str) -> str:
    """`message` and the innermost of `frames` outside torch, Slipstream and the standard library; `message` and `full` if the
    environment asks for it."""
    if os.environ.get(SWITCH, "0") not in ("", "0"):
        return f"{message}{full}"
    own = [frame for frame in frames if not _is_library(frame.filename)] or list(frames[:1])
    lines = [FrameSummary(frame.filename, frame.lineno, frame.name, line=frame.line) for frame in own[-1:]]
    return f"{message}{''.join(traceback.format_list(lines))}{SWITCH}=1 shows the whole traceback\n"


def note_save(folder: str) -> None:
    """Record, on the first rank, the folder of a checkpoint whose save begins. Saves are atomic: an existing folder is complete."""
    _saves.append(os.path.abspath(folder))
    if records := os.environ.get(RECORDS):
        with suppress(OSError), open(os.path.join(records, _SAVES), "a") as file:
            file.write(f"{_saves[-1]}\n")


def last_checkpoint(records: str | None = None) -> str:
    """A sentence about the last complete checkpoint of this process, or of the ranks whose agent has the directory `records`."""
    folders = _saves
    if records is not None:
        try:
            with open(os.path.join(records, _SAVES)) as file:
                folders = file.read().splitlines()
        except FileNotFoundError:
            folders = []
    complete = next((folder for folder in reversed(folders) if os.path.isdir(folder)), None)
    if complete is None:
        return "no checkpoint was saved"
    return f"the last complete checkpoint is {os.path.basename(complete)!r} in {os.path.dirname(complete)}"


def _is_library(filename: str) -> bool:
    def holds(name: str) -> bool:
        file = getattr(sys.modules.get(name), "__file__", None)
        return file is not None and filename.startswith(os.path.join(os.path.dirname(file), ""))

    is_standard = holds("os") and "site-packages" not in filename  # which its folder may contain
    return holds("slipstream") or holds("torch") or is_standard


def install_hook() -> None:
    """Install the `sys.excepthook` that prints a `BriefError` and an interruption briefly. Later calls do nothing."""
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
        if isinstance(error, BriefError):
            sys.stderr.write(describe(error))
            sys.stderr.flush()
        elif isinstance(error, KeyboardInterrupt) and os.environ.get(SWITCH, "0") in ("", "0"):
            if os.environ.get("RANK", "0") == "0":
                sys.stderr.write(f"slipstream: interrupted; {last_checkpoint()}\n")
                sys.stderr.flush()
        else:
            before(kind, error, trace)  # type: ignore[arg-type]

    sys.excepthook = hook
