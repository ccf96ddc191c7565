"""What refuses an engine's calls, and which go through all the same."""

import pytest

from slipstream.train.gate import IGNORED_BLOCKS, Gate, Obstacle


def test_every_reason_refuses_every_call_that_does_not_do_without() -> None:
    for call in ("step", "save_checkpoint", *IGNORED_BLOCKS):
        for block in Obstacle:
            gate = Gate()
            gate.check(call)
            gate.shut(block, f"because of {block.name}")
            if block in IGNORED_BLOCKS.get(call, ()):
                gate.check(call)
            else:
                with pytest.raises(RuntimeError, match=f"^because of {block.name}$"):
                    gate.check(call)
            gate.open(block)
            gate.check(call)


def test_the_gravest_reason_is_told() -> None:
    gate = Gate()
    for block in reversed(Obstacle):
        gate.shut(block, block.name)
        with pytest.raises(RuntimeError, match=f"^{block.name}$"):
            gate.check("step")
    with pytest.raises(RuntimeError, match=r"^DESTROYED$"):
        gate.check("surgery")
