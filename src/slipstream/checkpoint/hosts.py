"""Checkpoints of several hosts, each with its own directory, on its disk or in its memory.

save              a host's directory gets the metadata and the files of its own ranks; in memory also those of the preceding host,
                  so that a lost host takes no files with it
complete_newest   restarted ranks, on whichever hosts are left, complete the newest checkpoint in each directory
completed         while a checkpoint is loaded, each host also has the other hosts' files in a folder

Files travel through torch's process group. Meanwhile each host needs room for the whole checkpoint.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.checkpoint.directory import (
    LATEST,
    committed_tags,
    is_deepspeed,
    lock_folder,
    read_latest,
    remove,
    remove_dead,
    sweep,
    unlock,
    write_synced,
)
from slipstream.checkpoint.document import METADATA, file_name
from slipstream.checkpoint.errors import CheckpointError, Ranks
from slipstream.checkpoint.load import load_metadata
from slipstream.ops.disk import num_free
from slipstream.world.host import available_memory

_CHUNK = 1 << 26  # bytes of a message
_BESIDE = ".loading-"  # prefix of the folders of running loads


@dataclass(frozen=True, slots=True)
class Hosts:
    """The ranks of a group on hosts of `per_host` consecutive ranks.

    index      this rank's place in the group
    in_memory  whether the directories are in memory: one host may be lost, and memory limits their space
    """

    group: dist.ProcessGroup
    index: int
    size: int
    per_host: int
    in_memory: bool

    @property
    def is_leader(self) -> bool:
        """Whether this rank creates its host's folders."""
        return self.index % self.per_host == 0

    @property
    def files(self) -> set[str]:
        """The data files that this host's directory receives."""
        first = self.index - self.index % self.per_host
        before = first - self.per_host if self.in_memory else first
        return {file_name(rank % self.size) for rank in range(before, first + self.per_host)}

    def copy_to_next(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Send this rank's file to the next host, and write the one from the preceding host. Collective."""
        before = (self.index - self.per_host) % self.size
        own, other = file_name(self.index), file_name(before)
        sent = _File(folder / own, sizes[own]) if own in sizes else None
        received = _File(folder / other, sizes[other]) if other in sizes else None
        self._exchange(sent, (self.index + self.per_host) % self.size, received, before)

    def move(self, moves: Sequence[Move], folder: Path, target: Path) -> None:
        """Do the moves that involve this rank: from its `folder`, into its `target`. Errors are raised after the last one."""
        failure: OSError | None = None
        for name, nbytes, source, to in moves:
            try:
                if self.index == source:
                    self._exchange(_File(folder / name, nbytes), to, None, to)
                elif self.index == to:
                    self._exchange(None, source, _File(target / name, nbytes), source)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _exchange(self, sent: _File | None, to: int, received: _File | None, source: int) -> None:
        """Send a file, and write the received one. Errors are raised at the end, because the other ranks wait for messages."""
        to, source = (dist.get_global_rank(self.group, rank) for rank in (to, source))
        failure: OSError | None = None
        sizes = [0 if file is None else file.nbytes for file in (sent, received)]
        rooms = [torch.empty(min(nbytes, _CHUNK), dtype=torch.uint8) for nbytes in sizes]
        for at in range(0, max(*sizes, 1), _CHUNK):
            work = None
            out, part = (room[: max(nbytes - at, 0)] for room, nbytes in zip(rooms, sizes, strict=True))
            try:
                if sent is not None:
                    sent.read(at, out)
            except OSError as error:
                failure = failure or error
            if len(out):
                work = dist.isend(out, to, group=self.group)
            if len(part):
                dist.recv(part, source, group=self.group)
            try:
                if received is not None:
                    received.write(at, part)
            except OSError as error:
                failure = failure or error
            if work is not None:
                work.wait()
        if failure is not None:
            raise failure


class _File(NamedTuple):
    """A file of known size, read and written in chunks."""

    path: Path
    nbytes: int

    def read(self, at: int, part: Tensor) -> None:
        with open(self.path, "rb") as file:
            file.seek(at)
            if file.readinto(part.numpy().data) < len(part):
                raise OSError(errno.EIO, f"it has fewer than {self.nbytes} bytes", str(self.path))

    def write(self, at: int, part: Tensor) -> None:
        with open(self.path, "ab" if at else "wb") as file:
            part.numpy().tofile(file)


class Move(NamedTuple):
    """A file that a host lacks, and the leaders that send and write it."""

    name: str
    nbytes: int
    source: int
    to: int


class _Held(NamedTuple):
    """The files of a checkpoint in one host's directory."""

    save_id: str
    tag: str
    steps: int
    sizes: Mapping[str, int]  # of all its files, including the metadata
    present: frozenset[str]


class _Holding(NamedTuple):
    leader: int
    free: int  # bytes
    held: list[_Held]


def complete_newest(directory: str, hosts: Hosts, after: int) -> bool:
    """Give each host's directory all files of the newest checkpoint, of more than `after` steps, that the hosts hold together.
    Returns False if there is none.

    Collective. Raises CheckpointError on every rank, for instance if a host has no room for it.
    """
    ranks, step, parent = Ranks(hosts.group), f"the checkpoint in memory {directory} was not completed", Path(directory)
    holdings = ranks.gather(step, lambda: _holding(parent, hosts, None) if hosts.is_leader else None)
    chosen = ranks.decide(step, lambda: _choose([each for each in holdings if each is not None], None, after))
    if chosen is None:
        return False
    newest, moves = chosen
    folder, own = parent / newest.tag, [move for move in moves if move.to == hosts.index]
    is_new = any(move.name == METADATA for move in own)
    target = folder.with_name(f"{newest.tag}.tmp-{secrets.token_hex(8)}") if is_new else folder

    def commit() -> None:
        if is_new:
            if folder.exists():  # from another save at the same step, which is incomplete
                remove(folder)
            os.rename(target, folder)
        if hosts.is_leader:
            write_synced(parent / LATEST, f"{newest.tag}\n".encode())

    ranks.gather(step, lambda: target.mkdir(parents=True) if is_new else None)
    try:
        ranks.gather(step, lambda: hosts.move(moves, folder, target))
    except BaseException:
        for move in own:  # a sender that failed to read has sent other bytes
            (target / move.name).unlink(missing_ok=True)
        raise
    ranks.gather(step, commit)
    return True


@contextmanager
def completed(directory: str, tag: str | None, hosts: Hosts, *, universal: bool = False) -> Iterator[tuple[str, str | None]]:
    """Inside, a directory on each host has all files of checkpoint `tag`; yields the directory and the tag. tag None: the newest
    complete one among the hosts' latest.

    [Note: Beside] Nothing in `directory` is changed, whatever a host has under that tag. The yielded directory is a temporary one
    beside it, with links to the host's own files and the files from other hosts.

    Collective. Raises CheckpointError on every rank, for instance if a file is on no host. Checkpoints that no host has, and those
    of DeepSpeed's format, are left to the reader."""
    ranks, step, parent = Ranks(hosts.group), f"checkpoint {directory}/{tag or LATEST} was not loaded", Path(directory)
    latest = ranks.gather(step, lambda: (tag or read_latest(parent, universal)) if hosts.is_leader else None)
    wanted = ranks.decide(step, lambda: sorted({each for each in latest if each is not None}))
    holdings = ranks.gather(step, lambda: _holding(parent, hosts, wanted) if hosts.is_leader else None)
    chosen = ranks.decide(step, lambda: _choose([each for each in holdings if each is not None], tag, -2))
    if chosen is None:
        yield directory, tag
        return
    newest, moves = chosen
    number = ranks.decide(step, lambda: secrets.token_hex(8))
    joined = parent / f"{_BESIDE}{number}-{hosts.index - hosts.index % hosts.per_host}"
    own, source, target = [move.name for move in moves if move.to == hosts.index], parent / newest.tag, joined / newest.tag
    lock = None

    def make() -> None:
        nonlocal lock
        if not hosts.is_leader:
            return
        target.mkdir(parents=True)
        lock = lock_folder(joined)
        for name in newest.sizes.keys() - set(own):
            _link(source / name, target / name)

    try:
        ranks.gather(step, make)
        ranks.gather(step, lambda: hosts.move(moves, source, target))
        yield str(joined), newest.tag
    finally:
        if hosts.is_leader:
            shutil.rmtree(joined, ignore_errors=True)
            unlock(lock)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        os.symlink(source.absolute(), target)


def _holding(parent: Path, hosts: Hosts, wanted: Sequence[str] | None) -> _Holding:
    """The checkpoints in this leader's directory: those in `wanted`, or all."""
    if wanted is None:
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent, "")
    else:
        _sweep_beside(parent)
    held = []
    for tag in committed_tags(parent) if wanted is None else [each for each in wanted if not is_deepspeed(parent / each)]:
        try:
            metadata = load_metadata(parent, tag)
        except CheckpointError:
            continue
        sizes = {**metadata.document.files, METADATA: (parent / tag / METADATA).stat().st_size}
        present = {name for name, size in sizes.items() if _size(parent / tag / name) == size}
        steps = int(metadata.shared.get("counters", {}).get("global_steps", -1))
        held.append(_Held(metadata.document.save_id, tag, steps, sizes, frozenset(present)))
    free = num_free(next(each for each in (parent.absolute(), *parent.absolute().parents) if each.is_dir()))
    return _Holding(hosts.index, min(free, available_memory()) if hosts.in_memory else free, held)


