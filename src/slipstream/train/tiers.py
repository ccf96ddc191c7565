"""From the plan's offload to files: which memory each state rests in, and a disk that is known to do before the first step."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping

from slipstream.config.plan import OffloadPlan
from slipstream.ops.disk import Disk, DiskFacts, preflight
from slipstream.zero.comm import Comm, gather_objects
from slipstream.zero.placement import Tier, Tiers
from slipstream.zero.store import Needs, Space, Spaces

logger = logging.getLogger(__name__)

_SPARE = 1.2  # of what is free, some is left to others when all that is at stake is speed
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


def open_spaces(plan: OffloadPlan, data: Comm) -> Callable[[Needs], Spaces]:
    """What opens this rank's files, of the sizes that turn out to be needed. Collective: all ranks have a disk, or all raise."""

    def space(folder: str, nbytes: int) -> Space:
        def disk(nbytes: int) -> Disk:
            return Disk(folder, nbytes, block_nbytes=plan.block_nbytes, queue_depth=plan.queue_depth, threads=plan.threads)

        return Space(disk, nbytes)

    def open_all(needs: Needs) -> Spaces:
        def sum_up(weights: int, optim: int) -> dict[str, int]:
            wanted: dict[str, int] = {}
            for folder, nbytes in ((plan.param_path, weights), (plan.optimizer_path, optim)):
                if nbytes:
                    assert folder is not None, "resolve() asks for nvme_path"
                    wanted[os.path.realpath(folder)] = wanted.get(os.path.realpath(folder), 0) + nbytes
            return wanted

        twice = sum_up(needs.weights + needs.next_weights, needs.optim + needs.next_optim)
        has_room = bool(needs.next_optim) and _has_room(twice, data)
        wanted = twice if has_room else sum_up(needs.weights, needs.optim)
        spaces: dict[str, Space] = {}
        error = ""
        try:
            for folder, nbytes in wanted.items():
                _introduce(folder, nbytes, preflight(folder, nbytes * _neighbours(data)), data)
                spaces[folder] = space(folder, nbytes)
        except ValueError as refused:
            error = str(refused)
        errors = {rank: each for rank, each in zip(data.axis.ranks, gather_objects(error, data.axis), strict=True) if each}
        if errors:
            for opened in spaces.values():
                opened.close()
            rank, first = next(iter(errors.items()))
            raise ValueError(f"offload to disk: {first}" + (f" (rank {rank})" if data.size > 1 else ""))
        param, optimizer = (folder and spaces.get(os.path.realpath(folder)) for folder in (plan.param_path, plan.optimizer_path))
        return Spaces(param or None, optimizer or None, twice=has_room)

    return open_all


def _has_room(wanted: Mapping[str, int], data: Comm) -> bool:
    """Whether every rank's folders can take so much."""
    ranks = _neighbours(data)
    room = True
    for folder, nbytes in wanted.items():
        with contextlib.suppress(OSError):  # preflight says why
            room = room and shutil.disk_usage(folder).free >= nbytes * ranks * _SPARE
    return all(gather_objects(room, data.axis))


def _neighbours(data: Comm) -> int:
    """How many ranks of the axis share this host, and so this host's disks."""
    hosts = gather_objects(os.uname().nodename, data.axis)
    return hosts.count(os.uname().nodename)


def _introduce(folder: str, nbytes: int, facts: DiskFacts, data: Comm) -> None:
    if data.rank == 0:
        logger.info(
            "disk in %s: %.2f GB per rank, %.1f GB free; %s, %.2f GB/s read and %.2f GB/s written at once",
            folder, nbytes / 1e9, facts.free_nbytes / 1e9, facts.engine, facts.read_bytes_per_s / 1e9,
            facts.write_bytes_per_s / 1e9,
        )  # fmt: skip
