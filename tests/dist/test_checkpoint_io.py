"""Checkpoints of several ranks: loading at any world size, errors on all ranks, crash safety."""

from __future__ import annotations

import logging
import os
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.checkpoint import CheckpointError, FlatSlice, latest_tag, load, load_metadata, save
from tests import cases, crashes
from tests.pool import distributed, run

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed.weight": ((301, 17), torch.float32),
    "conv.weight": ((5, 3, 7, 2), torch.bfloat16),
    "norm.bias": ((33,), torch.float16),
    "scale": ((), torch.float64),
    "none": ((0, 4), torch.float32),
    "flags": ((3, 1), torch.uint8),
}


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * 50).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def cut(tensors: dict[str, torch.Tensor], rank: int, world: int, seed: int) -> dict[str, FlatSlice]:
    """This rank's slices of a random split, in which some ranks have no part of some tensors."""
    rng, held = random.Random(seed), {}
    for name, tensor in tensors.items():
        inner = [rng.choice([0, tensor.numel(), rng.randint(0, tensor.numel())]) for _ in range(world - 1)]
        bounds = [0, *sorted(inner), tensor.numel()]
        start, stop = bounds[rank], bounds[rank + 1]
        leave_out = rng.random() < 0.5 and tensor.numel() > 0  # instead of an empty slice
        if start < stop or not leave_out:
            held[name] = FlatSlice(tensor.flatten()[start:stop].clone(), tuple(tensor.shape), start)
    return held


def save_randomly_cut(directory: Path, seeds: range) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        save(
            directory,
            f"cut{seed}",
            tensors={**cut(whole(), rank, world, seed), "replicated": torch.arange(1000.0)},
            shared={"seed": seed, "only rank 0's": rank, "ema": torch.full((3,), float(seed))},
            per_rank={"rng": torch.full((5,), rank), "rank": rank},
            group=dist.group.WORLD,
        )


def load_randomly_cut(directory: Path, seeds: range, saved_by: int) -> None:
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, world = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    assert latest_tag(directory, group=group) == f"cut{seeds[-1]}"
    for seed in seeds:
        expected = cut(whole(), rank, world, seed + 100)
        held = {name: FlatSlice(torch.zeros_like(part.data), part.shape, part.start) for name, part in expected.items()}
        replicated = torch.zeros(1000)
        values, own, *_ = load(directory, f"cut{seed}", tensors={**held, "replicated": replicated}, group=group)
        for name, part in held.items():
            assert torch.equal(part.data, expected[name].data), f"seed {seed}: {name}"
        assert torch.equal(replicated, torch.arange(1000.0))
        assert values["seed"] == seed and values["only rank 0's"] == 0 and values["ema"].tolist() == [seed] * 3
        if world == saved_by:
            assert own is not None and own["rank"] == rank and own["rng"].tolist() == [rank] * 5
        else:
            assert own is None


def test_save_at_four_load_at_any(tmp_path: Path) -> None:
    seeds = range(8)
    run(4, save_randomly_cut, tmp_path, seeds)
    metadata = load_metadata(tmp_path, "cut0")
    entry = metadata.tensors["conv.weight"]
    assert metadata.world_size == 4 and (entry.shape, entry.dtype) == ((5, 3, 7, 2), torch.bfloat16)
    stored = sum(file.stat().st_size for file in (tmp_path / "cut0").glob("*.bin"))
    held = sum(tensor.nbytes for tensor in whole().values()) + 4000 + 12 + 4 * 5 * 8
    assert held <= stored < held + 4000, "what all ranks have is stored once; the rest is padding"
    for world in (4, 3, 2):
        run(world, load_randomly_cut, tmp_path, seeds, 4)
    load_randomly_cut(tmp_path, seeds, 4)  # in this process


def test_save_at_two_load_at_four(tmp_path: Path) -> None:
    seeds = range(3)
    run(2, save_randomly_cut, tmp_path, seeds)
    run(4, load_randomly_cut, tmp_path, seeds, 2)


@distributed(world_size=4)
def test_a_group_that_is_not_the_world(tmp_path: Path) -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ours, place = groups[rank % 2], rank // 2
    directory = tmp_path / f"engine{rank % 2}"
    data = torch.arange(10.0)[place * 5 : place * 5 + 5] + rank % 2
    held = FlatSlice(data, (2, 5), place * 5)
    save(directory, "t", tensors={"w": held}, shared={"g": rank % 2}, per_rank={"r": rank}, group=ours)
    target = torch.zeros(2, 5)
    values, own, *_ = load(directory, "t", tensors={"w": target}, group=ours)
    assert torch.equal(target, torch.arange(10.0).view(2, 5) + rank % 2)
    assert values == {"g": rank % 2} and own == {"r": rank}


