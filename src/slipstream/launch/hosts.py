"""Which hosts and which of their devices a job takes: the hostfile, `--include`, `--exclude`, and counts.
Pure.

A hostfile has one host a line, `name slots=N`; `#` starts a comment. A filter is `host1:0,1@host2`: entries
joined by `@`, each a host with the devices meant, or without them all of its devices. Order is the hostfile's
(a filter cannot change it), and it is the order of node ranks: the first host is the master.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Host", "exclude", "include", "limit", "parse_filter", "parse_hostfile"]

_LINE = re.compile(r"^(?P<name>\S+)\s+slots\s*=\s*(?P<slots>\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine and the devices of it that the job uses, one rank each."""

    name: str
    devices: tuple[int, ...]

    @property
    def mask(self) -> str | None:
        """CUDA_VISIBLE_DEVICES for this host; None where ranks 0..n-1 mean devices 0..n-1 anyway."""
        return None if self.devices == tuple(range(len(self.devices))) else ",".join(map(str, self.devices))


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """The hosts of a hostfile. ValueError names the line."""
    hosts: dict[str, Host] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        found = _LINE.match(line)
        if found is None:
            raise ValueError(f"{path}:{number}: {line!r} is not `HOST slots=N`")
        name, slots = found["name"], int(found["slots"])
        if slots == 0:
            raise ValueError(f"{path}:{number}: host {name} has slots=0; comment it out, or give it at least 1")
        if name in hosts:
            raise ValueError(f"{path}:{number}: host {name} is listed twice; keep one line with the sum of its slots")
        hosts[name] = Host(name=name, devices=tuple(range(slots)))
    if not hosts:
        raise ValueError(f"{path}: no hosts in it; write one `HOST slots=N` a line")
    return tuple(hosts.values())


def parse_filter(text: str, flag: str) -> dict[str, tuple[int, ...] | None]:
    """`host1:0,1@host2` -> {host1: (0, 1), host2: None}; None stands for all devices."""
    chosen: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        name, colon, listed = (piece.strip() for piece in part.strip().partition(":"))
        if not name:
            raise ValueError(f"{flag} {text!r}: an entry has no host; the form is host1:0,1@host2")
        if name in chosen:
            raise ValueError(f"{flag} {text!r}: host {name} appears twice; join its devices, {name}:0,1")
        if not colon:
            chosen[name] = None
            continue
        devices = [piece.strip() for piece in listed.split(",")]
        if not all(device.isdigit() for device in devices):
            raise ValueError(f"{flag} {text!r}: {listed!r} are not device numbers; the form is {name}:0,1")
        numbers = tuple(sorted({int(device) for device in devices}))
        if len(numbers) != len(devices):
            raise ValueError(f"{flag} {text!r}: a device of {name} is named twice")
        chosen[name] = numbers
    return chosen


def _check(hosts: Sequence[Host], chosen: dict[str, tuple[int, ...] | None], flag: str) -> None:
    known = {host.name: host for host in hosts}
    for name, devices in chosen.items():
        if name not in known:
            raise ValueError(f"{flag}: host {name} is not among {', '.join(known)}")
        missing = [device for device in devices or () if device not in known[name].devices]
        if missing:
            have = f"has slots {min(known[name].devices)} to {max(known[name].devices)}"
            raise ValueError(f"{flag}: host {name} has no slot {', '.join(map(str, missing))}; it {have}")


def include(hosts: Sequence[Host], text: str) -> tuple[Host, ...]:
    """Only what the filter names."""
    chosen = parse_filter(text, "--include")
    _check(hosts, chosen, "--include")
    return tuple(replace(host, devices=chosen[host.name] or host.devices) for host in hosts if host.name in chosen)


def exclude(hosts: Sequence[Host], text: str) -> tuple[Host, ...]:
    """All but what the filter names. A host left without devices is dropped."""
    chosen = parse_filter(text, "--exclude")
    _check(hosts, chosen, "--exclude")
    kept = []
    for host in hosts:
        dropped = (chosen[host.name] or host.devices) if host.name in chosen else ()
        devices = tuple(device for device in host.devices if device not in dropped)
        if devices:
            kept.append(replace(host, devices=devices))
    if not kept:
        raise ValueError(f"--exclude {text!r} leaves no host; exclude fewer")
    return tuple(kept)


def limit(hosts: Sequence[Host], num_nodes: int | None, num_ranks: int | None) -> tuple[Host, ...]:
    """The first `num_nodes` hosts, and the first `num_ranks` devices of each; None leaves as it is."""
    if num_nodes is not None and num_nodes > len(hosts):
        raise ValueError(f"--num_nodes {num_nodes}: the hostfile and its filters leave {len(hosts)} hosts")
    taken = tuple(hosts[:num_nodes])
    if num_ranks is None:
        return taken
    for host in taken:
        if num_ranks > len(host.devices):
            raise ValueError(
                f"--nproc {num_ranks}: host {host.name} has {len(host.devices)} slots after all filters; "
                "lower --nproc, or give the host more"
            )
    return tuple(replace(host, devices=host.devices[:num_ranks]) for host in taken)
