"""The other processes of `slipstream generate`, `chat` and `serve` with `--tp`: ranks above 0, on this host.

This process is rank 0. It starts the others, which open the same model and compute their part until rank 0's engine is closed. They
ignore signals, so that only rank 0 handles Ctrl-C and SIGTERM. None outlives `following`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

_LEAVE_S = 10.0  # seconds for the others to exit after rank 0's engine is closed
_FOLLOW = "from slipstream.launch.followers import follow; follow()"


@contextmanager
def following(model: str, arguments: Mapping[str, Any], size: int) -> Iterator[Callable[[], None]]:
    """Start `size` - 1 processes, unless a launcher started this one. The caller opens its engine, then calls the yielded
    function."""
    if size == 1 or "RANK" in os.environ:
        yield lambda: None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in (job | {"RANK": 0, "LOCAL_RANK": 0}).items()})
    command = [sys.executable, "-c", _FOLLOW, json.dumps([model, dict(arguments)])]
    processes: list[subprocess.Popen[bytes]] = []
    is_open = threading.Event()

    def watch(rank: int, process: subprocess.Popen[bytes]) -> None:
        """Runs in a thread. Until the engine is open, nothing else notices a process's end: the others wait for it to join."""
        if process.wait() and not is_open.is_set():
            print(f"rank {rank} ended with code {process.returncode} before the model was open", file=sys.stderr, flush=True)
            for other in processes:
                other.kill()
            os._exit(1)

    try:
        for rank in range(1, size):
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        for rank, process in enumerate(processes, 1):
            threading.Thread(target=watch, args=(rank, process), daemon=True).start()
        yield is_open.set
    except BaseException:
        is_open.set()
        for process in processes:
            process.kill()
        raise
    finally:
        is_open.set()
        for process in processes:
            try:
                process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def follow() -> None:
    """The whole life of a started process. Rank 0 reports errors that it has as well."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    import slipstream
    from slipstream.world.watch import PeerLostError

    model, arguments = json.loads(sys.argv[1])
    with suppress(ValueError, PeerLostError):
        slipstream.init_inference(model, **arguments).close()
