"""Calls that every rank of a job makes, as DeepSpeed's inference engines have them, and that rank 0 answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def from_leader(leads: bool, compute: Callable[[], T]) -> T:
    """What rank 0 computes, on all ranks. Collective over the job; an error of rank 0 is raised on all."""
    outcome: list[Any] = [None, None]  # an error, or the result
    if leads:
        try:
            outcome[1] = compute()
        except Exception as error:  # the others would wait for an answer
            outcome[0] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]
    result: T = outcome[1]
    return result
