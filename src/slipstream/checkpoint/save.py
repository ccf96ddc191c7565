"""Save: every rank writes its pieces, and rank 0 commits them atomically.

    agree (inputs, tag) -> draft folder -> plan -> write -> gather entries -> commit (rename, `latest`) -> retention

An asynchronous save plans, copies and gathers in the call; background.py does the rest.

All ranks or none complete each step (`Ranks`). Until the commit only a `TAG.tmp-...` folder exists. If anything fails, it is
removed, every rank raises the same CheckpointError, and the last checkpoint is unchanged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, Unpack

import torch.distributed as dist
from torch import Tensor

from slipstream.checkpoint.background import PATIENCE_S, AsyncSave, Staging
from slipstream.checkpoint.directory import Draft, check_tag, retain
from slipstream.checkpoint.document import Document, one_axis
from slipstream.checkpoint.errors import CheckpointError, Ranks
from slipstream.checkpoint.flat_slice import FlatSlice
from slipstream.checkpoint.hosts import Hosts
from slipstream.checkpoint.plan import check_entry, own_shares
from slipstream.checkpoint.values import encode
from slipstream.checkpoint.writer import Writer, collect

logger = logging.getLogger(__name__)

TagValidation = Literal["Warn", "Fail", "Ignore"]


class Content(TypedDict):
    """The keywords of `save` and `save_async`. `_begin` has their defaults."""

    tensors: Mapping[str, FlatSlice | Tensor]
    shared: Mapping[str, Any]
    per_rank: Mapping[str, Any]
    group: NotRequired[dist.ProcessGroup | None]
    mesh: NotRequired[Mapping[str, int] | None]
    save_latest: NotRequired[bool]
    tag_validation: NotRequired[TagValidation]
    keep: NotRequired[int | None]


def save(directory: str | os.PathLike[str], tag: str, *, hosts: Hosts | None = None, **content: Unpack[Content]) -> Path:
    """Write checkpoint `tag` of `directory` and return its folder, which is then on disk. Raises CheckpointError on every rank.

    Collective over `group` (None: this process alone). `tensors`: the slices of one name must cover the tensor exactly once over
    the ranks; equal slices, and whole tensors that several ranks pass, are written once. `shared` is taken from rank 0,
    `per_rank` from each rank; both hold values that `values.encode` accepts. The tag is rank 0's; if another rank passes a
    different one, `tag_validation` selects an error ("Fail"), a warning ("Warn") or nothing ("Ignore"). A checkpoint
    with the same tag is replaced. `keep`: how many of the newest checkpoints stay in the directory. `mesh`: the axes of `group`
    and their sizes, outermost first; None: one axis. Ranks of an equal mesh get their `per_rank` back. `hosts`: each host has its
    own `directory` (hosts.py).
    """
    pending = _begin(directory, tag, None, hosts, **content)
    try:
        if hosts is None:
            pending.ranks.decide(pending.step, lambda: pending.commit(pending.document))
        else:
            pending.commit_on(hosts)
    finally:
        pending.discard()
    if pending.keep is not None:
        pending.ranks.gather(f"checkpoint {pending.path} is saved, but older ones could not be removed", pending.tidy)
    return pending.path


def save_async(
    directory: str | os.PathLike[str], tag: str, staging: Staging, *, patience_s: float = PATIENCE_S, **content: Unpack[Content]
) -> AsyncSave:
    """Asynchronous `save`: returns once the state is copied into `staging`, which serves one save at a time."""
    return AsyncSave(_begin(directory, tag, staging, None, **content), patience_s)


@dataclass(slots=True, kw_only=True)
class PendingSave:
    """An uncommitted save on one rank, whose bytes are written or staged. Only a rank with a draft commits and tidies: rank 0, or
    the first rank of each host if hosts have their own directories."""

    ranks: Ranks
    step: str
    path: Path
    document: Document  # on rank 0 that of the whole checkpoint; of an asynchronous save without checksums
    writer: Writer
    draft: Draft | None
    save_latest: bool
    keep: int | None

    def commit(self, document: Document, files: AbstractSet[str] | None = None) -> None:
        """files: those in this directory; None: all"""
        assert self.draft is not None, "this rank has made no folder"
        sizes = {name: size for name, size in document.files.items() if files is None or name in files}
        self.draft.commit(document, sizes, save_latest=self.save_latest)

    def commit_on(self, hosts: Hosts) -> None:
        """Commit on each host. Collective."""
        document = self.ranks.first(self.document)
        if hosts.in_memory:
            self.ranks.gather(self.step, lambda: hosts.copy_to_next(self.writer.folder, document.files))
        self.ranks.gather(self.step, lambda: self.commit(document, hosts.files) if self.draft is not None else None)

    def tidy(self) -> None:
        if self.keep is not None and self.draft is not None:
            retain(self.path.parent, self.keep, self.path.name)

    def discard(self) -> None:
        if self.draft is not None:
            self.draft.discard()


def _begin(
    directory: str | os.PathLike[str],
    tag: str,
    staging: Staging | None,
    hosts: Hosts | None,
    /,  # positional, so that `save_async` does not have them as keywords
    tensors: Mapping[str, FlatSlice | Tensor],
    shared: Mapping[str, Any],
    per_rank: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    mesh: Mapping[str, int] | None = None,
    save_latest: bool = True,
    tag_validation: TagValidation = "Warn",
    keep: int | None = None,
) -> PendingSave:
    ranks, parent, state = Ranks(group), Path(directory), dict(tensors)
    step = ranks.first(f"checkpoint {parent / str(tag)} was not saved")
    shared_skeleton: Any = None

    def prepare() -> tuple[str, Any]:
        nonlocal shared_skeleton
        check_tag(tag)
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep} must be at least 1: the new checkpoint is kept")
        for name, tensor in tensors.items():
            check_entry(name, tensor)
        skeleton, values = encode(dict(per_rank), "per_rank", f"$rank/{ranks.index}")
        state.update(values)
        if ranks.index == 0:
            shared_skeleton, values = encode(dict(shared), "shared", "$shared")
            state.update(values)
        return tag, skeleton

    prepared = ranks.gather(step, prepare)
    tag, folder, draft = _drafts(ranks, step, parent, [rank_tag for rank_tag, _ in prepared], tag_validation, hosts)
    try:
        writer = Writer(parent / folder, ranks.index, staging)
        shares = own_shares(ranks, step, state)
        entries, files = collect(ranks.gather(step, lambda: writer.write(shares)))
    except BaseException:
        if draft is not None:
            draft.discard()
        raise
    document = Document(
        save_id="" if draft is None else draft.save_id,
        mesh=one_axis(ranks.size) if mesh is None else mesh,
        files=files,
        tensors=entries,
        shared=shared_skeleton,
        per_rank=[skeleton for _, skeleton in prepared],
    )
    path = parent / tag
    return PendingSave(
        ranks=ranks, step=step, path=path, document=document, writer=writer, draft=draft, save_latest=save_latest, keep=keep
    )


def _drafts(
    ranks: Ranks, step: str, parent: Path, tags: Sequence[str], validation: TagValidation, hosts: Hosts | None
) -> tuple[str, str, Draft | None]:
    """The tag, the folder's name, and a draft if this rank makes one: rank 0, or the first of each host. Collective."""
    own: list[Draft] = []

    def make(tag: str, save_id: str = "") -> tuple[str, str]:
        own.append(Draft(parent, tag, save_id))
        return tag, own[0].folder.name

    try:
        tag, folder = ranks.decide(step, lambda: make(agree_on_tag(tags, validation)))
        if hosts is not None:
            ranks.gather(step, lambda: make(tag, folder.rpartition("-")[2]) if hosts.is_leader and not own else None)
    except BaseException:
        for draft in own:
            draft.discard()
        raise
    return tag, folder, own[0] if own else None


def agree_on_tag(tags: Sequence[str], validation: TagValidation) -> str:
    """Return rank 0's tag. If the ranks' tags differ, raises CheckpointError ("Fail") or warns ("Warn")."""
    other_tags = {rank: tag for rank, tag in enumerate(tags) if tag != tags[0]}
    if other_tags and validation != "Ignore":
        rank, tag = next(iter(other_tags.items()))
        message = (
            f"checkpoint tags differ: rank 0 has {tags[0]!r}, {len(other_tags)} of {len(tags)} ranks have "
            f"another (rank {rank}: {tag!r}); a tag must not depend on the rank"
        )
        if validation == "Fail":
            raise CheckpointError(message)
        logger.warning("%s; rank 0's is used", message)
    return tags[0]
