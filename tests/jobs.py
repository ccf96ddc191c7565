"""The protocol between the pool and its workers: jobs, reports, signals, fork requests."""

import signal
import struct
from typing import Literal, NamedTuple

INTERRUPT, DUMP = signal.SIGUSR1, signal.SIGUSR2
FORK, WAIT = 1, 2
REQUEST = struct.Struct("qq")  # the template's requests: (FORK, 0) -> pid, (WAIT, pid) -> exit code
READY = b"ready"

Status = Literal["passed", "failed", "skipped", "interrupted", "died", "hung"]


class Job(NamedTuple):
    rank: int
    world_size: int
    port: int  # of the session's TCPStore on 127.0.0.1
    prefix: str  # of this test's keys in the store
    timeout: float
    path: list[str]  # sys.path
    filters: list[str]  # of warnings, as in pytest's ini file
    module: str
    file: str
    qualname: str
    arguments: bytes  # pickled (args, kwargs)


class Report(NamedTuple):
    rank: int
    status: Status
    text: str  # traceback or reason
    value: bytes  # pickled return value
    when: float  # time.monotonic()
    cpu_s: float = 0.0  # processor seconds of the job in this process and in children that it waited for
