"""`slipstream.activations.tiled`: the same numbers as in one piece, and never the piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from slipstream.activations.tiled import TiledLinear, fused_linear_cross_entropy, tiled_mlp

N, H, V = 24, 8, 40


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [t.to(dtype).requires_grad_() for t in (torch.randn(2, N // 2, H), torch.randn(V, H), torch.randn(V))]


def targets() -> Tensor:
    target = torch.randint(V, (2, N // 2), generator=torch.Generator().manual_seed(0))
    target[0, 3] = target[1, 5] = -100
    return target


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, softcap: float | None = None, **options: Any) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(
        logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)), targets().flatten(), **options
    )


def test_the_fused_loss_computes_no_gradients_without_grad() -> None:
    hidden, weight, bias = inputs(torch.float32)
    counts = []
    for loss in (lambda: plain(hidden, weight, bias), lambda: fused_linear_cross_entropy(hidden, weight, targets(), bias)):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            loss()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 2 * N * H * V


@pytest.mark.parametrize("tile", [1, 7, N, 100, None])
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"softcap": 2.0}, {"softcap": 3.0, "label_smoothing": 0.2}]
)
def test_the_fused_loss_is_the_plain_one(options: dict[str, Any], tile: int | None) -> None:
    expected, actual = inputs(), inputs()
    a = plain(*expected, **options)
    b = fused_linear_cross_entropy(actual[0], actual[1], targets(), actual[2], tile=tile, **options)
    torch.testing.assert_close(b, a, rtol=1e-12, atol=0)
    torch.autograd.backward(3 * a)
    torch.autograd.backward(3 * b)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-12)


def test_the_fused_loss_ignores_what_it_is_told_to() -> None:
    hidden, weight, _ = inputs()
    target = targets().clamp(min=0)
    expected = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), target.flatten(), ignore_index=0)
    torch.testing.assert_close(fused_linear_cross_entropy(hidden, weight, target, ignore_index=0), expected)
    nothing = fused_linear_cross_entropy(hidden, weight, torch.full_like(target, -100))
    assert nothing.isnan(), "as in torch: a mean over nothing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_loss_in_half_precision_is_as_good_as_the_plain_one(dtype: torch.dtype) -> None:
    """Both against float64; also where the mean's factor and the gradient are too small for fp16."""
    exact = inputs(dtype)
    wide = [t.detach().double().requires_grad_() for t in exact]
    actual, ordinary = [t.detach().clone().requires_grad_() for t in exact], [t.detach().clone().requires_grad_() for t in exact]
    scale = 1e-4
    loss = fused_linear_cross_entropy(actual[0], actual[1], targets(), actual[2], tile=4)
    assert loss.dtype is torch.float32
    torch.autograd.backward(loss * scale)
    torch.autograd.backward(plain(*wide) * scale)
    torch.autograd.backward(plain(*ordinary) * scale)
    for x, y, z in zip(actual, wide, ordinary, strict=True):
        assert x.grad is not None and y.grad is not None and z.grad is not None and x.grad.dtype is dtype
        error, other = ((g.double() - y.grad).norm() / y.grad.norm() for g in (x.grad, z.grad))
        assert error <= 1.5 * other


def test_the_fused_loss_under_autocast() -> None:
    expected, actual = inputs(torch.float32), inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        a = plain(*expected)
        b = fused_linear_cross_entropy(actual[0], actual[1], targets(), actual[2], tile=8)
    torch.testing.assert_close(b, a, rtol=1e-2, atol=0)
    torch.autograd.backward(b)
    assert all(t.grad is not None and t.grad.dtype is torch.float32 for t in actual)


def test_no_tensor_is_as_large_as_the_logits() -> None:
    n, h, v = 4096, 8, 256
    hidden, weight = torch.randn(n, h, requires_grad=True), torch.randn(v, h, requires_grad=True)
    target = torch.randint(v, (n,))
    for tile, most in ((16, n * h), (200, 200 * v), (None, n * h)):
        with Largest() as largest:
            fused_linear_cross_entropy(hidden, weight, target, tile=tile).backward()  # type: ignore[no-untyped-call]
        assert largest.numel <= most < n * v / 10
    with Largest() as largest:
        torch.autograd.backward(F.cross_entropy(F.linear(hidden, weight), target))
    assert largest.numel == n * v


def test_frozen_and_without_gradients() -> None:
    hidden, weight, _ = inputs()
    weight.requires_grad_(False)
    loss = fused_linear_cross_entropy(hidden, weight, targets())
    torch.autograd.backward(loss)
    assert weight.grad is None and hidden.grad is not None
    with torch.no_grad():
        assert not fused_linear_cross_entropy(hidden, weight, targets()).requires_grad


def test_the_fused_loss_refuses_by_name() -> None:
    hidden, weight, _ = inputs()
    loss = fused_linear_cross_entropy(hidden, weight, targets())
    with pytest.raises(RuntimeError, match="fused_linear_cross_entropy has no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(ValueError, match=r"need a target of shape \(2, 12\), got \(24,\)"):
        fused_linear_cross_entropy(hidden, weight, targets().flatten())
    with pytest.raises(ValueError, match="tile is 0"):
        fused_linear_cross_entropy(hidden, weight, targets(), tile=0)
    with pytest.raises(ValueError, match="reduction is 'none'"):
        fused_linear_cross_entropy(hidden, weight, targets(), reduction="none")  # type: ignore[arg-type]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("tiles", [1, 3, 100])
def test_a_tiled_mlp_holds_one_tile(tiles: int) -> None:
    torch.manual_seed(0)
    mlp, x = Mlp().double(), torch.randn(2, 10, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
    with Largest() as largest:
        y = tiled_mlp(mlp, x, tiles)
        actual = torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])
    torch.testing.assert_close(actual, expected)
    assert largest.numel <= max(2 * -(-10 // tiles) * 64, 8 * 64)  # a tile's inside, or a weight


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("ins", "outs"), [(1, 1), (1, 4), (3, 1), (3, 4)])
def test_tiled_linear_is_linear(ins: int, outs: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(10, 14, bias=bias), torch.randn(5, 10)
    tiled = TiledLinear(10, 14, bias, in_splits=ins, out_splits=outs, init_linear=linear)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in linear.parameters())
    torch.testing.assert_close(tiled(x), linear(x))
    parts = TiledLinear(10, 14, bias, ins, outs, input_is_already_split=True, combine_out_splits=False, init_linear=linear)
    outputs = parts(x.split(parts.in_sizes, -1))
    assert len(outputs) == outs
    torch.testing.assert_close(torch.cat(outputs, -1), linear(x))


def test_tiled_linear_refuses() -> None:
    with pytest.raises(ValueError, match="in_splits is 11"):
        TiledLinear(10, 14, in_splits=11)
    with pytest.raises(ValueError, match="out_splits is 0"):
        TiledLinear(10, 14, out_splits=0)
    with pytest.raises(ValueError, match="shape"):
        TiledLinear(10, 14).copy_params_from(nn.Linear(14, 10))
    with pytest.raises(ValueError, match="bias"):
        TiledLinear(10, 14).copy_params_from(nn.Linear(10, 14, bias=False))
