"""What the pool and its workers say to each other: jobs, reports, signals, requests for a fork."""

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
    prefix: str  # this test's keys in it
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
    cpu_s: float = 0.0  # processor seconds that the job took in this process and in children that it waited for
