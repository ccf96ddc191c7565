"""Kernels write fp32 numbers into the host's memory, whatever `torch.set_default_dtype` and `set_default_device` say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream import ops
from slipstream.ops import fused, grid, rows, wire
from slipstream.ops.block_sparse import BlockLayout, block_sparse_attention

CPU = torch.device("cpu")


@pytest.fixture(params=[torch.bfloat16, torch.float64, torch.device("meta")], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    dtype, device = torch.get_default_dtype(), torch.get_default_device()

    def change() -> None:
        (torch.set_default_dtype if isinstance(request.param, torch.dtype) else torch.set_default_device)(request.param)

    yield change
    torch.set_default_dtype(dtype)
    torch.set_default_device(None if device == CPU else device)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(CPU).manual_seed(0), dtype=torch.float32, device=CPU)


def normed() -> list[Tensor]:
    x, weight = random(7, 40).requires_grad_(), random(40).requires_grad_()
    _, out = fused.add_norm(x, weight, norm="rms")
    out.sum().backward()
    return [out.detach(), x.grad, weight.grad]  # type: ignore[list-item]


def stepped() -> list[Tensor]:
    state, p = ops.Blocks.zeros(600, torch.int8), random(600)
    ops.lion(p, random(600), state, None, scale=1.0, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0)
    return [p, *state]


def on_the_wire() -> list[Tensor]:
    values, error, out = random(600), *(torch.zeros(wire.nbytes(600, bits), dtype=torch.uint8, device=CPU) for bits in (8, 4))
    for _ in range(2):
        wire.encode(values, out, 4, wire.Feedback(error, 0.3))
    return [error, out]


def attended() -> Tensor:
    layout = BlockLayout(torch.ones(1, 4, 4, dtype=torch.bool, device=CPU), 16, causal=True)
    return block_sparse_attention(random(1, 2, 64, 16), random(1, 1, 64, 16), random(1, 1, 64, 16), layout)


FORM = rows.RowForm(bits=4, columns=64)
PACKED = slipstream.quantize(nn.Linear(64, 48), "int8")
CALLS: dict[str, Callable[[], Any]] = {
    "int8": lambda: ops.dequantize_int8(*ops.quantize_int8(random(9, 64))),
    "int4": lambda: ops.dequantize_int4(*ops.quantize_int4(random(9, 64), 32)),
    "NF4": lambda: rows.dequantize_rows(rows.quantize_rows(random(9, 64), FORM), FORM, torch.float32),
    "ends": lambda: grid.group_ends(random(9, 64), 9),
    "norm": normed,
    "dropout": lambda: fused.kept(3, 5, 40, 0.25, CPU),
    "optimizer": stepped,
    "wire": on_the_wire,
    "attention": attended,
    "product": lambda: PACKED(random(5, 64)),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_without(name: str, default: Callable[[], None]) -> None:
    rows._pairs.cache_clear()  # made under the other defaults too
    expected = CALLS[name]()
    rows._pairs.cache_clear()
    default()
    found = CALLS[name]()
    rows._pairs.cache_clear()
    for a, b in zip(*([each] if isinstance(each, Tensor) else each for each in (found, expected)), strict=True):
        assert a.dtype is b.dtype and a.device == b.device == CPU and torch.equal(a, b)
