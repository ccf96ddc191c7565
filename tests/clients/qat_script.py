"""Quantization-aware training through torchao: a model that it prepared trains as in plain torch, and is converted by it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig

from tests import toy

STEPS, WORLD, RATE = 4, 2, 0.1
BASE = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))


def prepared() -> Any:
    """Linear layers of a class of torchao's, which rounds its inputs and weights in the forward."""
    model = toy.seeded(lambda: toy.Lm(32))
    quantize_(model, QATConfig(BASE, step="prepare"))
    assert type(model.blocks[0].up).__name__ == "FakeQuantizedLinear"
    return model


def converted(model: Any) -> Tensor:
    """Outputs after torchao has made the weights codes."""
    quantize_(model, QATConfig(BASE, step="convert"))
    assert type(model.blocks[0].up).__name__ == "Linear" and type(model.blocks[0].up.weight) is not torch.nn.Parameter
    with torch.no_grad():
        loss: Tensor = model(toy.tokens(0, 99))
    return loss


def trains() -> None:
    """Each step, from the weights that the engine has, is that of plain torch: a code that turned would be told from an error."""
    exact = toy.seeded(lambda: toy.Lm(32))(toy.tokens(0, 0)).item()
    for stage in range(4):
        model, twin = prepared(), prepared()
        assert abs(exact - twin(toy.tokens(0, 0)).item()) > 1e-3  # the rounding is not nothing
        sgd = torch.optim.SGD(twin.parameters(), lr=RATE)
        engine = toy.make(model, stage, "gloo", optimizer={"type": "SGD", "params": {"lr": RATE}})
        for step in range(STEPS):
            twin.load_state_dict(engine.state_dict())
            expected = [twin(toy.tokens(rank, step)) for rank in range(WORLD)]
            torch.stack(expected).mean().backward()
            sgd.step()
            sgd.zero_grad()
            loss = engine(toy.tokens(engine.rank, step))
            engine.backward(loss)
            engine.step()
            torch.testing.assert_close(loss, expected[engine.rank], rtol=0, atol=0)
            torch.testing.assert_close(engine.state_dict(), dict(twin.state_dict()), rtol=1e-5, atol=2e-7)
        twin.load_state_dict(engine.state_dict())
        engine.destroy()
        torch.testing.assert_close(converted(model), converted(twin), rtol=0, atol=0)
    torch.distributed.destroy_process_group()
