"""The ranks of one contender: workers with a core each that form a process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.worker import TIMEOUT, Worker, answers


@dataclass(slots=True, kw_only=True)
class Seat:
    """Where the ranks run: a prefix to each command, variables, the first rank's address, and a call in each child before exec."""

    prefix: Callable[[int], Sequence[str]] = lambda rank: ()
    env: Mapping[str, str] = field(default_factory=dict)
    address: str = "127.0.0.1"
    enter: Callable[[], None] | None = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_env(rank: int, world: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """What torch.distributed reads."""
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return {name: str(value) for name, value in env.items()} | {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


class Ranks:
    """`world` workers on `target`, one thread and one core each, all set up. As a context, they leave no process behind."""

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any],
        world: int,
        *,
        name: str,
        python: Path | None = None,
        env: Mapping[str, str] | None = None,
        seat: Seat | None = None,
    ) -> None:
        """Raises Failed."""
        seat, port, cores = seat or Seat(), free_port(), sorted(os.sched_getaffinity(0))
        with ExitStack() as stack:
            self._workers = [
                stack.enter_context(
                    Worker(
                        target,
                        arguments,
                        name=f"{name}, rank {rank}",
                        python=python,
                        env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
                        | {**(env or {}), **seat.env}
                        | rank_env(rank, world, port, seat.address),
                        core=cores[rank % len(cores)],
                        prefix=seat.prefix(rank),
                        enter=seat.enter,
                    )
                )
                for rank in range(world)
            ]
            answers(self._workers)
            self._stack = stack.pop_all()

    def call(self, handler: str, *, timeout: float = TIMEOUT, **arguments: Any) -> list[Any]:
        """The value of each rank. Raises Failed."""
        for worker in self._workers:
            worker.ask(handler, **arguments)
        return answers(self._workers, timeout)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
