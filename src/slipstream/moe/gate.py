"""Routing: which experts each token goes to, with what weight, and the losses that balance them. Pure functions of the logits.

T      tokens of this rank
E      experts of the whole layer
k      experts per token
route  one token's way to one expert; a dropped route neither travels nor computes

All arithmetic is fp32. The gates of DeepSpeed's `MoE` (`top1`, `top2`, `top_k`) follow GShard (arXiv:2006.16668) and Switch
(arXiv:2101.03961); `choose` has the routers of later models (DeepSeek-V3, arXiv:2412.19437; z-loss: ST-MoE, arXiv:2202.08906).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Score = Literal["softmax", "sigmoid"]


class Routes(NamedTuple):
    """The ways of all tokens."""

    experts: Tensor  # [T, k], int64
    weights: Tensor  # [T, k], fp32, differentiable; 0 where dropped
    kept: Tensor | None  # [T, k], bool; None: no route is dropped
    loss: Tensor  # [], the auxiliary loss
    counts: Tensor  # [E], int64: routes to each expert, before any is dropped


def capacity(num_tokens: int, num_experts: int, factor: float, least: int) -> int:
    """The routes that one expert takes of `num_tokens`: max(ceil(T / E x factor), least)."""
    return max(int(torch.ceil(num_tokens / num_experts * torch.tensor(factor))), least)


def top1(
    logits: Tensor, most: int | None, *, noisy: bool = False, random_selection: bool = True, used: Tensor | None = None
) -> Routes:
    """The expert with the largest probability (Switch).

    logits            [T, E]
    most              routes that an expert takes; None: all
    noisy             choose by logits with Gumbel noise ("RSample")
    random_selection  an expert over its capacity takes random tokens, else the first
    used              [T], 0 for tokens that go to no expert; None: all are used
    """
    probs = logits.softmax(1)
    chosen = (logits + gumbel(logits) if noisy else probs).argmax(1)
    mask = F.one_hot(chosen, logits.shape[1])
    if used is not None:
        mask = mask * used.to(mask.dtype).view(-1, 1)
    loss = _balance(probs, mask, 1)
    kept = None if used is None else mask.sum(1, keepdim=True) > 0
    if most is not None:
        order = mask * torch.rand_like(probs) if random_selection else None
        kept = _within(mask, most, order).gather(1, chosen[:, None])
    return _routes(chosen[:, None], probs.gather(1, chosen[:, None]), kept, loss, mask)


def top2(logits: Tensor, most: int | None, *, sampled: bool = True) -> Routes:
    """The two experts of GShard. sampled: the second is drawn, by Gumbel noise. Second choices queue behind all first ones."""
    probs, num = logits.softmax(1), logits.shape[1]
    first = probs.argmax(1)
    mask1 = F.one_hot(first, num)
    noisy = logits + gumbel(logits) if sampled else logits
    second = noisy.masked_fill(mask1.bool(), -torch.inf).argmax(1)
    mask2 = F.one_hot(second, num)
    chosen = torch.stack([first, second], 1)
    loss = _balance(probs, mask1, 1)
    kept = None
    if most is not None:
        place1, place2 = mask1.cumsum(0) - 1, mask2.cumsum(0) - 1 + mask1.sum(0)
        within = [(place < most).gather(1, chosen[:, i : i + 1]) for i, place in enumerate((place1, place2))]
        kept = torch.cat(within, 1)
    return _routes(chosen, _shares(probs.gather(1, chosen), kept), kept, loss, mask1 + mask2)


def top_k(logits: Tensor, k: int, most: int | None) -> Routes:
    """The k largest probabilities. An expert over its capacity takes the tokens with the largest ones."""
    probs = logits.softmax(1)
    chosen = probs.topk(k, 1).indices
    mask = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, chosen, True)
    loss = _balance(probs, mask, k)
    kept = None if most is None else _within(mask, most, probs * mask).gather(1, chosen)
    return _routes(chosen, _shares(probs.gather(1, chosen), kept), kept, loss, mask)


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
) -> Routes:
    """The k experts with the best scores, without dropping.

    logits      [T, E]
    score       softmax over the experts, or a sigmoid of each
    normalize   divide a token's weights by their sum
    bias        [E], added to the scores for the choice, not for the weights (balance without an auxiliary loss)
    num_groups  consecutive groups of experts, of which a token may use the best `top_groups`: by the sum of their two best scores
                with a bias (DeepSeek-V3), else by their best one (V2)
    scale       of the weights
    """
    scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if num_groups > top_groups:
        groups = ranked.unflatten(1, (num_groups, -1))
        best = groups.amax(2) if bias is None else groups.topk(2, 2).values.sum(2)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(top_groups, 1).indices, True)
        ranked = groups.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1)
    chosen = ranked.topk(k, 1).indices
    weights = scores.gather(1, chosen)
    if normalize:
        weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
    probs = scores if score == "softmax" else scores / scores.sum(1, keepdim=True)
    loss = _balance(probs, mask, k)
    return _routes(chosen, weights * scale, None, loss, mask)


def _balance(probs: Tensor, mask: Tensor, k: int) -> Tensor:
    """E / k times the sum over experts of mean probability x mean share of the tokens; 1 if balanced, 0 without tokens."""
    tokens = max(len(probs), 1)
    return probs.shape[1] / k * (probs.sum(0) / tokens * (mask.sum(0) / tokens)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The mean square of the log of the softmax's denominator: it keeps logits small."""
    return logits.logsumexp(1).square().sum() / max(len(logits), 1)


def jitter(x: Tensor, epsilon: float = 1e-2) -> Tensor:
    """x times uniform numbers in [1 - epsilon, 1 + epsilon]."""
    return x * torch.empty_like(x).uniform_(1 - epsilon, 1 + epsilon)


def gumbel(like: Tensor) -> Tensor:
    """Noise with which an argmax of logits is a draw from their softmax."""
    return -torch.empty_like(like).exponential_().log()


def _within(mask: Tensor, most: int, order: Tensor | None) -> Tensor:
    """[T, E]: whether a route is among the first `most` of its expert, or among those with the largest `order`."""
    if order is None:
        return (mask.cumsum(0) <= most) & mask.bool()
    best = order.topk(min(most, len(order)), 0).indices
    return torch.zeros_like(mask, dtype=torch.bool).scatter_(0, best, True) & mask.bool()


def _shares(probs: Tensor, kept: Tensor | None) -> Tensor:
    """Each route's share of the sum over the token's kept routes."""
    probs = probs if kept is None else probs * kept
    return probs / probs.sum(1, keepdim=True).clamp_min(torch.finfo(probs.dtype).eps)


def _routes(chosen: Tensor, weights: Tensor, kept: Tensor | None, loss: Tensor, mask: Tensor) -> Routes:
    return Routes(chosen, weights if kept is None else weights * kept, kept, loss, mask.sum(0).detach().to(torch.int64))
