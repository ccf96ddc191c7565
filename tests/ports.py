"""Ports that no other lane of the suite takes between choosing and binding them."""

import itertools
import os
import socket

_PER_LANE = 1500
# Below the kernel's ephemeral ports (from 32768).
_FIRST = 10000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 14 * _PER_LANE
_START = os.getpid() * 37 % _PER_LANE  # varies, because another suite may run
_ports = itertools.cycle(_FIRST + (_START + i) % _PER_LANE for i in range(_PER_LANE))


def free_port() -> int:
    """A free port of 127.0.0.1 that this process does not return again soon."""
    for port in itertools.islice(_ports, _PER_LANE):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port from {_FIRST} to {_FIRST + _PER_LANE - 1} is free")