@distributed(world_size=2)
def test_two_dimensional_shards(tmp_path: Path) -> None:
    """Column shards of tensor parallelism load as rows and as flat ranges, and vice versa."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    rank, full = dist.get_rank(), torch.arange(48.0).view(6, 8)
    mesh = init_device_mesh("cpu", (2,))
    columns = distribute_tensor(full, mesh, [Shard(1)])
    assert isinstance(columns, DTensor)
    save(tmp_path, "t", tensors={"w": columns}, shared={}, per_rank={}, group=dist.group.WORLD)

    flat = FlatSlice(torch.zeros(20), (6, 8), 7 + 20 * rank)
    load(tmp_path, "t", tensors={"w": flat}, group=dist.group.WORLD)
    assert torch.equal(flat.data, full.flatten()[flat.start : flat.stop])
    rows = distribute_tensor(torch.zeros(6, 8), mesh, [Shard(0)])
    load(tmp_path, "t", tensors={"w": rows}, group=dist.group.WORLD)
    assert torch.equal(rows.to_local(), full[3 * rank : 3 * rank + 3])

    half = FlatSlice(full.flatten()[24 * rank : 24 * rank + 24].clone(), (6, 8), 24 * rank)
    save(tmp_path, "t", tensors={"w": half}, shared={}, per_rank={}, group=dist.group.WORLD)
    again = distribute_tensor(torch.zeros(6, 8), mesh, [Shard(1)])
    load(tmp_path, "t", tensors={"w": again}, group=dist.group.WORLD)
    assert torch.equal(again.to_local(), columns.to_local())


# Errors on all ranks


def good_checkpoint(directory: Path) -> None:
    rank = dist.get_rank()
    part = FlatSlice(torch.full((50_000,), float(rank)), (100_000,), 50_000 * rank)
    save(directory, "good", tensors={"w": part}, shared={"step": 1}, per_rank={"r": rank}, group=dist.group.WORLD)


def no_values() -> dict[str, Any]:
    return {"shared": {}, "per_rank": {}, "group": dist.group.WORLD}


def fails_everywhere(step: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message, which every rank must raise."""
    try:
        step(*args, **kwargs)
    except CheckpointError as error:
        message = str(error)
    else:
        raise AssertionError(f"rank {dist.get_rank()} raised nothing")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, message)
    assert len(set(everyone)) == 1, everyone
    return message


@distributed(world_size=2)
def test_a_full_disk_on_one_rank(tmp_path: Path) -> None:
    good_checkpoint(tmp_path)
    rank = dist.get_rank()
    part = FlatSlice(torch.zeros(50_000), (100_000,), 50_000 * rank)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for tag in ("new", "good"):
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            message = fails_everywhere(save, tmp_path, tag, tensors={"w": part}, **no_values())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "was not saved: rank 1 of 2: cannot write" in message and "File too large" in message
        assert sorted(os.listdir(tmp_path)) == ["good", "latest"]
    values, own, *_ = load(tmp_path, "good", tensors={"w": part}, group=dist.group.WORLD)
    assert values == {"step": 1} and own == {"r": rank} and bool((part.data == rank).all())


@distributed(world_size=2)
def test_wrong_input_on_one_rank(tmp_path: Path) -> None:
    rank = dist.get_rank()
    first = FlatSlice(torch.zeros(4), (8,), 0)
    second = FlatSlice(torch.zeros(4), (8,), 4)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (first, {}, "only 4 of 8 elements are there"),
        (FlatSlice(torch.zeros(5 - rank), (8,), 4 * rank), {}, "overlap"),
        (first if rank == 0 else FlatSlice(torch.zeros(4).half(), (8,), 4), {}, "float16 of shape .* on rank 1"),
        (first if rank == 0 else FlatSlice(torch.zeros(4), (2, 4), 4), {}, r"shape \(2, 4\) on rank 1"),
        ((first, [0.0])[rank], {}, "rank 1 of 2: tensor 'w' is a list"),
        ((first, second)[rank], {"x": print} if rank == 1 else {}, r"rank 1 of 2: per_rank\['x'\]"),
    ]
    for held, own, match in cases:
        message = fails_everywhere(save, tmp_path, "t", tensors={"w": held}, **no_values() | {"per_rank": own})
        assert re.search(match, message), message
        assert os.listdir(tmp_path) == []


