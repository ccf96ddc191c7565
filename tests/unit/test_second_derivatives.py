"""A second derivative (`create_graph=True`) is that of torch's operations, or an error: never another number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slipstream
from slipstream.activations.tiled import fused_linear_cross_entropy
from slipstream.inference.served import token_logprobs
from slipstream.moe import dispatch
from slipstream.moe.grouped import grouped_linear
from slipstream.ops import fused
from slipstream.parallel import ring, vocab_parallel_cross_entropy
from slipstream.parallel.exchange import LocalExchange
from slipstream.world.mesh import Axis

Function = Callable[[Tensor], Tensor]
ALONE = LocalExchange(Axis("sp", None, (0,), 0, 1), torch.device("cpu"))
TARGETS = torch.tensor([0, 5, 2, 7, 1, 3])
WEIGHTS = torch.linspace(-1, 1, 128).sin().view(2, 8, 8)
ROUTES = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [0, 1], [1, 0]])
ANGLES = [f(torch.linspace(0, 3, 48)).view(1, 6, 8) for f in (torch.cos, torch.sin)]


def attend(x: Tensor) -> Tensor:
    q = x.view(1, 1, 6, 8)
    return ring.ring_attention(q, q, q, ALONE, ring.Mask(ring.deal_spans(6, 1, True), True))


def attend_in_torch(x: Tensor) -> Tensor:
    scores = (x @ x.t() / 8**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ x


def route(x: Tensor) -> Tensor:
    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        return torch.cat([part @ w for part, w in zip(rows.split(counts), WEIGHTS, strict=True)])

    return dispatch.run_experts(x, ROUTES, x[:, :2], None, 2, compute, None)


def route_in_torch(x: Tensor) -> Tensor:
    of_experts = torch.stack([x @ w for w in WEIGHTS], 1)
    return (of_experts.gather(1, ROUTES[..., None].expand(-1, -1, 8)) * x[:, :2, None]).sum(1)


def turned(x: Tensor) -> Tensor:
    half = torch.cat([-x[:, 4:], x[:, :4]], 1)
    return (x * ANGLES[0][0] + half * ANGLES[1][0]) ** 3


def quantized() -> tuple[Function, Function]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8, bias=False))
    layer = slipstream.quantize(net, bits=8)[0]  # type: ignore[index]
    return layer, lambda x: x @ layer.dequantized().t()


PAIRS: dict[str, tuple[Function, Function]] = {
    "activation": (lambda x: fused.activation(x, "gelu"), F.gelu),
    "sum and norm": (lambda x: fused.add_norm(x, torch.ones(8), norm="rms", residual=x)[1], lambda x: F.rms_norm(2 * x, (8,))),
    "mlp": (lambda x: fused.mlp(x, *WEIGHTS, kind="silu"), lambda x: F.silu(x @ WEIGHTS[0].t()) @ WEIGHTS[1].t()),
    "cross-entropy": (lambda x: fused.cross_entropy(x, TARGETS), lambda x: F.cross_entropy(x, TARGETS)),
    "cross-entropy of a layer": (
        lambda x: fused_linear_cross_entropy(x, WEIGHTS[0], TARGETS),
        lambda x: F.cross_entropy(x @ WEIGHTS[0].t(), TARGETS),
    ),
    "rotary positions": (lambda x: fused.rotary(x[None, :, None], *ANGLES)[0, :, 0] ** 3, turned),
    "ring attention": (attend, attend_in_torch),
    "cross-entropy over tp": (
        lambda x: vocab_parallel_cross_entropy(x, TARGETS, ALONE),
        lambda x: F.cross_entropy(x, TARGETS, reduction="none"),
    ),
    "experts' products": (
        lambda x: grouped_linear(x, WEIGHTS, [4, 2]),
        lambda x: torch.cat([x[:4] @ WEIGHTS[0].t(), x[4:] @ WEIGHTS[1].t()]),
    ),
    "routes": (route, route_in_torch),
    "served log-probabilities": (
        lambda x: token_logprobs(x, TARGETS),
        lambda x: x.log_softmax(-1).gather(1, TARGETS[:, None])[:, 0],
    ),
    "quantized": quantized(),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_second_derivative_is_right_or_refused(name: str) -> None:
    def derivatives(function: Function) -> tuple[Tensor, Tensor]:
        """Of a penalty on the gradient; what comes in to that of the function is a constant."""
        x = torch.linspace(-2, 2, 48).cos().view(6, 8).requires_grad_()
        (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return grad.detach(), torch.autograd.grad(x.sum() + grad.square().sum(), x)[0]

    ours, torchs = PAIRS[name]
    wanted = derivatives(torchs)
    try:
        found = derivatives(ours)
    except RuntimeError as error:
        assert "has no second derivative, which create_graph=True asks for" in str(error), error
    else:
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
