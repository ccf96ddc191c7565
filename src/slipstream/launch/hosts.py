"""Select the hosts and devices of a job by hostfile, `--include`, `--exclude` and counts. Pure functions.

A hostfile has one `name slots=N` per line; `#` starts a comment. A filter is `host1:0,1@host2`: hosts joined by `@`, each with
device numbers, or without them for all of its devices. Node ranks follow the order of the hostfile, which filters do not change:
the first host is the master.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_LINE = re.compile(r"^(?P<name>\S+)\s+slots\s*=\s*(?P<slots>\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host and the devices that the job uses on it, one rank each."""

    name: str
    devices: tuple[int, ...]

    @property
    def mask(self) -> str | None:
        """CUDA_VISIBLE_DEVICES for this host; None if ranks 0..n-1 use devices 0..n-1."""
        return None if self.devices == tuple(range(len(self.devices))) else ",".join(map(str, self.devices))


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Parse a hostfile. Raises ValueError with `path` and line number."""
    hosts: dict[str, Host] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.match(line)
        if match is None:
            raise ValueError(f"{path}:{number}: {line!r} is not `HOST slots=N`")
        name, slots = match["name"], int(match["slots"])
        if slots == 0:
            raise ValueError(f"{path}:{number}: host {name} has slots=0; comment it out or set at least 1")
        if name in hosts:
            raise ValueError(f"{path}:{number}: host {name} is listed twice; keep one line with the sum of its slots")
        hosts[name] = Host(name=name, devices=tuple(range(slots)))
    if not hosts:
        raise ValueError(f"{path}: the file lists no hosts; write one `HOST slots=N` per line")
    return tuple(hosts.values())


def parse_filter(text: str, flag: str) -> dict[str, tuple[int, ...] | None]:
    """Parse `host1:0,1@host2` to {host1: (0, 1), host2: None}; None means all devices. Raises ValueError."""
    chosen: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        name, colon, listed = (piece.strip() for piece in part.strip().partition(":"))
        if not name:
            raise ValueError(f"{flag} {text!r}: an entry has no host; write host1:0,1@host2")
        if name in chosen:
            raise ValueError(f"{flag} {text!r}: host {name} appears twice; join its devices as {name}:0,1")
        if not colon:
            chosen[name] = None
            continue
        devices = [piece.strip() for piece in listed.split(",")]
        if not all(device.isdigit() for device in devices):
            raise ValueError(f"{flag} {text!r}: {listed!r} are not device numbers; write {name}:0,1")
        chosen[name] = tuple(sorted({int(device) for device in devices}))
    return chosen


def _chosen(hosts: Sequence[Host], text: str, flag: str) -> dict[str, tuple[int, ...]]:
    """The devices of each host that a filter names. Raises ValueError if it names a host or device that `hosts` do not have."""
    devices_of = {host.name: host.devices for host in hosts}
    chosen = {}
    for name, devices in parse_filter(text, flag).items():
        if name not in devices_of:
            raise ValueError(f"{flag}: unknown host {name}; the hosts are {', '.join(devices_of)}")
        slots = devices_of[name]
        if missing := [device for device in devices or () if device not in slots]:
            numbers = ", ".join(map(str, missing))
            raise ValueError(f"{flag}: host {name} has no slot {numbers}; it has slots {min(slots)} to {max(slots)}")
        chosen[name] = devices or slots
    return chosen


def include(hosts: Sequence[Host], text: str) -> tuple[Host, ...]:
    """Keep the hosts and devices that the filter names. Raises ValueError for an invalid filter."""
    chosen = _chosen(hosts, text, "--include")
    return tuple(replace(host, devices=chosen[host.name]) for host in hosts if host.name in chosen)


def exclude(hosts: Sequence[Host], text: str) -> tuple[Host, ...]:
    """Drop the hosts and devices that the filter names. Raises ValueError for an invalid filter, or if no host is left."""
    chosen = _chosen(hosts, text, "--exclude")
    left = {host: tuple(device for device in host.devices if device not in chosen.get(host.name, ())) for host in hosts}
    if not any(left.values()):
        raise ValueError(f"--exclude {text!r} leaves no hosts; exclude fewer")
    return tuple(replace(host, devices=devices) for host, devices in left.items() if devices)


def limit(hosts: Sequence[Host], num_nodes: int | None, num_ranks: int | None) -> tuple[Host, ...]:
    """Keep the first `num_nodes` hosts and the first `num_ranks` devices of each; None means all. Raises ValueError if there are
    fewer."""
    if num_nodes is not None and num_nodes > len(hosts):
        raise ValueError(f"--num_nodes {num_nodes}: the hostfile and filters leave only {len(hosts)} hosts")
    selected = tuple(hosts[:num_nodes])
    if num_ranks is None:
        return selected
    for host in selected:
        if num_ranks > len(host.devices):
            raise ValueError(
                f"--nproc {num_ranks}: host {host.name} has {len(host.devices)} slots after all filters; lower --nproc or add slots"
            )
    return tuple(replace(host, devices=host.devices[:num_ranks]) for host in selected)
