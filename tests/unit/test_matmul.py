"""fp32 products by oneDNN: the same numbers, forward and backward, for every stride, and torch's own again afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.ops import matmul


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """On any processor; the products that oneDNN computed, each with its rows, columns, and terms of a sum."""
    calls: list[tuple[int, ...]] = []
    times = matmul._times

    def seen(a: Tensor, b: Tensor, *bias: Tensor) -> Any:
        calls.append((len(a), b.shape[1], b.shape[0]))
        return times(a, b, *bias)

    monkeypatch.setattr(matmul, "_times", seen)
    monkeypatch.setattr(matmul, "gains", lambda: True)
    was = matmul.use(False)
    assert matmul.use(True)
    yield calls
    monkeypatch.undo()
    matmul.use(False)
    matmul.use(was or matmul.gains())


@pytest.mark.parametrize("left", ["rows", "columns", "gaps", "repeated"])
@pytest.mark.parametrize("right", ["rows", "columns", "gaps"])
def test_the_numbers_of_torch(by_onednn: list[tuple[int, ...]], left: str, right: str) -> None:
    def matrix(rows: int, columns: int, kind: str) -> Tensor:
        if kind == "columns":
            return torch.randn(columns, rows).t()
        if kind == "gaps":
            return torch.randn(rows, columns + 5)[:, :columns]
        return torch.randn(1, columns).expand(rows, columns) if kind == "repeated" else torch.randn(rows, columns)

    a, b, bias = matrix(96, 200, left), matrix(200, 160, right), torch.randn(160)
    wide = (a.double() @ b.double()).float()
    torch.testing.assert_close(a @ b, wide, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(torch.addmm(bias, a, b), wide + bias, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(torch.addmm(wide, a, b, beta=0.5, alpha=2), 2.5 * wide, atol=1e-4, rtol=1e-5)
    assert len(by_onednn) == (0 if left == "repeated" else 2)
    wider = torch.zeros(96, 320)
    assert torch.equal(torch.mm(a, b, out=wider[:, ::2]), a @ b) and not wider[:, 1::2].any()
    assert torch.equal(torch.addmm(bias, a, b, out=wider[:, ::2]), torch.addmm(bias, a, b)) and not wider[:, 1::2].any()
    torch.testing.assert_close(torch.mm(a, b, out=torch.empty(0)), wide, atol=1e-4, rtol=1e-5)


def test_a_linear_layer_with_gradients(by_onednn: list[tuple[int, ...]]) -> None:
    layer, x = nn.Linear(128, 256), torch.randn(4, 32, 128, requires_grad=True)
    twin, y = nn.Linear(128, 256).double(), x.detach().double().requires_grad_()
    twin.load_state_dict(layer.state_dict())
    layer(x).square().sum().backward()
    twin(y).square().sum().backward()
    assert sorted(by_onednn) == sorted([(128, 256, 128), (128, 128, 256), (256, 128, 128)])
    for ours, exact in ((x, y), (layer.weight, twin.weight), (layer.bias, twin.bias)):
        torch.testing.assert_close(ours.grad, exact.grad.float(), atol=1e-3, rtol=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize("transposed", [False, True])
def test_sizes_that_change_make_few_shapes(
    by_onednn: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, transposed: bool
) -> None:
    """Rows, as in a forward, or the terms of sums, as in a weight's gradient."""
    shapes, linear = set[tuple[int, ...]](), matmul._linear

    def seen(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        shapes.add((*a.shape, b.shape[1]))
        return linear(a, b, bias)

    monkeypatch.setattr(matmul, "_linear", seen)
    for rows in range(130, 190, 7):
        x, other = torch.randn(rows, 200), torch.randn(rows if transposed else 200, 160)
        product = (x.t() if transposed else x) @ other
        torch.testing.assert_close(product, ((x.t() if transposed else x).double() @ other.double()).float(), atol=1e-4, rtol=1e-5)
        assert product.is_contiguous()
    padded = {rows + -rows % 16 for rows in range(130, 190, 7)}
    assert len(by_onednn) == 9 and shapes == {(200, rows, 160) if transposed else (rows, 200, 160) for rows in padded}
    assert len(padded) == 4


@pytest.mark.parametrize("transposed", [False, True])
def test_padding_costs_an_eighth_at_most(
    by_onednn: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, transposed: bool
) -> None:
    rows_of, linear = dict[int, int](), matmul._linear

    def seen(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        rows_of[rows] = a.shape[1] if transposed else len(a)
        return linear(a, b, bias)

    monkeypatch.setattr(matmul, "_linear", seen)
    other = torch.randn(512, 512)
    for rows in (8, 9, 17, 33, 47, 65, 130, 257, 513, 1000, 2049):
        x = torch.randn(rows, 512)
        _ = x.t() @ torch.randn(rows, 512) if transposed else x @ other
    assert len(rows_of) == len(by_onednn) == 11 and all(rows <= padded <= rows * 1.125 for rows, padded in rows_of.items())
    assert rows_of[1000] == 1024 and rows_of[2049] == 2049  # 2^29 multiplications: a new kernel costs no more than padding


def test_what_torch_keeps(by_onednn: list[tuple[int, ...]]) -> None:
    """Small products, single rows, other dtypes, and shapes that do not fit, whose error is torch's."""
    big = torch.randn(256, 256)
    for a, b in ((big[:2], big), (big[:16, :16], big[:16, :16]), (big.double(), big.double()), (big.bfloat16(), big.bfloat16())):
        assert (a @ b).dtype is a.dtype
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(big, big[:200])
    for call in (
        lambda: torch.mm(big[0], big),
        lambda: torch.mm(big, big[0], out=big.clone()),
        lambda: torch.addmm(big, big[0], big),
    ):
        with pytest.raises(RuntimeError, match="matri"):
            call()
    assert not by_onednn


def test_undone_it_is_torchs_own(by_onednn: list[tuple[int, ...]]) -> None:
    matmul.use(False)
    big = torch.randn(300, 300)
    before = big @ big
    assert matmul.use(True) and matmul.use(True) and not by_onednn
    torch.testing.assert_close(big @ big, before, atol=1e-3, rtol=1e-5)
    assert len(by_onednn) == 1 and not matmul.use(False)
    assert torch.equal(big @ big, before) and len(by_onednn) == 1


def test_the_config_chooses_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[bool] = []
    monkeypatch.setattr(matmul, "use", lambda onednn: chosen.append(onednn) or onednn)
    config: dict[str, Any] = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for own in ({}, {"products": "torch"}, {"products": "onednn"}):
        slipstream.initialize(model=nn.Linear(2, 2), config=config | {"slipstream": own})[0].destroy()
    assert chosen == [True, False, True]
