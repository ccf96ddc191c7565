"""Calls that every rank of a job makes and rank 0 answers, as in DeepSpeed's inference engines."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_PATIENCE = timedelta(days=365)  # for rank 0's answer; the wait also ends if rank 0 does


class Leader:
    """The constructor is collective over the ranks of the job; call it before anything that may fail on one rank."""

    def __init__(self) -> None:
        self.leads = dist.get_rank() == 0
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def close(self) -> None:
        """Safe to call twice."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def answer(self, compute: Callable[[], T]) -> T:
        """Return rank 0's result on all ranks. Collective. Whatever rank 0 raises, even on Ctrl-C, is raised on all."""
        outcome: list[Any] = [None, None]  # an error, or the result
        raised: BaseException | None = None
        if self.leads:
            try:
                outcome[1] = compute()
            except BaseException as error:  # the others wait for an answer
                raised, outcome[0] = error, _sendable(error)
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if raised is not None or outcome[0] is not None:
            raise raised or outcome[0]
        result: T = outcome[1]
        return result


def _sendable(error: BaseException) -> Exception:
    """An error that other ranks can unpickle; for an interrupt, a RuntimeError that describes it."""
    described = RuntimeError(f"rank 0: {type(error).__name__}: {error}")
    if not isinstance(error, Exception):
        return described
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:  # its class is local to a function, or has other arguments
        return described
    return error if type(copied) is type(error) else described
