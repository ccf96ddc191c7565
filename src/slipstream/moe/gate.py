"""Routing: which experts each token goes to, with what weight, and the losses that balance them. Pure functions of the logits.

T      tokens of this rank
E      experts of the whole layer
k      experts per token
route  one token's assignment to one expert; a dropped route is neither sent nor computed

All arithmetic is fp32. The gates of DeepSpeed's `MoE` (`top1`, `top2`, `top_k`) follow GShard (arXiv:2006.16668) and Switch
(arXiv:2101.03961); `choose` has the routers of later models (DeepSeek-V3, arXiv:2412.19437; z-loss: ST-MoE, arXiv:2202.08906).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Score = Literal["softmax", "sigmoid"]
Drop = Literal["score", "position", "random"]


class Routes(NamedTuple):
    """The routes of all tokens."""

    experts: Tensor  # [T, k], int64
    weights: Tensor  # [T, k], fp32, differentiable; 0 where dropped
    kept: Tensor | None  # [T, k], bool; None: no route is dropped
    loss: Tensor  # [], the auxiliary loss
    counts: Tensor  # [E], int64: routes to each expert, before any is dropped


@dataclass(frozen=True, slots=True)
class Capacity:
    """The number of routes that one expert accepts from a rank's T tokens: max(ceil(k T / E x factor), least).

    Raises ValueError for a capacity of 0, or for a factor that is negative or not finite.
    """

    factor: float
    eval_factor: float
    least: int

    def __post_init__(self) -> None:
        if not all(0 <= factor < math.inf for factor in (self.factor, self.eval_factor)):
            raise ValueError(
                f"capacity_factor ({self.factor}) and eval_capacity_factor ({self.eval_factor}) must be finite and not negative; "
                "to drop no tokens, slipstream.moe.MoE has capacity_factor=None, and DeepSpeed's drop_tokens=False"
            )
        if min(self.factor, self.eval_factor) <= 0 and self.least < 1:
            raise ValueError(
                f"capacity_factor ({self.factor}), eval_capacity_factor ({self.eval_factor}) and min_capacity ({self.least}) leave "
                "an expert no token: raise one, or drop no tokens (slipstream.moe.MoE: capacity_factor=None; DeepSpeed's: "
                "drop_tokens=False)"
            )

    def of(self, logits: Tensor, k: int, *, training: bool) -> int:
        num_tokens, num_experts = logits.shape
        factor = torch.tensor((self.factor if training else self.eval_factor) * k)
        return max(int(torch.ceil(num_tokens / num_experts * factor)), self.least)


def top1(
    logits: Tensor, most: int | None, *, noisy: bool = False, random_selection: bool = True, used: Tensor | None = None
) -> Routes:
    """The expert with the largest probability (Switch).

    logits            [T, E]
    most              number of routes that an expert accepts; None: all
    noisy             choose by logits with Gumbel noise ("RSample")
    random_selection  an expert over its capacity accepts random tokens, else the first ones
    used              [T], 0 for tokens that go to no expert; None: all are used
    """
    probs = logits.softmax(1)
    chosen = (logits + gumbel(logits) if noisy else probs).argmax(1)
    mask, chosen = F.one_hot(chosen, logits.shape[1]), chosen[:, None]
    kept = None
    if used is not None:
        mask = mask * used.to(mask.dtype).view(-1, 1)
        kept = mask.sum(1, keepdim=True) > 0
    loss = _balance(probs, mask, 1)
    if most is not None:
        order = torch.rand_like(probs).gather(1, chosen) if random_selection else None
        kept = within(chosen, logits.shape[1], most, order, kept)
    return _routes(chosen, probs.gather(1, chosen), kept, loss, mask)


def top2(logits: Tensor, most: int | None, *, sampled: bool = True) -> Routes:
    """GShard's two experts. sampled: the second one is drawn, by Gumbel noise. Second choices queue after all first ones."""
    probs, num = logits.softmax(1), logits.shape[1]
    first = probs.argmax(1)
    mask1 = F.one_hot(first, num)
    noisy = logits + gumbel(logits) if sampled else logits
    second = noisy.masked_fill(mask1.bool(), -torch.inf).argmax(1)
    mask2 = F.one_hot(second, num)
    chosen = torch.stack([first, second], 1)
    loss = _balance(probs, mask1, 1)
    kept = None if most is None else within(chosen, num, most)
    return _routes(chosen, _shares(probs.gather(1, chosen), kept), kept, loss, mask1 + mask2)


