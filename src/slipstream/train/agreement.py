"""Check that all ranks have the same plan, model, optimizer and versions, or made the same changes, before anything depends on it.

fact   a name and a value as text, such as "gradient_clipping" and "1.0"
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from slipstream.config import Plan
from slipstream.config.plan import plan_values
from slipstream.world.mesh import Axis, gather_objects
from slipstream.world.watch import PeerLostError, is_lost_rank

T = TypeVar("T")
_MOST_SHOWN = 5
# Keys and blocks that may differ between ranks, beside paths: disks' tuning, logging, timeouts.
_OWN_KEYS = frozenset(
    """aio.block_size aio.queue_depth aio.intra_op_parallelism activation_checkpointing.profile
    activation_checkpointing.synchronize_checkpoint_boundary steps_per_print wall_clock_breakdown memory_breakdown timers
    flops_profiler comms_logger slipstream.trace.steps slipstream.trace.folder dump_state log_level slipstream.timeout_s tensorboard
    wandb comet csv_monitor slipstream.monitors""".split()  # noqa: SIM905
)

_REFUSAL = "refusal"

Facts = dict[str, str]


def facts_of_plan(plan: Plan, model: nn.Module, device: torch.device) -> Facts:
    """The facts of the config and the versions. Random seeds, data and disk paths may differ between ranks."""
    facts = {key: str(value) for key, value in plan_values(plan).items() if not _is_own(key)}
    facts["device"] = device.type
    for library in ("slipstream", "torch", type(model).__module__.partition(".")[0]):
        if (version := getattr(sys.modules.get(library), "__version__", None)) is not None:
            facts[f"{library}'s version"] = str(version)
    return facts


@cache
def _is_own(key: str) -> bool:
    return key.endswith("_path") or any(key == own or key.startswith(f"{own}.") for own in _OWN_KEYS)


def facts_of_model(model: nn.Module) -> Facts:
    """The facts of the parameters and buffers. They differ between pipeline stages and between tensor-parallel slices."""
    facts = {f"parameter {name!r}": f"{_form(p)}{'' if p.requires_grad else ' frozen'}" for name, p in model.named_parameters()}
    return facts | {f"buffer {name!r}": _form(buffer) for name, buffer in model.named_buffers()}


def fact_of_refusal(error: ValueError, what: str = "its config") -> Facts:
    """The fact that `what` is invalid on this rank. Otherwise ranks on which it is valid would wait for this one forever."""
    return {_REFUSAL: f"{what} ({error})"}


@contextmanager
def refused_together(what: str, group: Any = None) -> Iterator[None]:
    """If the block raises ValueError on some ranks of a process group, all ranks raise. The block has no collectives. Collective.

    If all ranks raise the same error, each raises its own. what: the subject of the error text, as in `fact_of_refusal`."""
    try:
        yield
    except ValueError as error:
        check_alike(fact_of_refusal(error, what), group)
        raise
    check_alike({}, group)


def facts_of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> Facts:
    """The facts of the optimizer: classes, the groups' options and each parameter's group."""
    facts = {"optimizer": type(optimizer).__name__, "lr_scheduler": type(scheduler).__name__}
    groups = [] if optimizer is None else optimizer.param_groups
    for i, group in enumerate(groups):
        facts |= {f"optimizer group {i} {key}": str(value) for key, value in options(group).items()}
    held = {id(param): i for i, group in enumerate(groups) for param in group["params"]}
    return facts | {f"optimizer group of {name!r}": str(held.get(id(param))) for name, param in model.named_parameters()}


def facts_of_data(loader: Any) -> Facts:
    """The facts of a loader that distributes a dataset's samples over ranks. With different numbers of samples, ranks would end at
    different steps; with different seeds, several ranks would read the same samples."""
    if loader is None or getattr(loader, "iterable", False):
        return {}
    seed = {"training_data's seed": str(loader.seed)} if getattr(loader, "shuffle", True) else {}
    return {"training_data of": f"{len(loader.dataset)} samples", **seed}


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's options: its values that are numbers, strings or tensors."""
    return {key: value for key, value in sorted(group.items()) if isinstance(value, int | float | str | tuple | Tensor | None)}