def _sweep_beside(parent: Path) -> None:
    """Remove the folders that killed loads left. Without locks in the file system, do nothing, because a load may be running."""
    for folder in parent.glob(f"{_BESIDE}*"):
        remove_dead(folder, own=False)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def _choose(holdings: Sequence[_Holding], tag: str | None, after: int) -> tuple[_Held, list[Move]] | None:
    """The newest checkpoint of more than `after` steps each of whose files is on some host, and the moves that complete it. Raises
    CheckpointError if files of `tag` are on no host."""
    by_id: dict[str, dict[int, _Held]] = {}  # save id -> leader -> files
    for holding in holdings:
        for held in holding.held:
            by_id.setdefault(held.save_id, {})[holding.leader] = held
    newest, parts, lost = None, dict[int, _Held](), set[str]()
    for by_leader in by_id.values():
        held_by_one = next(iter(by_leader.values()))
        lost = held_by_one.sizes.keys() - set().union(*(held.present for held in by_leader.values()))
        if not lost and held_by_one.steps > (after if newest is None else newest.steps):
            newest, parts = held_by_one, by_leader
    if newest is None:
        if tag is not None and lost:
            files = ", ".join(sorted(lost))
            raise CheckpointError(f"no host has {files}, whole, of {tag}: start on the hosts that saved it, or load another tag")
        return None
    sends, moves = Counter[int](), list[Move]()
    for leader, free, _ in holdings:
        missing = newest.sizes.keys() - (parts[leader].present if leader in parts else frozenset())
        if (needed := sum(newest.sizes[name] for name in missing)) > free:
            raise CheckpointError(f"{newest.tag} needs {needed:,} bytes on the host of rank {leader}, and {free:,} are free")
        for name in sorted(missing):
            source = min((each for each in parts if name in parts[each].present), key=lambda each: (sends[each], each))
            sends[source] += 1
            moves.append(Move(name, newest.sizes[name], source, leader))
    return newest, moves
