"""Targets of the benchmarks' workers, in a module that imports nothing: a process of them starts in 0.1 s."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.worker import Channel


def echo(channel: Channel, word: str = "") -> None:
    def leave() -> None:
        print("some last words", file=sys.stderr, flush=True)
        os._exit(7)

    def wrong() -> None:
        raise ValueError("a handler's reason")

    print("libraries print", flush=True)  # goes to the log
    handlers: dict[str, Callable[..., Any]] = {
        "say": lambda times=1: word * times,
        "rank": lambda: [os.environ["RANK"], os.environ["WORLD_SIZE"], len(os.sched_getaffinity(0))],
        "wait": lambda: time.sleep(60),
        "leave": leave,
        "wrong": wrong,
    }
    channel.serve(handlers)


def broken(channel: Channel) -> None:
    raise KeyError("not set up")
