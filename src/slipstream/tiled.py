"""Layers that would hold more than fits, computed in tiles: losses over a large vocabulary, MLPs over long sequences, and
linear layers too large to be gathered at once.

Shapes: N tokens, H features, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.checkpointing import checkpoint
from slipstream.zero import gathered


def fused_linear_cross_entropy(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [...], words
    bias: Tensor | None = None,  # [V]
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    tile: int | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), target)` without the logits of all tokens: a scalar in fp32.

    softcap  logits become softcap * tanh(logits / softcap) first, as in Gemma 2
    tile     tokens whose logits exist at a time; by default so many that those are as large as `hidden` or a quarter of `weight`,
             and no fewer than 128, because each tile adds to all of the weight's gradient

    The gradients are computed with the loss, tile by tile, each time that it is computed under autograd, so that the logits
    are made once and the weight is read in the forward alone (under ZeRO-3 it is not gathered again for the backward). They
    wait for the backward without the loss's own factor, so that small ones do not vanish in fp16: the hidden states' in
    their dtype, the weight's and the bias's in fp32, because a sum over many tiles would lose bits in bf16. That is
    V x H x 4 bytes between forward and backward, whatever N. There is no second derivative.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction is {reduction!r}; it is "mean" or "sum" here, a loss per token would need its gradient first')
    if hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"hidden states of shape {tuple(hidden.shape)} need a target of shape {tuple(hidden.shape[:-1])}, "
            f"got {tuple(target.shape)}"
        )
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if tile is not None and tile < 1:
        raise ValueError(f"tile is {tile}; at least one token is needed")
    if tile is None:
        tile = max(target.numel() * hidden.shape[-1] // weight.shape[0], hidden.shape[-1] // 4, 128)
    loss: Tensor = _FusedLoss.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, target.reshape(-1), ignore_index, label_smoothing, softcap, tile
    )
    return loss / (target != ignore_index).sum() if reduction == "mean" else loss


class _FusedLoss(torch.autograd.Function):
    """The summed loss, with its gradients for a loss gradient of one."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        smoothing: float,
        softcap: float | None,
        tile: int,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        wanted = [bool(needed) for needed in ctx.needs_input_grad[:3]]
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(target), tile):
                part = slice(start, start + tile)
                d_logits = _tile_loss(
                    hidden[part], weight, bias, target[part], ignore_index, smoothing, softcap, total, any(wanted)
                )
                if d_logits is None:
                    continue
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
                d_logits = d_logits.to(hidden.dtype)
                if d_hidden is not None:
                    torch.mm(d_logits, weight, out=d_hidden[part])
                if d_weight is not None and d_weight.dtype == hidden.dtype:
                    d_weight.addmm_(d_logits.t(), hidden[part])
                elif d_weight is not None:
                    d_weight += d_logits.t() @ hidden[part]
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fused_linear_cross_entropy has no second derivative (create_graph=True); use "
                "F.cross_entropy(F.linear(hidden, weight, bias), target) where one is needed"
            )
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if value is None else (value.to(grad.dtype) * grad).to(dtype) for value, dtype in saved), *[None] * 5


def _tile_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    softcap: float | None,
    total: Tensor,
    differentiate: bool,
) -> Tensor | None:
    """Add one tile's loss to `total`; its derivative by the logits, [n, V] and as wide as the total.

    With p = softmax(z), target t and smoothing s: loss = logsumexp(z) - (1 - s) z[t] - s mean(z); its derivative by z is
    p - (1 - s) [t] - s / V.
    """
    logits = F.linear(hidden, weight, bias).to(total.dtype)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    counted = (target != ignore_index).unsqueeze(1)
    index = target.unsqueeze(1).masked_fill(~counted, 0)
    normalizer = logits.logsumexp(1, keepdim=True)
    loss = normalizer - (1 - smoothing) * logits.gather(1, index)
    if smoothing:
        loss -= smoothing * logits.mean(1, keepdim=True)
    total += loss.masked_fill(~counted, 0).sum()
    if not differentiate:
        return None
    slope = None if softcap is None else 1 - (logits / softcap).square()
    d_logits = logits.sub_(normalizer).exp_()
    d_logits.scatter_add_(1, index, torch.full_like(normalizer, smoothing - 1))
    if smoothing:
        d_logits -= smoothing / weight.shape[0]
    if slope is not None:
        d_logits *= slope
    return d_logits.masked_fill_(~counted, 0)


