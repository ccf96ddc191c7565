"""Notebooks: a function of a cell on several ranks of this host (pip install cloudpickle).

    from slipstream.integrations.notebook import launch

    def train(steps):
        engine, *_ = slipstream.initialize(model=model, config=config)
        ...
        return losses

    losses, *_ = launch(train, 100, nproc=2)

`slipstream run` starts the ranks as new processes, so that a kernel that has used a GPU, or torch's threads, does not matter. What
the function refers to in the notebook travels with it: other functions, classes, values.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
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
STOP = 35.0  # seconds for ranks to end after an interrupt; `slipstream run` gives them 30


class RanksFailedError(RuntimeError):
    """A rank of `launch` has failed; the message has its traceback."""


def launch(function: Callable[..., T], *args: Any, nproc: int | None = None, max_restarts: int = 0, **kwargs: Any) -> list[T]:
    """Call `function(*args, **kwargs)` on `nproc` ranks and return its results, by rank.

    nproc         default: one rank for each GPU, or 2 without one
    max_restarts  how often all ranks are started again when one fails

    What ranks print appears in the cell. Raises ValueError without a rank, TypeError for what cannot be pickled, RanksFailedError
    when a rank fails; an interrupt of the cell ends the ranks.
    """
    import torch

    ranks = (torch.cuda.device_count() or 2) if nproc is None else nproc
    if ranks < 1:
        raise ValueError(f"nproc ({nproc}) must be at least 1: each process is a rank")
    with tempfile.TemporaryDirectory(prefix="slipstream-notebook-") as folder:
        try:
            Path(folder, "call").write_bytes(cloudpickle.dumps((function, args, kwargs)))
        except (TypeError, pickle.PicklingError) as error:
            raise TypeError(
                f"{getattr(function, '__name__', function)!r} cannot be sent to other processes: {error}. Open files, locks and "
                "engines are made inside the function"
            ) from error
        options = ["--nproc", str(ranks), "--max-restarts", str(max_restarts)]
        _run([*options, "--module", __name__, folder])
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(ranks)]


def _run(arguments: list[str]) -> None:
    """`slipstream run`, whose output goes to the cell."""
    command = [sys.executable, "-m", "slipstream", "run", "--quiet", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    # A group of its own: an interrupt of the kernel may go to its whole group, and is passed on once.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", process_group=0
    )
    lines: list[str] = []  # of the launcher's report, which is the end of stderr
    readers = [
        threading.Thread(target=_forward, args=(process.stdout, sys.stdout, [])),
        threading.Thread(target=_forward, args=(process.stderr, sys.stderr, lines)),
    ]
    for reader in readers:
        reader.start()
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP)
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for reader in readers:
            reader.join()
    if status:
        raise RanksFailedError(f"slipstream run ended with exit code {status}:\n{''.join(lines[-80:]).rstrip()}")


def _forward(stream: IO[str] | None, to: Any, lines: list[str]) -> None:
    if stream is not None:
        with stream:
            for line in stream:
                lines.append(line)
                to.write(line)
                to.flush()


def _call(folder: str) -> None:
    """A rank: call the function, and leave its result for the kernel."""
    function, args, kwargs = pickle.loads(Path(folder, "call").read_bytes())
    result = cloudpickle.dumps(function(*args, **kwargs))
    Path(folder, f"result{os.environ['RANK']}").write_bytes(result)


if __name__ == "__main__":
    _call(sys.argv[1])