@distributed(world_size=2)
def test_damage_that_one_rank_finds_changes_nothing_on_any(tmp_path: Path) -> None:
    good_checkpoint(tmp_path)
    rank, data = dist.get_rank(), tmp_path / "good" / "rank_00001.bin"
    if rank == 0:
        raw = bytearray(data.read_bytes())
        raw[1000] ^= 1
        data.write_bytes(raw)
    dist.barrier()
    part = FlatSlice(torch.full((50_000,), -1.0), (100_000,), 50_000 * rank)
    message = fails_everywhere(load, tmp_path, "good", tensors={"w": part}, group=dist.group.WORLD)
    assert "rank 1 of 2: " in message and "checksum of tensor 'w' does not match" in message
    assert bool((part.data == -1).all())
    wrong = part if rank == 0 else FlatSlice(torch.zeros(4), (4,), 0)
    message = fails_everywhere(load, tmp_path, "good", tensors={"w": wrong}, group=dist.group.WORLD)
    assert "rank 1 of 2: tensor 'w' has shape (100000,) in the checkpoint and (4,) in the model" in message
    elsewhere = tmp_path if rank == 0 else tmp_path / "elsewhere"
    message = fails_everywhere(load_metadata, elsewhere, "good", group=dist.group.WORLD)
    assert "rank 1 of 2: checkpoint directory" in message and message.endswith("elsewhere does not exist")
    message = fails_everywhere(load, tmp_path, "absent", tensors={"w": part}, group=dist.group.WORLD)
    assert message.endswith("has no checkpoint 'absent'; it has good")  # equal on all ranks: reported once
    assert bool((part.data == -1).all())


@distributed(world_size=2)
def test_the_tag_is_rank_zeros(tmp_path: Path) -> None:
    tag, said = f"loss{dist.get_rank()}", []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, keep = logging.getLogger("slipstream.checkpoint.save"), Keep()
    logger.addHandler(keep)
    try:
        values = {"tensors": {}} | no_values()
        message = fails_everywhere(save, tmp_path, tag, tag_validation="Fail", **values)
        assert "tags differ: rank 0 has 'loss0', 1 of 2 ranks have another (rank 1: 'loss1')" in message
        assert os.listdir(tmp_path) == [] and said == []
        assert save(tmp_path, tag, tag_validation="Ignore", **values) == tmp_path / "loss0"
        assert said == []
        save(tmp_path, tag, **values)
        assert len(said) == (dist.get_rank() == 0)
    finally:
        logger.removeHandler(keep)
    assert sorted(os.listdir(tmp_path)) == ["latest", "loss0"]


@distributed(world_size=2)
def test_ranks_that_write_to_different_folders_raise(tmp_path: Path) -> None:
    rank = dist.get_rank()
    ours = tmp_path / f"host{rank}"
    part = FlatSlice(torch.zeros(4), (8,), 4 * rank)
    message = fails_everywhere(save, ours, "t", tensors={"w": part}, **no_values())
    assert "host1" in message and "the directory must be the same on every rank" in message
    assert os.listdir(tmp_path / "host0") == []


def from_disk() -> int:
    """Bytes that the kernel has read from a device for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


@pytest.mark.disk
@distributed(world_size=(1, 4))
def test_each_byte_comes_from_the_disk_once(world_size: int, tmp_path: Path) -> None:
    """Counted by the kernel, at another world size. Verifying and reading together are one pass over the disk."""
    rank, group, numel = dist.get_rank(), dist.group.WORLD, 8 << 20
    if rank == 0:
        save(tmp_path, "t", tensors={"w": torch.arange(numel, dtype=torch.float32)}, shared={}, per_rank={})
    dist.barrier()
    part = FlatSlice(torch.zeros(numel // world_size), (numel,), rank * numel // world_size)
    load(tmp_path, "t", tensors={}, group=group)  # the files that every load reads
    before = from_disk()
    load(tmp_path, "t", tensors={"w": part}, group=group)
    read = torch.tensor(from_disk() - before)
    dist.all_reduce(read)
    assert part.data[0] == part.start and part.data[-1] == part.stop - 1
    assert read == 0 or 4 * numel <= read < 4 * numel * 1.05  # 0: the file system is in memory or does not count


# Crashes

KILLS = 12 if cases.EVERYTHING else 3  # at random moments, in addition to one at each call


@pytest.mark.parametrize("way", [pytest.param("at once", marks=pytest.mark.slow), "behind", "pretrained"])
def test_a_crash_at_any_moment_leaves_the_last_one_whole(way: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", crashes.__file__, str(tmp_path), "5", way, str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 12, done.stdout
