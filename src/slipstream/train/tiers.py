"""From the plan's offload to files: which memory each state rests in, and a disk that is known to do before the first step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from slipstream.config.plan import OffloadPlan
from slipstream.ops.disk import Disk, DiskFacts, preflight
from slipstream.zero.comm import Comm, gather_objects
from slipstream.zero.placement import Tier, Tiers
from slipstream.zero.store import PAGE, Needs, Space, Spaces

logger = logging.getLogger(__name__)

_SPARE = 1.2  # of what is free, some is left to others when all that is at stake is speed
_PROBE = 64 << 20  # bytes that rates are measured over
_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


def tiers_of(plan: OffloadPlan) -> Tiers:
    """The memories that the plan asks for."""
    return Tiers(
        weights=_TIERS[plan.param],
        optim=_TIERS[plan.optimizer],
        kept=0.0 if plan.optimizer == "none" else 1.0 - plan.ratio,
        weights_kept=plan.max_in_cpu,
        ahead=plan.update_ahead,
    )


class Ask(NamedTuple):
    """What one rank wants of one folder."""

    host: str
    device: int  # st_dev: folders on one disk share its space
    folder: str
    free: int  # bytes, before any rank takes some
    nbytes: int
    nbytes_twice: int  # with room for new values beside the old ones
    step_read: int  # bytes of a step of one micro-batch
    step_written: int


def open_spaces(plan: OffloadPlan, data: Comm) -> Callable[[Needs], Spaces]:
    """What opens this rank's files, of the sizes that turn out to be needed. Collective: all ranks have a disk, or all raise."""

    def space(folder: str, nbytes: int) -> Space:
        def disk(nbytes: int) -> Disk:
            return Disk(folder, nbytes, block_nbytes=plan.block_nbytes, queue_depth=plan.queue_depth, threads=plan.threads)

        return Space(disk, nbytes)

    def open_all(needs: Needs) -> Spaces:
        asks = _asks(plan, needs)
        everyone = gather_objects(list(asks.values()), data.axis)
        everything = [ask for theirs in everyone for ask in theirs]
        twice = bool(needs.next_optim) and not too_much(everything, lambda ask: int(ask.nbytes_twice * _SPARE))
        spaces: dict[str, Space] = {}
        facts: dict[str, DiskFacts] = {}
        error = too_much([ask for ask in everything if ask.host == os.uname().nodename], lambda ask: ask.nbytes)
        try:
            for folder, ask in ({} if error else asks).items():
                if _is_first(ask, data.axis.index, everyone):  # the others wait at the next exchange
                    facts[folder] = preflight(
                        folder,
                        min(_PROBE, ask.nbytes),
                        block_nbytes=plan.block_nbytes,
                        queue_depth=plan.queue_depth,
                        threads=plan.threads,
                    )
                spaces[folder] = space(folder, ask.nbytes_twice if twice else ask.nbytes)
        except (ValueError, OSError) as refused:
            error = str(refused)
        answers = gather_objects((error, facts), data.axis)
        for rank, (why, _) in zip(data.axis.ranks, answers, strict=True):
            if why:
                for opened in spaces.values():
                    opened.close()
                raise ValueError(f"offload to disk: {why}" + (f" (rank {rank})" if data.size > 1 else ""))
        if data.rank == 0:
            for theirs, (_, measured) in zip(everyone, answers, strict=True):
                for folder, found in measured.items():
                    _introduce(folder, found, [a for a in everything if (a.host, a.folder) == (theirs[0].host, folder)])
        param, optimizer = (folder and spaces.get(os.path.realpath(folder)) for folder in (plan.param_path, plan.optimizer_path))
        return Spaces(param or None, optimizer or None, twice=twice)

    return open_all


def _asks(plan: OffloadPlan, needs: Needs) -> dict[str, Ask]:
    """By folder, what this rank wants of it. A folder that is not there is left to `Disk` to refuse."""
    found: dict[str, Ask] = {}
    weights = (needs.weights, needs.next_weights, 2 * needs.weights, needs.weights)  # read for forward and for backward
    optim = (needs.optim, needs.next_optim, needs.optim, needs.optim)
    for tier, path, (nbytes, beside, read, written) in (
        (plan.param, plan.param_path, weights),
        (plan.optimizer, plan.optimizer_path, optim),
    ):
        if tier != "nvme":
            continue
        assert path is not None, "resolve() asks for nvme_path"
        nbytes = max(nbytes, PAGE)  # a rank without a share, or before anything is unfrozen: it goes along all the same
        folder, device, free = os.path.realpath(path), -1, nbytes
        with suppress(OSError):
            device, facts = os.stat(folder).st_dev, os.statvfs(folder)
            free = facts.f_bavail * facts.f_frsize
        before = found.get(folder, Ask(os.uname().nodename, device, folder, free, 0, 0, 0, 0))
        found[folder] = before._replace(
            nbytes=before.nbytes + nbytes,
            nbytes_twice=before.nbytes_twice + nbytes + beside,
            step_read=before.step_read + read,
            step_written=before.step_written + written,
        )
    return found


def too_much(asks: Iterable[Ask], nbytes: Callable[[Ask], int]) -> str:
    """Which disk has no room for what all ranks on its host want of it, in words; "" where all have."""
    disks: dict[tuple[str, int], list[Ask]] = {}
    for ask in asks:
        if ask.device >= 0:
            disks.setdefault((ask.host, ask.device), []).append(ask)
    for theirs in disks.values():
        wanted, free = sum(map(nbytes, theirs)), min(ask.free for ask in theirs)
        if wanted > free:
            folders = " and ".join(sorted({ask.folder for ask in theirs}))
            return f"{folders} has {free} bytes free of the {wanted} needed; free space there or name another folder"
    return ""


def _is_first(ask: Ask, index: int, everyone: Sequence[Sequence[Ask]]) -> bool:
    """Whether no rank before this one uses the folder on this host."""
    return all((ask.host, ask.folder) != (other.host, other.folder) for theirs in everyone[:index] for other in theirs)


def _introduce(folder: str, facts: DiskFacts, asks: Sequence[Ask]) -> None:
    """One line on a disk: what it gives beside what a step needs, of all ranks that share it."""
    read, written = sum(ask.step_read for ask in asks), sum(ask.step_written for ask in asks)
    seconds = max(read / max(facts.read_bytes_per_s, 1), written / max(facts.write_bytes_per_s, 1))
    logger.info(
        "disk in %s on %s: %.2f GB for %d rank(s), %.1f GB free; %s, %.2f GB/s read and %.2f GB/s written at once; a step of one "
        "micro-batch reads %.2f GB and writes %.2f GB: %.2f s",
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


def say_what_stays(plan: OffloadPlan, sources: Mapping[str, str], numel: int, kept: int) -> None:
    """Warn where DeepSpeed's default lets weights stay in memory that were to rest on disk. Of this rank's `numel`, `kept` do."""
    if kept and sources.get("zero_optimization.offload_param.max_in_cpu", "default") == "default":
        logger.warning(
            "offload_param: %d of this rank's %d weights stay in memory, because max_in_cpu is DeepSpeed's default of %d; set "
            '"zero_optimization": {"offload_param": {"max_in_cpu": 0}} to have all of them on disk',
            kept,
            numel,
            plan.max_in_cpu,
        )
