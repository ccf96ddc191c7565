"""Hostfiles and filters: what they choose, and how they are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.launch import hosts
from slipstream.launch.hosts import Host

HOSTFILE = """
# the small cluster
node1 slots=4
node2   slots = 2   # shared

node3 slots=1
"""


def three() -> tuple[Host, ...]:
    return hosts.parse_hostfile(HOSTFILE, "hosts")


def shape(chosen: tuple[Host, ...]) -> dict[str, tuple[int, ...]]:
    return {host.name: host.devices for host in chosen}


def test_hostfile() -> None:
    assert shape(three()) == {"node1": (0, 1, 2, 3), "node2": (0, 1), "node3": (0,)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 slots=1\nnode1 slots=2\n", "hosts:2: host node1 is listed twice"),
        ("node1\n", "hosts:1: 'node1' is not `HOST slots=N`"),
        ("node1 slots=four\n", "hosts:1: 'node1 slots=four' is not"),
        ("node1 slots=0\n", "hosts:1: host node1 has slots=0"),
        ("# nothing\n\n", "hosts: the file lists no hosts"),
    ],
)
def test_hostfile_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        hosts.parse_hostfile(text, "hosts")


def test_include() -> None:
    assert shape(hosts.include(three(), "node2@node1:3,1,1")) == {"node1": (1, 3), "node2": (0, 1)}


def test_exclude() -> None:
    assert shape(hosts.exclude(three(), "node1:0@node3")) == {"node1": (1, 2, 3), "node2": (0, 1)}
    assert shape(hosts.exclude(three(), "node2:0,1")) == {"node1": (0, 1, 2, 3), "node3": (0,)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node9", "unknown host node9; the hosts are node1, node2, node3"),
        ("node2:2,3", "host node2 has no slot 2, 3; it has slots 0 to 1"),
        ("node1:a", "'a' are not device numbers"),
        ("node1:", "'' are not device numbers"),
        ("node1:0@node1:1", "host node1 appears twice"),
        ("node1@@node2", "an entry has no host"),
    ],
)
@pytest.mark.parametrize("filter_", [hosts.include, hosts.exclude])
def test_filters_refused(filter_: object, text: str, message: str) -> None:
    assert callable(filter_)
    with pytest.raises(ValueError, match=message):
        filter_(three(), text)


def test_nothing_left() -> None:
    with pytest.raises(ValueError, match="leaves no hosts"):
        hosts.exclude(three(), "node1@node2@node3")


def test_limit() -> None:
    assert shape(hosts.limit(three(), 2, 1)) == {"node1": (0,), "node2": (0,)}
    with pytest.raises(ValueError, match=r"--num_nodes 4: .* leave only 3 hosts"):
        hosts.limit(three(), 4, None)
    with pytest.raises(ValueError, match="--nproc 2: host node3 has 1 slots"):
        hosts.limit(three(), None, 2)


def test_mask() -> None:
    assert Host(name="a", devices=(0, 1)).mask is None
    assert Host(name="a", devices=(1, 3)).mask == "1,3"


@given(st.dictionaries(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), st.integers(1, 9), min_size=1), st.data())
def test_include_and_exclude_part_the_devices(slots: dict[str, int], data: st.DataObject) -> None:
    every = hosts.parse_hostfile("".join(f"{name} slots={count}\n" for name, count in slots.items()), "hosts")
    name = data.draw(st.sampled_from(list(slots)))
    chosen = sorted(data.draw(st.sets(st.integers(0, slots[name] - 1), min_size=1)))
    text = f"{name}:{','.join(map(str, chosen))}"
    assert shape(hosts.include(every, text)) == {name: tuple(chosen)}
    remaining = sum(slots.values()) - len(chosen)
    if remaining:
        assert sum(len(host.devices) for host in hosts.exclude(every, text)) == remaining
