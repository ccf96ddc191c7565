"""Tensor parallelism: layers of whose weight each rank of an axis holds a share (Megatron-LM, arXiv:1909.08053).

A layer is built whole, as an ordinary layer. `initialize` cuts it if the mesh has several tp ranks (parallel/slicing.py). Its
parameters are plain local tensors, marked as parts of the whole.

column   the weight's rows: a rank computes a share of the outputs
row      the weight's columns: a rank takes a share of the inputs; the sum over ranks is the output
vocab    rows of an embedding: tokens of other ranks count as zeros; the sum over ranks is the output

A column layer, what each rank computes from its share, and a row layer form a region. Its input is equal on all ranks; the
gradients of its input are summed over ranks, once for all column layers that have the same input.

[Note: Dropout] Inside a region, ranks have different activations and must draw different numbers: at its entry, every rank draws a
seed from the default generator, and adds its index. At its end, the default generator continues from its earlier state. So
recomputation, which restores the default generator, reproduces these draws, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.ops.derivatives import once_differentiable
from slipstream.parallel.exchange import Exchange, LocalExchange, enter, even_shares, gather_from, leave, scatter_to
from slipstream.parallel.overlap import Region, column_product, enter_region, sum_product
from slipstream.world.mesh import Axis

_SEED_STEP = 2718  # Megatron's distance between the seeds of two ranks
_TOKENS = 1  # dimension of activations [b, s, h]


class Slices:
    """The state that the sliced layers of one model share: the exchange, the current region and its generator.

    shares_tokens  whether each rank has a share of the tokens between regions (Megatron's sequence parallelism)
    dropout        whether the model draws random numbers in its forward
    overlaps       whether sums overlap computing (parallel/overlap.py)
    """

    def __init__(self, axis: Axis, *, shares_tokens: bool = False, dropout: bool = False, overlaps: bool = False) -> None:
        self.axis, self.shares_tokens, self.dropout, self.overlaps = axis, shares_tokens, dropout, overlaps
        self.exchange: Exchange = LocalExchange(axis, torch.device("meta"))  # until `initialize` connects it: shapes only
        self.shares: list[int] = []  # tokens of each rank, if they share them
        self._entered: tuple[Any, Tensor] | None = None  # the last input, and the tensor that the region's layers compute from
        self._region: tuple[Any, Region] | None = None  # the last such tensor with overlapped sums, and its region
        self._outside: list[Tensor] | None = None  # inside a region: the default generators' states

    def enter(self, x: Tensor) -> Tensor:
        """Begin a region, or return the result of the last call with the same tensor."""
        if self._entered is not None:
            seen, entered = self._entered
            if seen() is x and entered.requires_grad == (x.requires_grad and torch.is_grad_enabled()):
                return entered
        entered = self._enter(x, *self._shared(x, self.exchange.index))
        self._entered = weakref.ref(x), entered
        if entered.requires_grad:  # without a row layer (a head), the graph would be kept until the next call
            entered.register_hook(self._forget_entered)
        self._draw_apart(x.device)
        return entered

    def enter_alone(self, x: Tensor) -> Tensor:
        """Begin a region of one layer, whose output is gathered; it draws no numbers."""
        return self._enter(x, None, None)

    def _enter(self, x: Tensor, dim: int | None, sizes: list[int] | None) -> Tensor:
        if not self.overlaps or self.axis.size == 1:
            return enter(x, self.exchange, dim, sizes)
        entered, region = enter_region(x, self.exchange, dim, sizes)
        self._region = None if region is None else (weakref.ref(entered), region)
        return entered

    def region_of(self, entered: Tensor) -> Region | None:
        """The region with overlapped sums whose input is `entered`, or None."""
        return self._region[1] if self._region is not None and self._region[0]() is entered else None

    def _forget_entered(self, grad: Tensor) -> None:
        self._entered = None

    def leave(self, x: Tensor) -> Tensor:
        """End a region: return the sum of all ranks' `x`."""
        self._end()
        return leave(x, self.exchange, *self._shared(x, None))

    def leave_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """`leave` of the product of `x` and a row layer's weight, in overlapping parts if that is faster on the transport."""
        self._end()
        shared = self._shared(x, None)
        y = sum_product(x, weight, self.exchange, *shared)
        return leave(F.linear(x, weight), self.exchange, *shared) if y is None else y

    def _end(self) -> None:
        self._entered = None
        if not self.shares_tokens:
            self.draw_alike()

    def _shared(self, x: Tensor, rank: int | None) -> tuple[int | None, list[int] | None]:
        """The dimension of `x` along which a rank has a share of the tokens (None: it has all), and the lengths of all shares.

        In a matrix, the tokens of several sequences follow each other; their order within the region does not matter.
        """
        if not self.shares_tokens:
            return None, None
        if x.dim() > 2:
            return _TOKENS, self.shares
        batch = x.shape[0] // (sum(self.shares) if rank is None else self.shares[rank])
        return 0, [batch * share for share in self.shares]

    def _draw_apart(self, device: torch.device) -> None:
        if not self.dropout or self._outside is not None or device.type == "meta":
            return
        seed = int(torch.randint(1 << 48, ())) + _SEED_STEP * (1 + self.axis.index)
        self._outside = [generator.get_state() for generator in generators(device)]
        for generator in generators(device):
            generator.manual_seed(seed)

    def draw_alike(self) -> None:
        """Continue with the default generators' states from the beginning of the region."""
        if self._outside is not None:
            for generator, state in zip(generators(self.exchange.device), self._outside, strict=True):
                generator.set_state(state)
            self._outside = None

    def scatter_tokens(self, x: Tensor) -> Tensor:
        """This rank's share of the tokens, for the first block."""
        self._draw_apart(x.device)
        self.shares = even_shares(x.shape[_TOKENS], self.axis.size)
        return scatter_to(x, self.exchange, _TOKENS, self.shares)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """All tokens, after the last block."""
        self.draw_alike()
        return gather_from(x, self.exchange, _TOKENS, self.shares)

    def gather_rows(self, x: Tensor) -> Tensor:
        """The rows of all tokens, in the order of the whole batch, from a matrix with a row for each of this rank's tokens."""
        rows = x.unflatten(0, (-1, self.shares[self.exchange.index]))
        return gather_from(rows, self.exchange, _TOKENS, self.shares).flatten(0, 1)


class StackRegion:
    """The region of a module of stacked experts: its output is a partial sum on each rank.

    If ranks share the tokens, each rank has routed its own, but slices of experts need the tokens and routes of all ranks.
    """

    def __init__(self, slices: Slices) -> None:
        self.slices = slices
        self._sizes: list[int] = []  # tokens of each rank, in this call

    def enter(self, values: Sequence[Any]) -> list[Any]:
        """The whole of tensors with a row per token; gradients of floating point ones are summed over the ranks."""
        exchange, shared = self.slices.exchange, self.slices.shares_tokens
        first = next(value for value in values if isinstance(value, Tensor))
        self._sizes = sizes = exchange.lengths(first, 0) if shared else []

        def change(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():
                return enter(value, exchange, 0 if shared else None, list(sizes) or None)
            return exchange.gather(value, 0, sizes) if shared else value

        return [change(value) for value in values]

    def leave(self, y: Tensor) -> Tensor:
        sizes = self._sizes
        return leave(y, self.slices.exchange, 0 if sizes else None, list(sizes) or None)


OwnCuts = Mapping[str, tuple[str, tuple[int, ...] | None]]  # layer name in a module -> (kind, parts of a fused weight)


class Planned(nn.Module):
    """A module that determines how its layers are cut."""

    @property
    def own_cuts(self) -> OwnCuts:
        return {}


class Stacked(Planned):
    """A module whose layers are stacks of experts. Slicing gives it a region, between whose `enter` and `leave` it computes."""

    region: StackRegion | None = None


def generators(device: torch.device) -> list[torch.Generator]:
    """The default generators from which a layer on this device draws."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


class Sliced:
    """Mixed into a layer's class. `slices` is None for a whole layer."""

    slices: Slices | None = None
    weight: Any
    bias: Any
    is_transposed = False  # transformers' Conv1D: weight [in, out]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product; with the layer's own bias, by its own forward, which may differ from torch's (a cast, for instance)."""
        if bias is self.bias and not self.is_transposed:
            return super().forward(x)  # type: ignore[misc]
        return F.linear(x, self.matrix, bias)

    @property
    def matrix(self) -> Tensor:
        """The weight as [out, in]."""
        weight: Tensor = self.weight.t() if self.is_transposed else self.weight
        return weight

    def is_plain(self, x: Tensor) -> bool:
        """Whether the product is `F.linear` with a weight gradient that is not deferred (parallel/deferred.py)."""
        torchs = self.is_transposed or nn.Linear in type(self).__bases__
        return torchs and "product" not in vars(self) and not torch.is_autocast_enabled(x.device.type)


class Column(Sliced):
    """A linear layer whose outputs are shared among the ranks.

    gathers  all ranks get the whole output; `shares` are the ranks' numbers of features
    """

    enters = True  # False if a surrounding module has entered the region
    gathers = False
    shares: Sequence[int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.slices is None:
            return super().forward(x)  # type: ignore[misc]
        slices = self.slices
        entered = x if not self.enters else slices.enter_alone(x) if self.gathers else slices.enter(x)
        region = slices.region_of(entered)
        if region is None or not self.is_plain(entered):
            y = self.product(entered, self.bias)
        else:
            y = column_product(entered, self.matrix, self.bias, region)
        return gather_from(y, slices.exchange, -1, self.shares) if self.gathers else y


class Row(Sliced):
    """A linear layer whose inputs are shared among the ranks. splits: its input is whole on all ranks."""

    splits = False
    shares: Sequence[int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.slices is None:
            return super().forward(x)  # type: ignore[misc]
        if self.splits:
            exchange = self.slices.exchange
            y = leave(self.product(scatter_to(x, exchange, -1, self.shares), None), exchange)
        elif self.slices.overlaps and self.is_plain(x):
            y = self.slices.leave_product(x, self.matrix)
        else:
            y = self.slices.leave(self.product(x, None))
        return y if self.bias is None else y + self.bias


class Vocab(Sliced):
    """An embedding whose rows are shared among the ranks; this rank has tokens [first, first + rows)."""

    first = 0

    def forward(self, tokens: Tensor) -> Tensor:
        if self.slices is None:
            return super().forward(tokens)  # type: ignore[misc]
        own = tokens - self.first
        absent = (own < 0) | (own >= len(self.weight))
        rows: Tensor = super().forward(own.masked_fill(absent, 0))  # type: ignore[misc]
        return leave(rows.masked_fill(absent.unsqueeze(-1), 0), self.slices.exchange)


class ColumnParallelLinear(Column, nn.Linear):
    """`torch.nn.Linear` whose outputs are shared among the tp ranks; with gather_output, all ranks get all of them."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, gather_output: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self.gathers = gather_output


class RowParallelLinear(Row, nn.Linear):
    """`torch.nn.Linear` whose inputs are shared among the tp ranks; without input_is_parallel, its input is whole."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, input_is_parallel: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self.splits = not input_is_parallel


class VocabParallelEmbedding(Vocab, nn.Embedding):
    """`torch.nn.Embedding` whose rows are shared among the tp ranks."""


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, exchange: Exchange, *, ignore_index: int = -100) -> Tensor:
    """The cross entropy of each token, from logits whose vocabulary is shared evenly among the ranks.

    logits [..., V of this rank], targets [...] in the whole vocabulary, the same on all ranks. Returns [...] in fp32, the same on
    all ranks; ignored targets give 0. Ranks exchange three numbers per token: the largest logit, the sum of the exponentials, and
    the target's logit (Megatron-LM, section 3 of arXiv:1909.08053).
    """
    loss: Tensor = _CrossEntropy.apply(logits, targets, exchange, ignore_index)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, exchange: Exchange, ignore_index: int) -> Tensor:
        # the shares' lengths differ by at most one, longer ones first
        lengths = exchange.lengths(logits, -1)
        first = sum(lengths[: exchange.index])
        values = logits.float()
        top = exchange.gather(values.amax(-1).unsqueeze(0), 0, [1] * exchange.size).amax(0)
        exps = (values - top.unsqueeze(-1)).exp_()
        own = targets - first
        absent = (own < 0) | (own >= logits.shape[-1])
        own = own.masked_fill(absent, 0)
        picked = values.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(absent, 0)
        total, picked = exchange.sum(torch.stack([exps.sum(-1), picked]))
        ignored = targets == ignore_index
        ctx.save_for_backward(exps.div_(total.unsqueeze(-1)), own, absent | ignored, ignored)
        ctx.dtype = logits.dtype
        return (total.log() + top - picked).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable("vocab_parallel_cross_entropy")
    def backward(ctx: Any, grad: Tensor) -> Any:
        probabilities, own, elsewhere, ignored = ctx.saved_tensors
        out = probabilities * grad.masked_fill(ignored, 0).unsqueeze(-1)
        out.scatter_add_(-1, own.unsqueeze(-1), -grad.masked_fill(elsewhere, 0).unsqueeze(-1))
        return out.to(ctx.dtype), None, None, None


def even_share(length: int, axis: Axis) -> tuple[int, int]:
    """This rank's [start, stop) if shares are even."""
    shares = even_shares(length, axis.size)
    start = sum(shares[: axis.index])
    return start, start + shares[axis.index]
