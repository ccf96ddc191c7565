"""Mail between pipeline stages: trees arrive as they were sent, in order for each key, whatever their sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.parallel.mail import Mail, PairMail, connect_mail, sum_of_places
from slipstream.world.mesh import Axis, build_mesh
from slipstream.world.watch import Watch
from tests.pool import distributed

KEYS = [("F", 1), ("B", 0), ("F", 2)]


@contextmanager
def connected(transport: str, slots: int) -> Iterator[tuple[Mail, int]]:
    mesh = build_mesh(pp=dist.get_world_size())
    watch = Watch(20.0)
    watch.start(mesh.world)
    routes = [(KEYS[0], 0, 1), (KEYS[1], 1, 0), (KEYS[2], mesh.pp.size - 2, mesh.pp.size - 1)]
    cpu = torch.device("cpu")
    if transport == "pairs":  # as between GPUs, with gloo in place of NCCL: without tags
        mail: Mail = PairMail(mesh.pp, cpu, watch, routes, backend="gloo")
    else:
        mail = connect_mail(mesh.pp, cpu, transport, watch, routes, slots)
    yield mail, mesh.pp.index
    mail.flush()
    mail.close()
    watch.stop()


def tree(seed: int) -> Any:
    """A message of random structure; some are thousands of times larger than others."""
    generator = torch.Generator().manual_seed(seed)
    rows = int(torch.randint(0, 40, (), generator=generator)) * (100 if seed % 7 == 0 else 1)
    x = torch.randn(rows, 3, generator=generator)
    return (
        x.requires_grad_(seed % 2 == 0),
        {"mask": x > 0, "ids": torch.arange(seed), "none": None},
        [x.to(torch.bfloat16).t(), seed, "text", torch.tensor(1.5)],
    )


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other) and one.requires_grad == other.requires_grad
        assert one.is_leaf
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            same(value, other[key])
    elif isinstance(one, (tuple, list)):
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other


@distributed(world_size=2, transports=("shared", "gloo", "pairs"))
def test_trees_arrive_as_they_were_sent(transport: str) -> None:
    with connected(transport, slots=3) as (mail, index):
        for first in range(0, 60, 3):
            if index == 0:
                for seed in range(first, first + 3):
                    mail.send(KEYS[0], 1, tree(seed))
                mail.send(KEYS[2], 1, tree(first))
                same(mail.receive(KEYS[1], 1), tree(1000 + first))
            else:
                same(mail.receive(KEYS[2], 0), tree(first))  # sent after the others
                mail.send(KEYS[1], 0, tree(1000 + first))
                for seed in range(first, first + 3):
                    same(mail.receive(KEYS[0], 0), tree(seed))


@distributed(world_size=3, transports=("gloo", "pairs"))
def test_a_stage_between_others_has_more_neighbors_than_they(transport: str) -> None:
    with connected(transport, slots=2) as (mail, index):
        if index == 0:
            mail.send(KEYS[0], 1, tree(3))
            same(mail.receive(KEYS[1], 1), tree(4))
        elif index == 1:
            mail.send(KEYS[1], 0, tree(4))
            mail.send(KEYS[2], 2, mail.receive(KEYS[0], 0))
        else:
            same(mail.receive(KEYS[2], 1), tree(3))


@distributed(world_size=4)
def test_the_host_group_of_an_axis_whose_group_is_of_gpus_has_its_ranks() -> None:
    """Also if a rank has more groups than the others, as `deepspeed.utils.groups` makes them."""
    mesh = build_mesh(pp=2)
    if mesh.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        group = mesh.pp.host_group()
        assert group is mesh.pp.host_group() is not mesh.pp.group
    index = torch.tensor([mesh.rank])
    dist.all_reduce(index, group=group)
    assert index == sum(mesh.pp.ranks)


@distributed(world_size=4)
def test_engines_on_parts_of_the_world_make_groups_of_their_own() -> None:
    halves = ((0, 1), (2, 3))
    own = halves[dist.get_rank() // 2]
    group = dist.new_subgroups_by_enumeration([list(half) for half in halves])[0]
    axis = Axis("pp", group, own, own.index(dist.get_rank()), 2, (own,))
    mail = PairMail(axis, torch.device("cpu"), Watch(20.0), [(KEYS[0], 0, 1)], backend="gloo")
    if axis.index == 0:
        mail.send(KEYS[0], 1, tree(own[0]))
    else:
        same(mail.receive(KEYS[0], 0), tree(own[0]))
    mail.flush()
    mail.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        hosts = axis.host_group()
    rank = torch.tensor([dist.get_rank()])
    dist.all_reduce(rank, group=hosts)
    assert rank == sum(own)


@distributed(world_size=4)
def test_an_engine_on_a_part_of_the_world_has_three_stages() -> None:
    """The stage between the others has more keys than they, and torch names the groups of a part by their number."""
    parts = ((0, 1, 2), (3,))
    group = dist.new_subgroups_by_enumeration([list(part) for part in parts])[0]
    if (index := dist.get_rank()) < 3:
        routes = [(KEYS[0], 0, 1), (KEYS[1], 1, 0), (KEYS[2], 1, 2), (("B", 1), 2, 1)]
        mail = PairMail(Axis("pp", group, parts[0], index, 3, parts[:1]), torch.device("cpu"), Watch(20.0), routes, backend="gloo")
        for key, source, target in routes:
            if index == source:
                mail.send(key, target, tree(key[1]))
            elif index == target:
                same(mail.receive(key, source), tree(key[1]))
        mail.flush()
        mail.close()


@distributed(world_size=2)
def test_messages_of_many_tensors_are_not_taken_for_those_of_another_key() -> None:
    """Over gloo, where tags tell them apart."""
    many = [torch.tensor([i]) for i in range(100)]
    with connected("gloo", slots=2) as (mail, index):
        if index == 0:
            mail.send(KEYS[0], 1, many)
            mail.send(KEYS[2], 1, tree(1))
        else:
            same(mail.receive(KEYS[2], 0), tree(1))
            same(mail.receive(KEYS[0], 0), many)


@distributed(world_size=2)
def test_memory_of_arrived_messages_is_freed_without_a_flush() -> None:
    """Between GPUs; gloo's sends say only in a wait whether they have ended."""

    class Work:
        ended = False

        def is_completed(self) -> bool:
            return self.ended

        def wait(self) -> None:
            self.ended = True

    with connected("pairs", slots=2) as (mail, index), pytest.MonkeyPatch.context() as patch:
        works: list[Work] = []

        def isend(*args: Any, **kwargs: Any) -> Work:
            works.append(Work())
            return works[-1]

        if index == 0:
            assert isinstance(mail, PairMail)
            patch.setattr(mail, "_post", lambda *args: None)  # headers
            patch.setattr(torch.distributed, "isend", isend)
            for i in range(6):
                mail.send(KEYS[0], 1, torch.zeros(10))
                if i >= 2:
                    works[i - 2].ended = True
            assert [work for work, _ in mail.on_the_way] == works[3:]
            mail.flush()
            assert not mail.on_the_way


