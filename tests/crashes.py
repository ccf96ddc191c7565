"""Saves that are killed: `python crashes.py FOLDER SEED "at once"|behind KILLS`.

After each, the checkpoint before or the new one loads. Killed KILLS times at a random instant, then before each system call that
makes a save, in turn.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint import Staging, latest_tag, load, save, save_behind
from slipstream.checkpoint.directory import committed_tags

NUMEL = 300_000
POINTS = ("rename", "replace", "fsync", "mkdir", "open")
STAGING = Staging(pinned=False)


def step(directory: Path, behind: bool, n: int) -> None:
    """The same tag again and again, and now and then a new one."""
    tag = f"step{n}" if n % 5 == 0 else "same"
    tensors = {"w": torch.full((NUMEL,), float(n))}
    if behind:
        save_behind(directory, tag, STAGING, tensors=tensors, shared={"n": n}, per_rank={}, keep=8).result()
    else:
        save(directory, tag, tensors=tensors, shared={"n": n}, per_rank={}, keep=8)


def check(directory: Path) -> int:
    """Every checkpoint that is there is whole; what the latest one holds."""
    latest = latest_tag(directory)
    assert latest is not None
    held = {}
    for tag in {latest, *committed_tags(directory)}:
        w = torch.zeros(NUMEL)
        held[tag] = load(directory, tag, tensors={"w": w}).shared["n"]
        assert bool((w == held[tag]).all()), tag
    return int(held[latest])


def child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def end_before(call: int) -> None:
    """This process ends before its `call`-th system call of those that make a save."""
    left = [call]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os._exit(9)
            left[0] -= 1
            return real(*args, **kwargs)

        return instead

    for name in POINTS:
        setattr(os, name, counted(getattr(os, name)))


def main() -> None:
    torch.set_num_threads(1)
    directory, rng, behind, kills = Path(sys.argv[1]), random.Random(int(sys.argv[2])), sys.argv[3] == "behind", int(sys.argv[4])
    step(directory, behind, 0)
    done = check(directory)

    def forever() -> None:
        n = done
        while True:
            n += 1
            step(directory, behind, n)

    for _ in range(kills):
        pid = child(forever)
        time.sleep(rng.random() * 0.15)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        now = check(directory)
        assert now >= done, (now, done)
        done = now

    killed = 0
    while True:

        def counted(n: int = done + 1, calls: int = killed) -> None:
            end_before(calls)
            step(directory, behind, n)

        _, status = os.waitpid(child(counted), 0)
        now = check(directory)
        assert now in (done, done + 1), (now, done)
        done = now
        if os.waitstatus_to_exitcode(status) == 0:
            break
        killed += 1

    step(directory, behind, done + 1)
    left = os.listdir(directory)
    assert not [name for name in left if ".tmp-" in name or ".old-" in name], left
    print("points", killed)


if __name__ == "__main__":
    main()
