"""Forwards of several micro-batches before their backwards, as pipeline schedules run them, give the bits of the plain order."""

from typing import Any

import pytest
from torch import Tensor

from tests import cases, toy
from tests.pool import distributed

MICROS, STEPS = 4, 2
ORDERS = {  # F and B of each micro-batch; backwards in the same order everywhere, so that gradients are added in the same order
    "plain": "F0 B0 F1 B1 F2 B2 F3 B3",
    "GPipe": "F0 F1 F2 F3 B0 B1 B2 B3",
    "1F1B, two stages": "F0 F1 B0 F2 B1 F3 B2 B3",
    "1F1B, three stages": "F0 F1 F2 B0 F3 B1 B2 B3",
}


def train(order: str, stage: int, transport: str, **blocks: Any) -> tuple[list[Tensor], list[float], Tensor]:
    engine = toy.make(toy.seeded(toy.Lm), stage, transport, gradient_accumulation_steps=MICROS, gradient_clipping=0.1, **blocks)
    losses, norms = [], []
    for step in range(STEPS):
        pending: dict[str, Tensor] = {}
        for action in ORDERS[order].split():
            kind, micro = action
            if kind == "F":
                pending[micro] = engine(toy.tokens(engine.mesh.batch.index, step, int(micro)))
                losses.append(pending[micro].detach())
            else:
                engine.backward(pending.pop(micro))
                engine.step()
        norms.append(engine.global_grad_norm)
    result = losses, norms, toy.checksum(engine)
    engine.destroy()
    return result


@distributed(world_size=2, transports=("shared", "gloo"))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_orders_of_pipelines_give_the_bits_of_the_plain_order(transport: str, dtype: str) -> None:
    for stage in cases.stages(transport):
        for poison in (False, True) if (dtype, stage) == ("fp32", 3) else (False,):
            blocks = {"dtype": dtype, "slipstream": {"poison_released": poison}}
            expected = train("plain", stage, transport, **blocks)
            for order in list(ORDERS)[1:] if cases.EVERYTHING or poison else list(ORDERS)[1 + stage % 2 :: 2]:
                assert train(order, stage, transport, **blocks) == expected, (stage, order, poison)
