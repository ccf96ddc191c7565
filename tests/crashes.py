"""Kill a process while it saves: `python crashes.py FOLDER SEED "at once"|behind|pretrained KILLS`.

Kills KILLS times at random, then before each system call of a save in turn. After each kill the previous or the new checkpoint must
load (pretrained: the Hugging Face folder, which each save overwrites).
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slipstream.checkpoint import Staging, latest_tag, load, pretrained, save, save_async
from slipstream.checkpoint.directory import committed_tags
from slipstream.checkpoint.weights import INDEX, SINGLE

NUMEL = 300_000
POINTS = ("rename", "replace", "fsync", "mkdir", "open", "unlink", "pwrite")
STAGING = Staging(pinned=False)


def step(directory: Path, way: str, n: int) -> None:
    """Save number `n`: to the same tag, every fifth time to a new one; folders alternate every three saves: one file or several."""
    if way == "pretrained":
        # Every other save has a new config.json, like another architecture: it must change atomically with the weights
        outs = {name: pretrained.Out(torch.full((NUMEL // 3,), float(n)), torch.float32) for name in "abc"}
        limit = NUMEL if n // 3 % 2 else 100 * NUMEL
        pretrained.write(directory / "hf", outs, texts={"config.json": json.dumps({"n": n // 2})}, shard_nbytes=limit)
        return
    tag = f"step{n}" if n % 5 == 0 else "same"
    tensors = {"w": torch.full((NUMEL,), float(n))}
    if way == "behind":
        save_async(directory, tag, STAGING, tensors=tensors, shared={"n": n}, per_rank={}, keep=8).result()
    else:
        save(directory, tag, tensors=tensors, shared={"n": n}, per_rank={}, keep=8)


def check(directory: Path, way: str) -> int:
    """Check that every checkpoint is complete; return the value in the latest one."""
    if way == "pretrained":
        return check_folder(directory / "hf")
    latest = latest_tag(directory)
    assert latest is not None
    held = {}
    for tag in {latest, *committed_tags(directory)}:
        w = torch.zeros(NUMEL)
        held[tag] = load(directory, tag, tensors={"w": w}).shared["n"]
        assert bool((w == held[tag]).all()), tag
    return int(held[latest])


def check_folder(folder: Path) -> int:
    """Check that the folder is complete for readers that prefer the single file, as transformers does, and that prefer an index."""
    config = json.loads((folder / "config.json").read_text())
    assert (folder / "notes.txt").read_text() == "kept"
    ways = [[SINGLE]] if (folder / SINGLE).exists() else []
    if (folder / INDEX).exists():
        ways.append(sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values())))
    seen = []
    for files in ways:
        values = torch.cat([value for file in files for value in load_file(folder / file).values()])
        assert values.numel() == NUMEL and bool((values == values[0]).all()), files
        seen.append(int(values[0]))
    assert config["n"] == seen[0] // 2, (config, seen)
    return seen[0]


def child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def end_before(call: int) -> None:
    """Make this process exit before the `call`-th system call of a save."""
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
    pretrained.exchange = counted(pretrained.exchange)


def main() -> None:
    torch.set_num_threads(1)
    directory, rng, way, kills = Path(sys.argv[1]), random.Random(int(sys.argv[2])), sys.argv[3], int(sys.argv[4])
    step(directory, way, 0)
    if way == "pretrained":
        (directory / "hf" / "notes.txt").write_text("kept")
    done = check(directory, way)

    def forever() -> None:
        n = done
        while True:
            n += 1
            step(directory, way, n)

    for _ in range(kills):
        pid = child(forever)
        time.sleep(rng.random() * 0.15)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        now = check(directory, way)
        assert now >= done, (now, done)
        done = now

    killed = 0
    for _ in range(2 if way == "pretrained" else 1):  # with another config.json, and with the same
        call = 0
        while True:

            def counted(n: int = done + 1, calls: int = call) -> None:
                end_before(calls)
                step(directory, way, n)

            _, status = os.waitpid(child(counted), 0)
            now = check(directory, way)
            assert now in (done, done + 1), (now, done)
            if now > done and os.waitstatus_to_exitcode(status) != 0:
                step(directory, way, done)  # again, from the same number
                now = check(directory, way)
            done = now
            if os.waitstatus_to_exitcode(status) == 0:
                break
            call += 1
        killed += call

    step(directory, way, done + 1)
    left = [str(path) for path in directory.rglob("*")]
    assert not [name for name in left if ".tmp-" in name or ".old-" in name], left
    print("points", killed)


if __name__ == "__main__":
    main()
