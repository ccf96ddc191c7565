"""`MoE`: a layer of experts, of which each token uses k. It never drops a token unless it is asked to.

A layer is built whole, with all experts; `initialize` leaves a rank those of its place on the `ep` axis (moe/place.py). Tokens are
those of all leading dimensions; the router computes in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.activations.recompute import is_recomputing
from slipstream.moe import gate
from slipstream.moe.dispatch import run_experts
from slipstream.moe.gate import Routes, Score
from slipstream.moe.stack import ExpertStack
from slipstream.parallel.exchange import Exchange, gather_from, scatter_to


class Experts(nn.Module):
    """The experts of one layer, and the ranks that have the others.

    ep_size   ranks over which the experts are split; None: as the config says (expert_parallel.autoep_size)
    exchange  over these ranks, and `tokens` over the ranks of a replica, which share its tokens: set by `initialize`
    """

    def __init__(self, stack: ExpertStack, ep_size: int | None) -> None:
        super().__init__()
        if ep_size is not None and (ep_size < 1 or stack.num_experts % ep_size):
            raise ValueError(f"{stack.num_experts} experts cannot be split over ep_size ({ep_size}) ranks: it must divide them")
        self.stack, self.num_experts, self.ep_size = stack, stack.num_experts, ep_size
        self.exchange: Exchange | None = None
        self.tokens: Exchange | None = None

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        """x: [T, d]; returns the weighted sum of the experts' outputs."""
        experts, weights, kept = routes.experts, routes.weights, routes.kept
        if self.tokens is not None:
            x, experts, weights = (scatter_to(each, self.tokens, 0) for each in (x, experts, weights))
            kept = None if kept is None else scatter_to(kept, self.tokens, 0)
        out = run_experts(x, experts, weights, kept, self.num_experts, self.stack, self.exchange)
        return out if self.tokens is None else gather_from(out, self.tokens, 0)


class MoE(nn.Module):
    """A mixture of experts, without dropping: exact counts, sorted rows, one product per expert.

    hidden_size     features of a token
    expert          a module that maps [rows, hidden_size] to the same shape, of which each expert is a copy; or a callable that
                    builds one. Default: a gated MLP (SiLU) of `expert_size` features
    num_experts, k  experts of the layer, and of a token
    ep_size         ranks over which the experts are split; default: `expert_parallel.autoep_size` of the config
    score           "softmax" over the experts, or "sigmoid" of each (DeepSeek-V3)
    normalize       divide a token's weights by their sum; default: if k > 1
    num_groups, top_groups  a token uses experts of its `top_groups` best groups only
    scale           of the weights
    shared          a module that every token uses beside its experts
    residual        a module whose output is mixed with the experts' by learnt weights (PR-MoE, arXiv:2201.05596)
    jitter          in training, the router sees inputs times uniform numbers in [1 - jitter, 1 + jitter]
    balance_rate    if set, the choice of experts adds a bias per expert to the scores, which moves by so much after each update,
                    against the load (arXiv:2408.15664): balance without an auxiliary loss
    z_loss          its weight in `l_aux`

    Returns (output, l_aux, exp_counts): the auxiliary loss of balance, for the caller to weigh and add; int64 [num_experts], the
    routes to each expert of this rank's tokens. Raises ValueError if the sizes do not fit each other.
    """

    balance: Tensor | None
    load: Tensor
    last_load: Tensor

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module | Callable[[], nn.Module] | None = None,
        num_experts: int = 8,
        *,
        k: int = 2,
        ep_size: int | None = None,
        expert_size: int | None = None,
        score: Score = "softmax",
        normalize: bool | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
        shared: nn.Module | None = None,
        residual: nn.Module | None = None,
        jitter: float = 0.0,
        balance_rate: float | None = None,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        if not 1 <= k <= num_experts:
            raise ValueError(f"k ({k}) must lie in 1 to num_experts ({num_experts})")
        if num_experts % num_groups or not 1 <= top_groups <= num_groups or k > num_experts // num_groups * top_groups:
            raise ValueError(
                f"{top_groups} of {num_groups} groups of {num_experts} experts do not have k ({k}) experts: num_groups must divide "
                "num_experts, and top_groups be at least 1 and large enough"
            )
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"score {score!r} is neither 'softmax' nor 'sigmoid'")
        if expert is None:
            size = expert_size or 4 * hidden_size
            expert = lambda: GatedMLP(hidden_size, size)  # noqa: E731
        self.num_experts, self.k, self.score, self.scale = num_experts, k, score, scale
        self.normalize = k > 1 if normalize is None else normalize
        self.num_groups, self.top_groups, self.jitter, self.z_loss = num_groups, top_groups, jitter, z_loss
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = Experts(ExpertStack(expert, num_experts), ep_size)
        self.shared, self.residual = shared, residual
        self.coefficient = nn.Linear(hidden_size, 2) if residual is not None else None
        self.balance_rate = balance_rate
        # The bias in units of the rate: integers keep their dtype in an engine, and bf16 would lose the steps of a bias.
        self.register_buffer("balance", None if balance_rate is None else torch.zeros(num_experts, dtype=torch.int64))
        for name in ("load", "last_load"):  # routes in this training step so far, and in the last one (moe/balance.py)
            self.register_buffer(name, torch.zeros(num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.logits(tokens)
        routes = gate.choose(
            logits,
            self.k,
            score=self.score,
            normalize=self.normalize,
            bias=self.bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            scale=self.scale,
        )
        loss = routes.loss + self.z_loss * gate.z_loss(logits) if self.z_loss else routes.loss
        if self.training and torch.is_grad_enabled() and not is_recomputing():
            self.load += routes.counts
        out = self.experts(tokens, routes).view_as(x)
        if self.shared is not None:
            out = out + self.shared(x)
        if self.residual is not None and self.coefficient is not None:
            out = mix_residual(out, self.residual(x), self.coefficient(x))
        return out, loss, routes.counts

    @property
    def bias(self) -> Tensor | None:
        """[num_experts], added to the scores for the choice of experts."""
        return None if self.balance is None or self.balance_rate is None else self.balance * self.balance_rate

    def logits(self, tokens: Tensor) -> Tensor:
        """[T, num_experts], fp32."""
        inputs = tokens.float()
        if self.jitter and self.training:
            inputs = gate.jitter(inputs, self.jitter)
        return F.linear(inputs, self.router.weight.float())

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, k={self.k}"


def mix_residual(out: Tensor, dense: Any, coefficient: Tensor) -> Tensor:
    """The experts' and the dense branch's outputs by the two learnt weights of each token."""
    dense = dense[0] if isinstance(dense, tuple) else dense
    weights = coefficient.softmax(-1)
    return out * weights[..., :1] + dense * weights[..., 1:]


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * size, bias=False)
        self.down = nn.Linear(size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gates, values = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(F.silu(gates) * values)
        return out
