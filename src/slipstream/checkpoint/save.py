"""Save: every rank writes its pieces, rank 0 makes them a checkpoint, or nothing happens at all.

    agree (inputs, tag) -> draft folder -> DCP: plan, write, gather -> commit (rename, `latest`) -> retention

Each arrow is passed by all ranks or by none (`Ranks`). Until the commit only a `TAG.tmp-...` folder exists;
where anything fails it is removed, every rank raises the same CheckpointError, and the last checkpoint is as
it was.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .directory import Draft, check_tag, retain
from .document import BLOCK, DTYPES, Document
from .errors import CheckpointError, Ranks, describe
from .flat_slice import FlatSlice
from .values import encode

if TYPE_CHECKING:
    from .storage import Writer

logger = logging.getLogger(__name__)

TagValidation = Literal["Warn", "Fail", "Ignore"]


def save(
    directory: str | os.PathLike[str],
    tag: str,
    *,
    tensors: Mapping[str, FlatSlice | Tensor],
    shared: Mapping[str, Any],
    per_rank: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    save_latest: bool = True,
    tag_validation: TagValidation = "Warn",
    keep: int | None = None,
) -> Path:
    """Write checkpoint `tag` of `directory`, on disk when this returns, and give its folder.

    Every rank of `group` calls it (None: this process alone). `tensors`: slices of one name on several
    ranks must cover the tensor once; equal slices, and whole tensors that several ranks have, are written
    once. `shared` is rank 0's and `per_rank` each rank's own; both hold what `values.encode` accepts. The
    tag is rank 0's: where another rank gives a different one, `tag_validation` says whether that is an
    error ("Fail"), said ("Warn") or nothing ("Ignore"). A checkpoint of the same tag is replaced. `keep`
    leaves only so many newest checkpoints in the directory.
    """
    ranks, parent = Ranks(group), Path(directory)
    step = ranks.first(f"checkpoint {parent / str(tag)} was not saved")
    state: dict[str, Any] = dict(tensors)
    common: Any = None

    def prepare() -> tuple[str, Any]:
        nonlocal common
        check_tag(tag)
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep}; at least the new checkpoint is kept")
        for name, held in tensors.items():
            check_entry(name, held)
        own, found = encode(dict(per_rank), "per_rank", f"$rank/{ranks.rank}")
        state.update(found)
        if ranks.rank == 0:
            common, found = encode(dict(shared), "shared", "$shared")
            state.update(found)
        return tag, own

    told = ranks.gather(step, prepare)
    draft: Draft | None = None

    def begin() -> tuple[str, str]:
        nonlocal draft
        draft = Draft(parent, _one_tag([given for given, _ in told], tag_validation))
        return draft.tag, draft.folder.name

    def commit() -> None:
        assert draft is not None, "only rank 0 commits, and it has begun"
        content = Document(
            save_id=draft.save_id,
            world_size=ranks.size,
            block=BLOCK,
            files=writer.files,
            tensors=writer.entries,
            shared=common,
            per_rank=[own for _, own in told],
        )
        draft.commit(content, save_latest=save_latest)

    try:
        tag, folder = ranks.decide(step, begin)
        writer = _write(ranks, step, parent / folder, state)
        ranks.decide(step, commit)
    finally:
        if draft is not None:
            draft.discard()
    if keep is not None:
        step = f"checkpoint {parent / tag} is saved, but older ones could not be removed"
        ranks.decide(step, lambda: retain(parent, keep, tag))
    return parent / tag


def _write(ranks: Ranks, step: str, folder: Path, state: dict[str, Any]) -> Writer:
    """Every rank's pieces into `folder`, through DCP; rank 0's writer knows them all afterwards."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    from .storage import FlatSavePlanner, Writer

    writer = Writer(folder, ranks.rank)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # group=None says so
            dcp_save(
                state,
                storage_writer=writer,
                planner=FlatSavePlanner(),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
    else:
        return writer
    raise ranks.failure(step, {rank: describe(e) for rank, e in causes.items()}, causes.get(ranks.rank))


def check_entry(name: str, held: FlatSlice | Tensor) -> None:
    """Raise unless `held` is something that can be saved or filled under `name`."""
    if not isinstance(name, str) or not name or name.startswith("$"):
        raise CheckpointError(f"a tensor named {name!r}; a name is a string that does not begin with '$'")
    if not isinstance(held, FlatSlice | Tensor):
        raise CheckpointError(f"tensor {name!r} is a {type(held).__name__}; pass a FlatSlice or a Tensor")
    data = held.data if isinstance(held, FlatSlice) else held
    if not isinstance(data, Tensor):
        return
    if data.dtype not in DTYPES.values() or data.is_meta or data.layout is not torch.strided:
        raise CheckpointError(
            f"tensor {name!r} with dtype {data.dtype}, layout {data.layout}, on {data.device}: "
            "only dense tensors with data can be stored"
        )


def _one_tag(tags: list[str], validation: TagValidation) -> str:
    others = {rank: tag for rank, tag in enumerate(tags) if tag != tags[0]}
    if others and validation != "Ignore":
        rank, tag = next(iter(others.items()))
        message = (
            f"checkpoint tags differ: rank 0 has {tags[0]!r}, {len(others)} of {len(tags)} ranks have "
            f"another (rank {rank}: {tag!r}); a tag must not depend on the rank"
        )
        if validation == "Fail":
            raise CheckpointError(message)
        logger.warning("%s; rank 0's is used", message)
    return tags[0]