def top_k(logits: Tensor, k: int, most: int | None) -> Routes:
    """The k largest probabilities. An expert over its capacity accepts the tokens with its largest ones."""
    probs = logits.softmax(1)
    chosen = probs.topk(k, 1).indices
    mask = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, chosen, True)
    loss = _balance(probs, mask, k)
    weights = probs.gather(1, chosen)
    kept = None if most is None else within(chosen, logits.shape[1], most, weights)
    return _routes(chosen, _shares(weights, kept), kept, loss, mask)


def choose(
    logits: Tensor,
    k: int,
    *,
    score: Score = "softmax",
    normalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    most: int | None = None,
    drop: Drop = "score",
) -> Routes:
    """The k experts with the best scores.

    logits      [T, E]
    score       softmax over the experts, or a sigmoid of each
    normalize   divide a token's weights by the sum of its kept ones
    bias        [E], added to the scores for the selection, not for the weights (balance without an auxiliary loss)
    num_groups  consecutive groups of experts, of which a token may use the best `top_groups`: by the sum of their two best scores
                with a bias (DeepSeek-V3), else by their best score (V2)
    scale       factor of the weights
    most        number of routes that an expert accepts; None: all
    drop        which routes of an expert above `most`: the smallest weights ("score"), the last ("position"), or any ("random")
    """
    scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if num_groups > top_groups:
        groups = ranked.unflatten(1, (num_groups, -1))
        best = groups.amax(2) if bias is None else groups.topk(min(2, groups.shape[2]), 2).values.sum(2)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(top_groups, 1).indices, True)
        ranked = groups.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1)
    chosen = ranked.topk(k, 1).indices
    weights = scores.gather(1, chosen)
    kept = None
    if most is not None:
        rank = torch.rand_like(weights) if drop == "random" else weights.detach()
        kept = within(chosen, logits.shape[1], most, None if drop == "position" else rank)
    if normalize:
        shares = weights if kept is None else weights * kept
        weights = weights / shares.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
    probs = scores if score == "softmax" else scores / scores.sum(1, keepdim=True)
    loss = _balance(probs, mask, k)
    return _routes(chosen, weights * scale, kept, loss, mask)


def _balance(probs: Tensor, mask: Tensor, k: int) -> Tensor:
    """E / k times the sum over experts of mean probability x mean share of the tokens; 1 if balanced, 0 without tokens."""
    tokens = max(len(probs), 1)
    return probs.shape[1] / k * (probs.sum(0) / tokens * (mask.sum(0) / tokens)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The mean square of the log of the softmax's denominator, which keeps logits small."""
    return logits.logsumexp(1).square().sum() / max(len(logits), 1)


def jitter(x: Tensor, epsilon: float = 1e-2) -> Tensor:
    """x times uniform numbers in [1 - epsilon, 1 + epsilon]."""
    return x * torch.empty_like(x).uniform_(1 - epsilon, 1 + epsilon)


def gumbel(like: Tensor) -> Tensor:
    """Noise that makes an argmax of logits a draw from their softmax."""
    return -torch.empty_like(like).exponential_().log()


@torch.no_grad()
def within(experts: Tensor, num_experts: int, most: int, rank: Tensor | None = None, used: Tensor | None = None) -> Tensor:
    """[T, k]: whether a route is among the first `most` of its expert.

    experts  [T, k]
    rank     [T, k]: larger ones come first. Equal ones, or all without it, are ordered by choice and then by token: GShard's queue,
             in which all second choices come after all first ones
    used     [T, k]: unused routes are not kept, and take no place. None: all are used
    """
    queue = experts.t().reshape(-1)
    if used is not None:
        queue = queue.masked_fill(~used.t().reshape(-1), num_experts)
    order = torch.arange(len(queue), device=queue.device)
    if rank is not None:
        order = rank.t().reshape(-1).argsort(descending=True, stable=True)
    order = order[queue[order].argsort(stable=True)]
    counts = queue.new_zeros(num_experts + 1).scatter_add_(0, queue, torch.ones_like(queue))  # also works on tensors without values
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[queue[order]]
    return ((place < most) & (queue < num_experts)).view(experts.shape[1], len(experts)).t()


def _shares(probs: Tensor, kept: Tensor | None) -> Tensor:
    """Each route's share of the sum over the token's kept routes."""
    probs = probs if kept is None else probs * kept
    return probs / probs.sum(1, keepdim=True).clamp_min(torch.finfo(probs.dtype).eps)


def _routes(chosen: Tensor, weights: Tensor, kept: Tensor | None, loss: Tensor, mask: Tensor) -> Routes:
    return Routes(chosen, weights if kept is None else weights * kept, kept, loss, mask.sum(0).detach().to(torch.int64))