def tiled_mlp(fn: Callable[[Tensor], Tensor], x: Tensor, tiles: int, dim: int = -2) -> Tensor:
    """`fn(x)` for a function of each token alone, over `tiles` parts of the sequence (`dim`), each computed again in the
    backward: what `fn` holds inside exists for one part at a time.

    With dropout inside, the draws are other ones than the whole sequence's, and the same in both passes.
    """
    if tiles < 1:
        raise ValueError(f"tiles is {tiles}; at least one is needed")
    parts = x.tensor_split(min(tiles, max(1, x.shape[dim])), dim)
    return torch.cat([checkpoint(fn, part) for part in parts], dim)


class TiledLinear(nn.Module):
    """`nn.Linear` in `in_splits` x `out_splits` tiles, which ZeRO-3 gathers one at a time where the layer is in no repeated
    block (a block is gathered whole). The arguments are those of `deepspeed.zero.TiledLinear`.

    input_is_already_split  the input is a sequence of `in_splits` tensors
    combine_out_splits      False: the output is a list of `out_splits` tensors
    linear_cls, **kwargs    makes a tile: `linear_cls(in_features, out_features, bias=..., **kwargs)`
    init_linear             a linear layer to copy from
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise ValueError(f"{name}_splits is {splits}; it must be between 1 and {name}_features ({features})")
        self.in_features, self.out_features = in_features, out_features
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_sizes, self.out_sizes = _even(in_features, in_splits), _even(out_features, out_splits)
        # The bias is in the last column's tiles. Of layers that share a class and a list, ZeRO-3 makes a unit each.
        self.tiles = nn.ModuleList(
            linear_cls(columns, rows, bias=bias and i == in_splits - 1, **kwargs)
            for rows in self.out_sizes
            for i, columns in enumerate(self.in_sizes)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, x: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        if self.input_is_already_split:
            parts = list(x)
            if len(parts) != self.in_splits:
                raise ValueError(f"the input is split into {len(parts)}, in_splits is {self.in_splits}")
        else:
            assert isinstance(x, Tensor), "input_is_already_split=True takes a sequence"
            parts = list(x.split(self.in_sizes, -1))
        outputs = []
        for row in range(self.out_splits):
            tiles = self.tiles[row * self.in_splits : (row + 1) * self.in_splits]
            output = tiles[0](parts[0])
            for tile, part in zip(tiles[1:], parts[1:], strict=True):
                output = output + tile(part)
            outputs.append(output)
        return torch.cat(outputs, -1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take a linear layer's values. Collective where either is sharded."""
        if other.weight.shape != (self.out_features, self.in_features):
            raise ValueError(f"a weight of shape {tuple(other.weight.shape)} is not {(self.out_features, self.in_features)}")
        if (other.bias is None) != (self.tiles[self.in_splits - 1].bias is None):
            raise ValueError(f"one of both layers has a bias: the other's is {other.bias is not None}")
        tiles: Any = self.tiles
        with gathered([*self.parameters(), *other.parameters()]):
            weights = [tile for rows in other.weight.split(self.out_sizes) for tile in rows.split(self.in_sizes, 1)]
            for tile, weight in zip(tiles, weights, strict=True):
                tile.weight.copy_(weight)
            if other.bias is not None:
                last = tiles[self.in_splits - 1 :: self.in_splits]
                for tile, bias in zip(last, other.bias.split(self.out_sizes), strict=True):
                    tile.bias.copy_(bias)

    def extra_repr(self) -> str:
        names = ("in_features", "out_features", "in_splits", "out_splits")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _even(features: int, splits: int) -> list[int]:
    """Sizes that differ by one at most, the larger first."""
    small, larger = divmod(features, splits)
    return [small + (i < larger) for i in range(splits)]
