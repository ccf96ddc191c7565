"""Notebooks: run a function of a cell on several ranks of this host (pip install cloudpickle).

    from slipstream.integrations.notebook import launch

    def train(steps):
        engine, *_ = slipstream.initialize(model=model, config=config)
        ...
        return losses

    losses, *_ = launch(train, 100, nproc=2)

`slipstream run` starts the ranks as new processes, so a kernel may have used a GPU or torch's threads before. The functions,
classes and values in the notebook that the function refers to are sent with it.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

try:
    import cloudpickle
except ImportError as error:
    raise ImportError(f"slipstream.integrations.notebook needs cloudpickle ({error}): pip install cloudpickle") from error

__all__ = ["RanksFailedError", "launch"]

T = TypeVar("T")
# Variables by which `slipstream run` would find other hosts or a rank: those of the kernel's own job
PLACES = ("SLURM_", "SM_", "OMPI_", "PMI", "PET_", "SKYPILOT_", "AZ_BATCH", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "NODE_RANK")
STOP = 35.0  # seconds for ranks to end after an interrupt; `slipstream run` gives them 30


class RanksFailedError(RuntimeError):
    """A rank of `launch` has failed; the message has its traceback."""


def launch(function: Callable[..., T], *args: Any, nproc: int | None = None, max_restarts: int = 0, **kwargs: Any) -> list[T]:
    """Call `function(*args, **kwargs)` on `nproc` ranks and return its results, by rank.

    nproc         default: one rank for each GPU, or 2 without a GPU
    max_restarts  how often all ranks are restarted after one fails

    The ranks' output appears in the cell. Raises ValueError for fewer than one rank, TypeError for what cannot be pickled,
    RanksFailedError if a rank fails. An interrupt of the cell ends the ranks.
    """
    import torch

    ranks = (torch.cuda.device_count() or 2) if nproc is None else nproc
    if ranks < 1:
        raise ValueError(f"nproc ({nproc}) must be at least 1: each process is a rank")
    with tempfile.TemporaryDirectory(prefix="slipstream-notebook-") as folder:
        try:
            Path(folder, "call").write_bytes(cloudpickle.dumps((function, args, kwargs)))
        except Exception as error:
            raise TypeError(
                f"{getattr(function, '__name__', function)!r} cannot be sent to other processes: {error}. Open files, locks and "
                "engines are made inside the function"
            ) from error
        options = ["--nproc", str(ranks), "--max-restarts", str(max_restarts)]
        _run([*options, "--module", __name__, folder])
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(ranks)]


def _run(arguments: list[str]) -> None:
    """Run `slipstream run`, with its output in the cell."""
    command = [sys.executable, "-m", "slipstream", "run", "--quiet", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PLACES)}  # the kernel's own
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # A process group of its own: an interrupt of the kernel may reach the kernel's whole group, and is passed on once.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", process_group=0
    )
    lines = deque[str](maxlen=80)  # the end of stderr, which holds the launcher's report
    streams = ((process.stdout, sys.stdout, deque[str](maxlen=1)), (process.stderr, sys.stderr, lines))
    readers = [threading.Thread(target=_forward, args=each, daemon=True) for each in streams]
    try:
        for reader in readers:
            reader.start()
        status = process.wait()
    except KeyboardInterrupt:
        _stop(process)
        raise
    finally:
        for reader in readers:
            reader.join(1)
    if status:
        raise RanksFailedError(f"slipstream run ended with exit code {status}:\n{''.join(lines).rstrip()}")


def _stop(process: subprocess.Popen[str]) -> None:
    """End the launcher and its ranks, by force after `STOP` seconds or a second interrupt."""
    started = _descendants(process.pid)  # ranks have their own sessions, so they outlive a killed launcher
    try:
        process.send_signal(signal.SIGINT)
        process.wait(STOP)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        for pid in (process.pid, *started):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _descendants(pid: int) -> list[int]:
    with suppress(OSError):  # the process has ended
        files = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [int(child) for file in files for child in file.read_text().split()]
        return [one for child in children for one in (child, *_descendants(child))]
    return []


def _forward(stream: IO[str] | None, to: Any, lines: deque[str]) -> None:
    if stream is not None:
        with stream:
            for line in stream:
                lines.append(line)
                to.write(line)
                to.flush()


def _call(folder: str) -> None:
    """In a rank: call the function, and store its result for the kernel."""
    function, args, kwargs = pickle.loads(Path(folder, "call").read_bytes())
    result = function(*args, **kwargs)
    try:
        packed = cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(f"what {getattr(function, '__name__', function)!r} returned cannot be sent back: {error}") from error
    Path(folder, f"result{os.environ['RANK']}").write_bytes(packed)


if __name__ == "__main__":
    _call(sys.argv[1])
