"""fp32 products by oneDNN, those of 16 bits by fp32: the same numbers for every stride, and torch's own again afterwards."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.ops import matmul
from slipstream.world import host


@contextlib.contextmanager
def computed(ways: dict[torch.dtype, matmul.Way]) -> Iterator[list[tuple[int, ...]]]:
    """On any processor; the products that are computed in those ways, each with its rows, columns, and terms of a sum."""
    calls: list[tuple[int, ...]] = []

    def counted(way: matmul.Way) -> matmul.Way:
        def times(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
            calls.append((len(a), b.shape[1], b.shape[0]))
            return way.times(a, b, bias)

        return way._replace(times=times)

    was = matmul.use(False)
    with pytest.MonkeyPatch.context() as patch:
        seen = {dtype: counted(way) for dtype, way in ways.items()}
        patch.setattr(matmul, "ways", lambda: seen)
        assert matmul.use(True)
        yield calls
        matmul.use(False)
    matmul.use(was)


@pytest.fixture
def by_onednn() -> Iterator[list[tuple[int, ...]]]:
    with computed({torch.float32: matmul.Way("oneDNN", 8, matmul._by_onednn)}) as calls:
        yield calls


@pytest.fixture
def by_fp32(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """In pieces of 96 rows and columns, and of 50 terms."""
    monkeypatch.setattr(matmul, "_PIECE", 96)
    monkeypatch.setattr(matmul, "_DEPTH", 50)
    way = matmul.Way("fp32", 8, matmul._by_fp32)
    with computed({torch.bfloat16: way, torch.float16: way}) as calls:
        yield calls


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
        lambda: torch.mm(big[0, 0], big, out=big.clone()),
        lambda: torch.addmm(big[0], big, big[0, 0]),
    ):
        with pytest.raises(RuntimeError, match="matri"):
            call()
    assert not by_onednn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("right", ["rows", "columns", "gaps"])
def test_16_bits_are_rounded_once(by_fp32: list[tuple[int, ...]], dtype: torch.dtype, right: str) -> None:
    """Exact sums of exact products, rounded to the dtype: in pieces, with gaps between rows, with a bias, into an output."""
    a, bias = torch.randint(-8, 9, (200, 130)).to(dtype), torch.randint(-8, 9, (250,)).to(dtype)
    other = torch.randint(-8, 9, (130, 260)).to(dtype)[:, :250]
    b = {"rows": other.contiguous(), "columns": other.t().contiguous().t(), "gaps": other}[right]
    exact = a.double() @ b.double()
    assert torch.equal(a @ b, exact.to(dtype)) and torch.equal(torch.addmm(bias, a, b), (exact + bias).to(dtype))
    wider = torch.zeros(200, 500, dtype=dtype)
    assert torch.equal(torch.mm(a, b, out=wider[:, ::2]), exact.to(dtype)) and not wider[:, 1::2].any()
    assert torch.equal(torch.addmm(bias, a, b, out=wider[:, ::2]), (exact + bias).to(dtype)) and not wider[:, 1::2].any()
    matrix = torch.randint(-8, 9, (200, 250)).to(dtype)
    assert torch.equal(torch.addmm(matrix, a, b), (exact + matrix).to(dtype))
    assert torch.equal(matrix.clone().addmm_(a, b), (exact + matrix).to(dtype))
    assert by_fp32 == 6 * [(200, 250, 130)]
    few = a[:7]
    assert torch.equal(few @ b, exact[:7].to(dtype)) and torch.equal(a.float() @ b.float(), exact.float()) and len(by_fp32) == 6


def test_an_output_under_autocast(by_fp32: list[tuple[int, ...]]) -> None:
    """A product that fp16 does not have: `out=` is no operation of autocast, and the wide operands are none of its own."""
    a, b, out = (torch.full((128, 128), 512.0).bfloat16() for _ in range(3))
    with torch.autocast("cpu", torch.float16):
        torch.mm(a, b, out=out)
    assert by_fp32 == [(128, 128, 128)] and torch.equal(out, torch.full_like(out, 512.0 * 512 * 128))


def test_without_a_dtype_that_gains_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    was = matmul.use(False)
    monkeypatch.setattr(matmul, "ways", lambda: {torch.bfloat16: matmul.Way("fp32", 8, matmul._by_fp32)})
    assert not matmul.use(True, [torch.float32]) and matmul.use(True, [torch.float32, torch.bfloat16]) and not matmul.use(False)
    monkeypatch.undo()
    matmul.use(was)


def test_a_step_in_16_bits(by_fp32: list[tuple[int, ...]]) -> None:
    """Of a layer whose numbers, sums and gradients bf16 has."""
    layer, x = nn.Linear(128, 256).bfloat16(), torch.randint(-1, 2, (4, 32, 128)).bfloat16().requires_grad_()
    with torch.no_grad():
        for each in layer.parameters():
            each.copy_(torch.randint(-1, 2, each.shape))
    twin, y = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    grad = torch.randint(-1, 2, (4, 32, 256))
    layer(x).backward(grad.bfloat16())
    twin(y).backward(grad.double())
    assert sorted(by_fp32) == sorted([(128, 256, 128), (128, 128, 256), (256, 128, 128)])
    for ours, exact in ((x, y), (layer.weight, twin.weight), (layer.bias, twin.bias)):
        assert torch.equal(ours.grad, exact.grad.bfloat16())  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("GenuineIntel", "avx2", {"bfloat16": 8, "float16": 8}),
        ("GenuineIntel", "avx2 avx512f", {"bfloat16": 8, "float16": 8}),
        ("GenuineIntel", "avx512f avx512_bf16 avx512_fp16", {"bfloat16": 64}),
        ("GenuineIntel", "avx512f avx512_bf16 avx512_fp16 amx_bf16", {}),
        ("AuthenticAMD", "avx2", {"bfloat16": 8, "float16": 8}),
        ("AuthenticAMD", "avx512f avx512_bf16", {"float16": 8}),
        ("GenuineIntel", "", {}),  # another machine
    ],
)
def test_processors(monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, expected: dict[str, int]) -> None:
    monkeypatch.setattr(host, "processor", lambda: {"vendor_id": vendor, "flags": flags})
    found = {str(dtype).removeprefix("torch."): way.rows for dtype, way in matmul.ways.__wrapped__().items()}
    wide = vendor != "GenuineIntel" and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    assert found == expected | ({"float32": 8} if wide else {})


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
    monkeypatch.setattr(matmul, "use", lambda faster, _: chosen.append(faster) or faster)
    config: dict[str, Any] = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for own in ({}, {"products": "torch"}, {"products": "fastest"}):
        slipstream.initialize(model=nn.Linear(2, 2), config=config | {"slipstream": own})[0].destroy()
    assert chosen == [True, False, True]