@distributed(world_size=2, transports=("shared", "gloo", "pairs"))
def test_a_message_is_not_changed_by_later_writes(transport: str) -> None:
    with connected(transport, slots=2) as (mail, index):
        x = torch.zeros(1000)
        for i in range(50):
            if index == 0:
                x.fill_(i)
                mail.send(KEYS[0], 1, x)
                mail.flush()
                assert mail.receive(KEYS[1], 1) == i
            else:
                assert torch.equal(mail.receive(KEYS[0], 0), torch.full((1000,), float(i)))
                mail.send(KEYS[1], 0, i)


@pytest.mark.parametrize("numel", [1, 7, 64, 4096])
@pytest.mark.parametrize("offset", [0, 2])
def test_the_checksum_of_a_gpu_tells_values_and_places(numel: int, offset: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    flat = torch.randint(0, 256, (offset + numel,), generator=generator, dtype=torch.uint8)[offset:]
    sums = {int(sum_of_places(flat))}
    assert sums == {int(sum_of_places(flat.clone()))}
    for i in {0, numel // 2, numel - 1}:
        for bit in range(8):
            other = flat.clone()
            other[i] ^= 1 << bit
            sums.add(int(sum_of_places(other)))
    assert len(sums) == 1 + 8 * len({0, numel // 2, numel - 1})
    moved = flat.roll(8)
    assert torch.equal(moved, flat) or int(sum_of_places(moved)) not in sums
