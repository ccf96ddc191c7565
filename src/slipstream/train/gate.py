"""What stands in the way of an engine's calls: the reasons, and which calls are let through all the same.

Whoever makes a reason says what the user can do about it: it is the text of the RuntimeError of every call that it refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto


class Block(Enum):
    """A condition of an engine that refuses calls. Where there are several, the first is what a user is told."""

    DESTROYED = auto()
    BROKEN = auto()  # its states are lost: a disk or the optimizer failed
    CHANGING = auto()  # its model is in surgery, or was left half changed
    AVERAGED = auto()  # its weights are averages (ema.py)
    ASLEEP = auto()  # some of its states are away


# What each call does without; a call that is not here needs everything. A save that is being written needs none of the states.
LETS_THROUGH: Mapping[str, frozenset[Block]] = {
    "destroy": frozenset(Block),
    "finish_save": frozenset(Block) - {Block.DESTROYED},
    "explain": frozenset({Block.AVERAGED}),
    "forward": frozenset({Block.BROKEN, Block.AVERAGED, Block.ASLEEP}),  # units that are away refuse by name
    "gathered": frozenset({Block.DESTROYED, Block.CHANGING, Block.AVERAGED, Block.ASLEEP}),
    "named_weights": frozenset({Block.AVERAGED}),
    "save_pretrained": frozenset({Block.AVERAGED}),
    "surgery": frozenset({Block.CHANGING}),
    "wake": frozenset({Block.DESTROYED, Block.BROKEN, Block.ASLEEP}),  # destroy() wakes what sleeps
}


class Gate:
    """One engine's reasons. Shut by those who find or make the condition."""

    def __init__(self) -> None:
        self.reasons: dict[Block, str] = {}

    def __contains__(self, block: Block) -> bool:
        return block in self.reasons

    def shut(self, block: Block, reason: str) -> None:
        assert reason, f"{block} tells the user why, and what to do"
        self.reasons[block] = reason

    def open(self, block: Block) -> None:
        self.reasons.pop(block, None)

    def check(self, call: str) -> None:
        """Raises RuntimeError where something refuses `call`, a method's name or "gathered"."""
        if self.reasons:
            for block in Block:
                if block in self.reasons and block not in LETS_THROUGH.get(call, frozenset()):
                    raise RuntimeError(self.reasons[block])
