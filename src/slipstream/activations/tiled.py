"""Layers computed in tiles to reduce peak memory: losses over a large vocabulary, MLPs over long sequences, and linear layers too
large to gather at once.

Shapes: N tokens, H features, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.activations.recompute import checkpoint
from slipstream.ops.derivatives import once_differentiable
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
    """Return `F.cross_entropy(F.linear(hidden, weight, bias).float(), target)`, an fp32 scalar, without the logits of all tokens.

    softcap  logits become softcap * tanh(logits / softcap) first, as in Gemma 2
    tile     tokens per tile; by default, the logits of a tile are as large as `hidden` or a quarter of `weight`, and a tile has at
             least 128 tokens, because each tile adds to all of the weight's gradient

    Under autograd, the forward also computes the gradients, tile by tile. So it computes the logits once, and the backward does not
    read the weight (ZeRO-3 does not gather it again). Gradients are saved without the factor of the loss's gradient, so that small
    ones do not underflow in fp16: the hidden states' in their dtype, the weight's and the bias's in fp32, because a sum over many
    tiles loses bits in bf16. That is V x H x 4 bytes between forward and backward, for any N. There is no second derivative.

    Raises ValueError for another reduction, for a target whose shape does not match, or if `tile` < 1.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction is {reduction!r}; it must be "mean" or "sum", because the forward computes the gradients')
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
        raise ValueError(f"tile is {tile}; it must be at least 1")
    if tile is None:
        tile = max(target.numel() * hidden.shape[-1] // weight.shape[0], hidden.shape[-1] // 4, 128)
    inputs = hidden.reshape(-1, hidden.shape[-1]), weight, bias
    if not torch.is_grad_enabled():  # otherwise a Function's forward would compute gradients in any mode
        inputs = inputs[0].detach(), weight.detach(), None if bias is None else bias.detach()
    loss: Tensor = _FusedLoss.apply(*inputs, target.reshape(-1), ignore_index, label_smoothing, softcap, tile)
    return loss / (target != ignore_index).sum() if reduction == "mean" else loss


class _FusedLoss(torch.autograd.Function):
    """The summed loss. Its forward computes the gradients for a loss gradient of 1."""

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
        needed = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needed[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(target), tile):
                part = slice(start, start + tile)
                d_logits = _tile_loss(
                    hidden[part], weight, bias, target[part], ignore_index, smoothing, softcap, total, any(needed)
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
    @once_differentiable("fused_linear_cross_entropy")
    def backward(ctx: Any, grad: Tensor) -> Any:
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
    """Add one tile's loss to `total`; return the loss's derivative by the logits, [n, V] in the dtype of `total`.

    With p = softmax(z), target t and smoothing s: loss = logsumexp(z) - (1 - s) z[t] - s mean(z); its derivative by z is
    p - (1 - s) onehot(t) - s / V.
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
    """Return `fn(x)` for a token-wise function, computed over `tiles` parts of the sequence (`dim`) with activation checkpointing:
    the activations inside `fn` exist for one part at a time.

    Dropout in `fn` draws other numbers than for the whole sequence, but the same ones in the recompute.
    """
    if tiles < 1:
        raise ValueError(f"tiles is {tiles}; it must be at least 1")
    parts = x.tensor_split(min(tiles, max(1, x.shape[dim])), dim)
    return torch.cat([checkpoint(fn, part) for part in parts], dim)


class TiledLinear(nn.Module):
    """`nn.Linear` in `in_splits` x `out_splits` tiles. ZeRO-3 gathers one tile at a time, except in a repeated block, which it
    gathers as a whole. The arguments are those of `deepspeed.zero.TiledLinear`.

    input_is_already_split  the input is a sequence of `in_splits` tensors
    combine_out_splits      False: the output is a list of `out_splits` tensors
    linear_cls, **kwargs    a tile is `linear_cls(in_features, out_features, bias=..., **kwargs)`
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
        # The last column's tiles have the bias. ZeRO-3 makes one unit of each tile, because the tiles share a class and a list.
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
        """Copy a linear layer's values. Collective if either layer is sharded."""
        if other.weight.shape != (self.out_features, self.in_features):
            raise ValueError(f"a weight of shape {tuple(other.weight.shape)} is not {(self.out_features, self.in_features)}")
        if (other.bias is None) != (self.tiles[self.in_splits - 1].bias is None):
            owner = "this layer" if other.bias is None else "the other layer"
            raise ValueError(f"only {owner} has a bias; create this layer with bias={other.bias is not None}")
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
    """Sizes that differ by at most 1, the larger first."""
    small, larger = divmod(features, splits)
    return [small + (i < larger) for i in range(splits)]
