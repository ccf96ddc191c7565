"""Conditions that block an engine's methods, and the methods that work regardless.

The reason of a block is the text of the RuntimeError that blocked calls raise, so it says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto


class Obstacle(Enum):
    """A condition of an engine that blocks calls. If several apply, the error reports the first."""

    DESTROYED = auto()
    BROKEN = auto()  # its states are lost: a disk or the optimizer failed
    CHANGING = auto()  # its model is in surgery, or a failed surgery changed it
    AVERAGED = auto()  # its weights are averages (ema.py)
    ASLEEP = auto()  # sleep() moved some of its states away


# The blocks that each call ignores; all others block it. An asynchronous save in flight needs none of the states.
IGNORED_BLOCKS: Mapping[str, frozenset[Obstacle]] = {
    "destroy": frozenset(Obstacle),
    "finish_save": frozenset(Obstacle) - {Obstacle.DESTROYED},
    "explain": frozenset({Obstacle.AVERAGED}),
    "forward": frozenset({Obstacle.BROKEN, Obstacle.AVERAGED, Obstacle.ASLEEP}),  # sleeping units raise their own error
    "gathered": frozenset({Obstacle.DESTROYED, Obstacle.CHANGING, Obstacle.AVERAGED, Obstacle.ASLEEP}),
    "generate": frozenset({Obstacle.AVERAGED, Obstacle.ASLEEP}),  # with the weights that were handed over before
    "log": frozenset(Obstacle) - {Obstacle.DESTROYED},
    "named_weights": frozenset({Obstacle.AVERAGED}),
    "save_pretrained": frozenset({Obstacle.AVERAGED}),
    "surgery": frozenset({Obstacle.CHANGING}),
    "wake": frozenset({Obstacle.DESTROYED, Obstacle.BROKEN, Obstacle.ASLEEP}),  # destroy() calls wake()
}


class Gate:
    """The current blocks of one engine, each with its reason."""

    def __init__(self) -> None:
        self.reasons: dict[Obstacle, str] = {}

    def __contains__(self, block: Obstacle) -> bool:
        return block in self.reasons

    def shut(self, block: Obstacle, reason: str) -> None:
        assert reason, f"{block} needs a reason: it is the user's error message"
        self.reasons[block] = reason

    def open(self, block: Obstacle) -> None:
        self.reasons.pop(block, None)

    def check(self, call: str) -> None:
        """Raise RuntimeError if a block refuses `call`, a method's name or "gathered"."""
        for block in Obstacle if self.reasons else ():
            if block in self.reasons and block not in IGNORED_BLOCKS.get(call, ()):
                raise RuntimeError(self.reasons[block])
