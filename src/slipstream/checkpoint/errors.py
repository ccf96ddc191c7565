"""The one error of this package, and how ranks agree on it.

Every step that can fail on one rank runs through `Ranks`. It gathers the outcomes on rank 0, and then either every rank continues
or every rank raises the same `CheckpointError`. So a rank never waits for one that has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


ONE_PLACE = "the directory must be the same on every rank, on a file system that all hosts share"


class CheckpointError(ValueError):
    """A checkpoint could not be saved or loaded; the state before the call is unchanged."""

    on_all_ranks = False  # whether `Ranks` has raised it on every rank


@dataclass(frozen=True, slots=True)
class _Failed:
    """A rank's error as text, because not every exception can be pickled."""

    text: str


class Ranks:
    """The ranks that save or load together; `group=None` is a single process."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.index = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        if self.index < 0:
            raise ValueError("checkpoint: this rank is not a member of `group`")

    def first(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=dist.get_global_rank(self.group, 0), group=self.group)
        return values[0]

    def gather(self, step: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank. Rank 0 gets all results, the others an empty list. If one rank fails, all raise."""
        outcome, error = _attempt(work)
        outcomes: list[Any] = [outcome] if self.group is None else [None] * self.size
        if self.group is not None:
            target = outcomes if self.index == 0 else None
            dist.gather_object(outcome, target, dst=dist.get_global_rank(self.group, 0), group=self.group)
        failed = self.first({rank: each.text for rank, each in enumerate(outcomes) if isinstance(each, _Failed)})
        if failed:
            raise self.failure(step, failed, error)
        return outcomes if self.index == 0 else []

    def decide(self, step: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0; every rank returns its result or raises its failure."""
        outcome, error = _attempt(work) if self.index == 0 else (None, None)
        result: Any = self.first(outcome)
        if isinstance(result, _Failed):
            raise self.failure(step, {0: result.text}, error)
        return result

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
            message = "; ".join(f"rank {_listed(ranks)} of {self.size}: {text}" for text, ranks in by_text.items())
        raised = CheckpointError(f"{step}: {message}")
        raised.on_all_ranks = True
        raised.__cause__ = None if isinstance(own, (CheckpointError, OSError)) else own  # their texts are in the message
        return raised


def describe(error: BaseException) -> str:
    """One line for the user: the text of CheckpointError and ValueError, any other error with its type."""
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
