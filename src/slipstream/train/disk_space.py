"""From the plan's offload settings to files: the memory tier of each state, and disks that are checked before the first step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from slipstream.config.plan import OffloadPlan
from slipstream.ops.disk import ALIGNMENT, Disk, DiskFacts, preflight
from slipstream.zero.comm import Comm, first_said
from slipstream.zero.placement import Tier, Tiers
from slipstream.zero.storage.store import Needs, Space, Spaces

logger = logging.getLogger(__name__)

_PROBE = 64 << 20  # bytes transferred to measure rates
_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


def tiers_of(plan: OffloadPlan) -> Tiers:
    return Tiers(
        weights=_TIERS[plan.param],
        optim=_TIERS[plan.optimizer],
        kept=0.0 if plan.optimizer == "none" else 1.0 - plan.ratio,
        weights_kept=plan.max_in_cpu,
    )


class Ask(NamedTuple):
    """One rank's needs in one folder."""

    host: str
    device: int  # st_dev: folders on one disk share its space
    folder: str
    free: int  # bytes, before any rank allocates its file
    nbytes: int
    step_read: int  # bytes per step of one micro-batch
    step_written: int


def open_spaces(plan: OffloadPlan, data: Comm) -> Callable[[Needs], Spaces]:
    """Return a function that opens this rank's files of the needed sizes. Collective: if a disk fails on one rank, all raise."""

    tuning: dict[str, Any] = {"block_nbytes": plan.block_nbytes, "queue_depth": plan.queue_depth, "threads": plan.threads}

    def open_all(needs: Needs) -> Spaces:
        asks = _asks(plan, needs)
        by_rank = data.axis.gather(list(asks.values()))
        all_asks = [ask for rank_asks in by_rank for ask in rank_asks]
        spaces: dict[str, Space] = {}
        facts: dict[tuple[str, str], DiskFacts] = {}  # by host and folder
        error = space_error([ask for ask in all_asks if ask.host == os.uname().nodename])
        try:
            for folder, ask in ({} if error else asks).items():
                if _is_first(ask, data.axis.index, by_rank):  # the other ranks wait at the next exchange
                    facts[ask.host, folder] = preflight(folder, min(_PROBE, ask.nbytes), **tuning)
                spaces[folder] = Space(partial(Disk, folder, **tuning), ask.nbytes)
        except (ValueError, OSError) as failed:
            error = str(failed)
        if failure := first_said(error, data.axis):
            for opened in spaces.values():
                opened.close()
            rank, why = failure
            raise ValueError(f"offload to disk: {why}" + (f" (rank {rank})" if data.size > 1 else ""))
        measured = [item for of_rank in data.axis.gather(facts) for item in of_rank.items()]
        for place, disk_facts in measured if data.index == 0 else ():
            _log_disk(place[1], disk_facts, [ask for ask in all_asks if (ask.host, ask.folder) == place])
        param, optimizer = (folder and spaces.get(os.path.realpath(folder)) for folder in (plan.param_path, plan.optimizer_path))
        return Spaces(param or None, optimizer or None)

    return open_all


def _asks(plan: OffloadPlan, needs: Needs) -> dict[str, Ask]:
    """This rank's needs by folder, which is created as in DeepSpeed. `Disk` raises the error if that is impossible."""
    asks: dict[str, Ask] = {}
    weights = (needs.weights, 2 * needs.weights, needs.weights)  # read for forward and for backward
    optim = (needs.optim, needs.optim, needs.optim)
    for tier, path, (nbytes, read, written) in (
        (plan.param, plan.param_path, weights),
        (plan.optimizer, plan.optimizer_path, optim),
    ):
        if tier != "nvme":
            continue
        assert path is not None, "resolve() requires nvme_path"
        nbytes = max(nbytes, ALIGNMENT)  # a rank without a share, or with only frozen parameters, still joins, with one page
        folder, device, free = os.path.realpath(path), -1, nbytes
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            device, facts = os.stat(folder).st_dev, os.statvfs(folder)
            free = facts.f_bavail * facts.f_frsize
        before = asks.get(folder, Ask(os.uname().nodename, device, folder, free, 0, 0, 0))
        asks[folder] = before._replace(
            nbytes=before.nbytes + nbytes, step_read=before.step_read + read, step_written=before.step_written + written
        )
    return asks


def space_error(asks: Iterable[Ask]) -> str:
    """The error text for the first disk with less space than all ranks on its host need; "" if there is none."""
    disks: dict[tuple[str, int], list[Ask]] = {}
    for ask in asks:
        if ask.device >= 0:
            disks.setdefault((ask.host, ask.device), []).append(ask)
    for disk_asks in disks.values():
        needed, free = sum(ask.nbytes for ask in disk_asks), min(ask.free for ask in disk_asks)
        if needed > free:
            folders = " and ".join(sorted({ask.folder for ask in disk_asks}))
            return f"{folders} has {free} bytes free of the {needed} needed; free space there or name another folder"
    return ""


def _is_first(ask: Ask, index: int, by_rank: Sequence[Sequence[Ask]]) -> bool:
    """Whether no rank before this one uses the folder on this host."""
    return all((ask.host, ask.folder) != (other.host, other.folder) for asks in by_rank[:index] for other in asks)


def _log_disk(folder: str, facts: DiskFacts, asks: Sequence[Ask]) -> None:
    """Log a disk's rates, and the bytes and seconds of a step of all ranks that share it."""
    read, written = sum(ask.step_read for ask in asks), sum(ask.step_written for ask in asks)
    seconds = max(read / max(facts.read_bytes_per_s, 1), written / max(facts.write_bytes_per_s, 1))
    logger.info(
        "disk of %s on %s: %.2f GB for %d rank(s), %.1f GB free; %s, %.2f GB/s read and %.2f GB/s written concurrently; a step of "
        "one micro-batch reads %.2f GB and writes %.2f GB: %.2f s",
        folder,
        asks[0].host,
        sum(ask.nbytes for ask in asks) / 1e9,
        len(asks),
        asks[0].free / 1e9,
        facts.engine,
        facts.read_bytes_per_s / 1e9,
        facts.write_bytes_per_s / 1e9,
        read / 1e9,
        written / 1e9,
        seconds,
    )


def warn_of_resident_weights(plan: OffloadPlan, sources: Mapping[str, str], numel: int, kept: int) -> None:
    """Warn if DeepSpeed's default of max_in_cpu keeps `kept` of this rank's `numel` weights in memory instead of on disk."""
    if kept and sources.get("zero_optimization.offload_param.max_in_cpu", "default") == "default":
        logger.warning(
            "offload_param: %d of this rank's %d weights stay in memory, because max_in_cpu is DeepSpeed's default of %d; set "
            '"zero_optimization": {"offload_param": {"max_in_cpu": 0}} to store all of them on disk',
            kept,
            numel,
            plan.max_in_cpu,
        )
