"""The one error of this package, and how ranks agree on it.

Every step that can fail on one rank runs through `Ranks`: outcomes are gathered on rank 0, and either every
rank goes on or every rank raises the same `CheckpointError`. A rank therefore never waits for one that has
given up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


ONE_PLACE = "the directory must be the same on every rank, on a file system that all hosts share"


class CheckpointError(ValueError):
    """A checkpoint could not be saved or loaded; nothing that was there before has changed."""

    on_all_ranks = False  # whether `Ranks` has raised it, the same on each


@dataclass(frozen=True, slots=True)
class _Failed:
    """What a rank tells the others of its error: text, since not every exception can be sent."""

    text: str


class Ranks:
    """The ranks that save or load together; `group=None` is a process on its own."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("checkpoint: this rank is not a member of the group it was given")

    def first(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.group is None:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=dist.get_global_rank(self.group, 0), group=self.group)
        return held[0]

    def gather(self, step: str, work: Callable[[], T]) -> list[T]:
        """Run `work` everywhere; rank 0 gets all results, the others an empty list. One failure fails all."""
        outcome, error = _attempt(work)
        everyone: list[Any] = [outcome] if self.group is None else [None] * self.size
        if self.group is not None:
            place = everyone if self.rank == 0 else None
            dist.gather_object(outcome, place, dst=dist.get_global_rank(self.group, 0), group=self.group)
        failed = {rank: told.text for rank, told in enumerate(everyone) if isinstance(told, _Failed)}
        failed = self.first(failed)
        if failed:
            raise self.failure(step, failed, error)
        return everyone if self.rank == 0 else []

    def decide(self, step: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and give every rank its result or its failure."""
        outcome, error = _attempt(work) if self.rank == 0 else (None, None)
        told: Any = self.first(outcome)
        if isinstance(told, _Failed):
            raise self.failure(step, {0: told.text}, error)
        return told

    def failure(self, step: str, failed: dict[int, str], own: BaseException | None) -> BaseException:
        """The error that every rank raises; a rank that was interrupted raises its own interruption."""
        if own is not None and not isinstance(own, Exception):
            return own
        by_text: dict[str, list[int]] = {}
        for rank, text in sorted(failed.items()):
            by_text.setdefault(text, []).append(rank)
        if len(by_text) == 1 and len(failed) == self.size:
            message = next(iter(by_text))
        else:
            each = (f"rank {_listed(ranks)} of {self.size}: {text}" for text, ranks in by_text.items())
            message = "; ".join(each)
        raised = CheckpointError(f"{step}: {message}")
        raised.on_all_ranks = True
        raised.__cause__ = own
        return raised


def describe(error: BaseException) -> str:
    """One line for a user: what speaks for itself as it is, anything else with its type."""
    if isinstance(error, CheckpointError) or type(error) is ValueError:
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _attempt(work: Callable[[], T]) -> tuple[T | _Failed, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:  # raised again by the caller, on every rank
        return _Failed(describe(error)), error


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