def check_alike(facts: Facts, group: Any = None, kind: Hashable = ()) -> None:
    """Raise the same ValueError on every rank of a process group if `difference` finds one. Collective over the group."""
    if why := difference(facts, group, kind):
        remedy = "Use the same config, model, optimizer, data and versions on every rank"
        raise ValueError(f"the ranks of this engine differ: {why}. {remedy}")


def difference(facts: Facts, group: Any = None, kind: Hashable = ()) -> str:
    """Compare the facts of those ranks of a process group that pass the same `kind`, such as their pipeline stage. Returns how they
    differ, or "", the same text on every rank. Collective over the group.

    Ranks gather one digest each, and the facts themselves only if the digests differ.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return ""
    digest = sha256(repr(list(facts.items())).encode()).digest()
    gathered = _gather((kind, digest), group)
    differing = [each for each, count in Counter(each for each, _ in dict.fromkeys(gathered)).items() if count > 1]
    if not differing:
        return ""
    ranks, by_rank = dist.get_process_group_ranks(group or dist.group.WORLD), _gather(facts, group)
    places = [[i for i, (other, _) in enumerate(gathered) if other == each] for each in differing]
    return "; ".join(describe([ranks[i] for i in of_kind], [by_rank[i] for i in of_kind]) for of_kind in places)


def check_alike_on(facts: Facts, axis: Axis, kind: Hashable = ()) -> None:
    """`check_alike` for the ranks of one axis."""
    if axis.size > 1:
        check_alike(facts, axis.group, kind)


def conflict(ranks: Iterable[T], by_rank: Sequence[Mapping[str, Any]]) -> tuple[str, T, Any, T, Any] | None:
    """The first name whose value differs between two ranks that have it: (name, rank, its value, other rank, its value)."""
    firsts: dict[str, tuple[T, Any]] = {}
    for rank, values in zip(ranks, by_rank, strict=True):
        for name, value in values.items():
            first, usual = firsts.setdefault(name, (rank, value))
            if value != usual:
                return name, first, usual, rank, value
    return None


def describe(ranks: Sequence[int], by_rank: Sequence[Facts]) -> str:
    """The differences of ranks from the most common value, or from the first rank's if none is most common."""
    refusals = [f"rank {rank} refuses {facts[_REFUSAL]}" for rank, facts in zip(ranks, by_rank, strict=True) if _REFUSAL in facts]
    if refusals:
        return "; ".join(refusals[:_MOST_SHOWN])
    differences = []
    for name in dict.fromkeys(name for facts in by_rank for name in facts):
        values = [facts.get(name) for facts in by_rank]
        usual = Counter(values).most_common(1)[0][0]
        like = ranks[values.index(usual)]
        for value in dict.fromkeys(each for each in values if each != usual):
            others = [rank for rank, each in zip(ranks, values, strict=True) if each == value]
            differences.append(_sentence(others, name, value, like, usual))
    if not differences:
        return "their parameters or buffers are in a different order"
    more = len(differences) - _MOST_SHOWN
    return "; ".join(differences[:_MOST_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _sentence(others: Sequence[int], name: str, value: str | None, like: int, usual: str | None) -> str:
    one = len(others) == 1
    subject = f"rank {others[0]}" if one else f"ranks {', '.join(map(str, others))}"
    if value is None:
        return f"{subject} {'lacks' if one else 'lack'} {name}, {usual} on rank {like}"
    has = f"{subject} {'has' if one else 'have'} {name} {value}"
    return f"{has}, which rank {like} lacks" if usual is None else f"{has} where rank {like} has {usual}"


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _gather(value: Any, group: Any) -> list[Any]:
    try:
        return gather_objects(value, group)
    except RuntimeError as error:
        if is_lost_rank(error):
            raise PeerLostError("another rank ended before this comparison: see that rank's output for the reason") from error
        raise
