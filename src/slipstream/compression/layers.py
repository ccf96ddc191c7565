"""Layers that compute with compressed weights and inputs. Parameters keep their names; masks are buffers, scores parameters.

`compress` changes a layer's class in place. Each technique begins at its step of the shared `Clock`.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slipstream.compression.quantize import (
    Kind,
    ScoredWeight,
    TopKBinarizer,
    fake_quantize,
    in_kept_range,
    moved_range,
    quantized,
    scheduled,
    through,
    top_mask,
)
from slipstream.compression.schedule import Bits, Clock, Scheduled, Snip

Method = Literal["l1", "topk"]
_SHADOWED = ("weight", "bias")


class Compressed(nn.Module):
    """The base of compressed layers. The layer's own `forward` runs with the compressed weight instead of its own."""

    weight: Any  # a parameter
    clock: Clock
    scheduled: Scheduled | None = None  # schedule of the weight's bits
    activation_bits = 0  # 0: not quantized
    snip: Snip | None = None  # how the mask of single weights follows scores

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_up(Clock())

    def set_up(self, clock: Clock) -> None:
        self.clock = clock
        self._since: dict[str, int] = {}  # technique -> the step at which it begins
        self._kinds: dict[str, Any] = {}

    def by_output(self, weight: Tensor) -> Tensor:
        """A weight, or a tensor of its shape, as a view with a row per output. Applied to such a view, gives the weight again."""
        return weight

    def is_on(self, technique: str) -> bool:
        return technique in self._since and self.clock.begun[self._since[technique]]

    def _begin(self, technique: str, since: int, kinds: Any) -> None:
        self._since[technique], self._kinds[technique] = since, kinds
        self.clock.begin_at(since)

    # -- techniques --

    def enable_weight_quantization(self, bits: Bits, kind: Kind = "symmetric", groups: int = 1, stochastic: bool = False) -> None:
        """Raise ValueError if groups do not divide the weight."""
        if kind != "served" and self.weight.numel() % groups:
            raise ValueError(f"quantize_groups ({groups}) do not divide a weight of shape {tuple(self.weight.shape)}")
        self._begin("weight", bits.offset, (groups, kind, stochastic))
        self.scheduled = Scheduled(bits)
        self.clock.follow(self.scheduled)

    def follow_factors(self) -> bool:
        """Allow `stretch` to delay the losses of bits. Returns whether the weight loses any."""
        schedule = self.scheduled
        if schedule is None or schedule.bits.start == schedule.bits.target:
            return False
        ones = torch.ones(schedule.bits.start - schedule.bits.target, dtype=torch.int64, device=self.weight.device)
        self.register_buffer("period_factors", ones)
        schedule.layer = self
        return True

    def loses_at(self, step: int) -> bool:
        """Whether the weight loses a bit as this step begins."""
        return self.scheduled is not None and step in self.scheduled.bits.losses(self.scheduled.factors)

    def stretch(self, step: int, factor: int) -> None:
        """If the weight loses a bit at this step, multiply the time until the next loss."""
        if self.scheduled is not None and self.loses_at(step):
            number = self.scheduled.bits.losses(self.scheduled.factors).index(step)
            self.get_buffer("period_factors")[number] = factor

    def enable_activation_quantization(
        self, bits: int, kind: Kind = "symmetric", calibration: Literal["dynamic", "static"] = "dynamic", offset: int = 0
    ) -> None:
        """dynamic: a range per token; static: moving averages over steps of the smallest and the largest input"""
        self.activation_bits = bits
        self._begin("activation", offset, (kind, calibration))
        if calibration == "static":
            place = None if self.weight.is_meta else self.weight.device  # buffers' values, which no reset_parameters() would set
            self.register_buffer("input_range", torch.zeros(2, device=place))
            # in this step so far: minus the smallest, and the largest input
            self.register_buffer("input_seen", torch.full((2,), -torch.inf, device=place), persistent=False)

    def move_range(self, seen: Tensor) -> None:
        """End a step. seen: [2], the maximum of `input_seen` over all ranks."""
        self.get_buffer("input_range").copy_(moved_range(self.get_buffer("input_range"), seen))
        self.get_buffer("input_seen").fill_(-torch.inf)

    def enable_sparse_pruning(self, share: float, method: Method = "l1", offset: int = 0) -> None:
        """Keep this fraction of the weights."""
        self._prune("sparse", self.weight.abs(), self.weight.shape, share, method, offset)

    def enable_snip(self, snip: Snip) -> None:
        """Prune by scores learned in training. Raises ValueError if the blocks do not divide the weight."""
        rows, columns = self.by_output(self.weight).flatten(1).shape
        if columns % snip.columns or (rows % snip.rows and not snip.of_row):
            raise ValueError(f"block_pattern {snip.pattern} does not divide a weight of shape {tuple(self.weight.shape)}")
        self._begin("sparse", snip.offset, snip.share)
        self.snip = snip
        self.register_buffer("sparse_mask", torch.ones_like(self.weight, dtype=torch.bool))
        self.register_buffer("sparse_momentum", torch.zeros_like(self.weight, dtype=torch.float32))

    def keep_best(self, snip: Snip, scores: Tensor, share: float) -> None:
        """Renew the mask: keep this fraction of the blocks, or the pattern's number of each group of neighbors in a row."""
        flat = self.by_output(scores).flatten(1)
        if snip.of_row:
            kept = flat.view(-1, snip.columns).topk(snip.columns - snip.rows, 1).indices
            mask = torch.zeros_like(flat, dtype=torch.bool).view(-1, snip.columns).scatter_(1, kept, True)
        else:
            best = top_mask(flat.unflatten(1, (-1, snip.columns)).unflatten(0, (-1, snip.rows)).mean((1, 3)), share)
            mask = best.repeat_interleave(snip.rows, 0).repeat_interleave(snip.columns, 1)
        rows = self.by_output(self.get_buffer("sparse_mask"))
        rows.copy_(mask.view(rows.shape))

    def enable_row_pruning(self, share: float, method: Method = "l1", offset: int = 0) -> None:
        """Keep this fraction of the outputs."""
        norms = self.by_output(self.weight).detach().flatten(1).abs().sum(1)
        self._prune("row", norms, norms.shape, share, method, offset)

    def enable_head_pruning(self, share: float, num_heads: int, offset: int = 0) -> None:
        """Keep this fraction of the heads whose outputs are this layer's inputs (an attention's projection), by learned scores."""
        inputs = self.by_output(self.weight).shape[1]
        if inputs % num_heads:
            raise ValueError(f"num_heads ({num_heads}) does not divide the {inputs} inputs of the layer")
        self._prune("head", torch.ones(num_heads), (num_heads,), share, "topk", offset)

    def _prune(self, technique: str, sizes: Tensor, shape: Any, share: float, method: Method, offset: int) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"dense_ratio ({share}) must be above 0 and at most 1")
        self._begin(technique, offset, share)
        if method == "l1":
            if self.weight.is_meta:
                raise ValueError("l1 pruning takes its masks from the weights, and the layer is on meta: load the weights first")
            self.register_buffer(f"{technique}_mask", top_mask(sizes, share))
            return
        scores = torch.empty(shape if len(shape) > 1 else (*shape, 1), dtype=self.weight.dtype, device=self.weight.device)
        nn.init.kaiming_uniform_(scores, a=5**0.5)
        self.register_parameter(f"{technique}_scores", nn.Parameter(scores.view(shape)))

    # -- values that the forward uses --

    def mask_of(self, technique: str) -> Tensor:
        """A technique's mask, in the weight's dtype; masks of learned scores carry their gradient."""
        scores = self._parameters.get(f"{technique}_scores")
        if scores is None:
            return self.get_buffer(f"{technique}_mask").to(self.weight.dtype)
        return TopKBinarizer.apply(scores, self._kinds[technique], False)

    def compressed(self) -> dict[str, Tensor]:
        """The weight and bias for this step's forward."""
        weight = self.weight
        bias: Tensor | None = self._parameters.get("bias")
        ones = (1,) * (weight.dim() - 1)
        if self.is_on("sparse"):
            mask, scores = self.mask_of("sparse"), self._buffers.get("sparse_momentum")
            weight = weight * mask if scores is None or not self.training else ScoredWeight.apply(weight, mask, scores)
        is_own, weight = weight is self.weight, self.by_output(weight)
        if self.is_on("row"):
            rows = self.mask_of("row")
            weight, bias = weight * rows.view(-1, *ones), None if bias is None else bias * rows
        if self.is_on("head"):
            heads = self.mask_of("head")
            weight = weight * heads.repeat_interleave(weight.shape[1] // len(heads))
        if self.scheduled is not None and self.is_on("weight"):
            weight = self._rounded(weight, self.scheduled, is_own and not self.is_on("row") and not self.is_on("head"))
        weight = self.by_output(weight)
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def _rounded(self, weight: Tensor, schedule: Scheduled, is_own: bool) -> Tensor:
        """is_own: the weight is the layer's own, without masks"""
        groups, kind, stochastic = self._kinds["weight"]
        weight, stochastic, kept = weight.contiguous(), stochastic and self.training, self.clock.kept
        if kept is None or stochastic or not is_own or torch.compiler.is_compiling():
            return scheduled(weight, schedule.now, groups, kind, stochastic)
        if self not in kept or kept[self][0] != self.weight._version:
            kept[self] = self.weight._version, scheduled(weight.detach(), schedule.now, groups, kind, False)
        return through(weight, kept[self][1])

    def compressed_input(self, x: Tensor) -> Tensor:
        kind, calibration = self._kinds["activation"]
        if calibration == "dynamic":
            return fake_quantize(x, self.activation_bits, x.numel() // x.shape[-1], kind)
        if self.training:
            least, most = x.detach().aminmax()
            seen = self.get_buffer("input_seen")
            seen.copy_(torch.maximum(seen, torch.stack([-least, most]).to(seen.dtype)))
        return in_kept_range(x, self.get_buffer("input_range"), self.activation_bits, kind)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, *rest = args
        if self.activation_bits and self.is_on("activation"):
            x = self.compressed_input(x)
        # an entry in the instance's dict hides the parameter from the layer's own forward, whatever its class
        vars(self).update(self.compressed())
        try:
            return super().forward(x, *rest, **kwargs)
        finally:
            for name in _SHADOWED:
                vars(self).pop(name, None)

    # -- cleaning --

    def fix(self, technique: str) -> Tensor | None:
        """Make a technique's result the layer's parameters, and end it. Returns the mask of rows, heads or weights, if any."""
        mask = None
        with torch.no_grad():
            if technique == "weight" and self.scheduled is not None:
                groups, kind, _ = self._kinds["weight"]
                rows = self.by_output(self.weight)
                rows.copy_(quantized(rows.contiguous(), self.scheduled.bits.target, groups, kind))
                self.scheduled = None
                self._buffers.pop("period_factors", None)
            elif technique in self._since and technique != "activation":
                mask, rows = self.mask_of(technique).detach().bool(), self.by_output(self.weight)
                shape = (-1, *(1,) * (rows.dim() - 1))
                bias = self._parameters.get("bias")
                if technique == "row":
                    rows.mul_(mask.view(shape))
                    if bias is not None:
                        bias.mul_(mask)
                elif technique == "sparse":
                    self.weight.mul_(mask)
                else:
                    rows.mul_(mask.repeat_interleave(rows.shape[1] // len(mask)))
                self._parameters.pop(f"{technique}_scores", None)
                for name in (f"{technique}_mask", "sparse_momentum" if technique == "sparse" else ""):
                    self._buffers.pop(name, None)
        if technique != "activation":
            self._since.pop(technique, None)
        return mask

    def keep_outputs(self, kept: Tensor) -> None:
        """Drop the outputs where `kept` [outputs] is False."""
        for name in _SHADOWED:
            param = self._parameters.get(name)
            if param is not None:
                rows = self.by_output(param.detach()) if name == "weight" else param.detach()
                self._replace(name, self.by_output(rows[kept]) if name == "weight" else rows[kept])
        self._count(0)

    def keep_inputs(self, kept: Tensor) -> None:
        """Drop the inputs where `kept` [inputs] is False."""
        self._replace("weight", self.by_output(self.by_output(self.weight.detach())[:, kept]))
        self._count(1)

    def _replace(self, name: str, value: Tensor) -> None:
        wants = self._parameters[name].requires_grad  # type: ignore[union-attr]
        self._parameters[name] = nn.Parameter(value.clone(memory_format=torch.contiguous_format), requires_grad=wants)

    def _count(self, dim: int) -> None:
        for name in (("out_features", "out_channels", "nf"), ("in_features", "in_channels", "nx"))[dim]:
            if hasattr(self, name):
                setattr(self, name, self.by_output(self.weight).shape[dim])


class LinearLayer_Compress(Compressed, nn.Linear):
    """A compressed nn.Linear."""


class Conv1DLayer_Compress(Compressed):
    """A compressed transformers Conv1D: a linear layer with a weight [inputs, outputs]. Groups are groups of outputs."""

    def by_output(self, weight: Tensor) -> Tensor:
        return weight.t()

    def enable_weight_quantization(self, bits: Bits, kind: Kind = "symmetric", groups: int = 1, stochastic: bool = False) -> None:
        if kind == "served" and bits.target == 4:
            raise ValueError('quantization_type "served" with 4 bits is not built for Conv1D: use 8 bits, or "symmetric"')
        super().enable_weight_quantization(bits, kind, groups, stochastic)


class Conv2dLayer_Compress(Compressed, nn.Conv2d):
    """A compressed nn.Conv2d: a row is a filter, a token an image."""

    def compressed_input(self, x: Tensor) -> Tensor:
        flat = super().compressed_input(x.flatten(1))
        return flat.view_as(x)


class Embedding_Compress(Compressed, nn.Embedding):
    """A compressed nn.Embedding; each row is a group."""

    def enable_weight_quantization(self, bits: Bits, kind: Kind = "symmetric", groups: int = 1, stochastic: bool = False) -> None:
        super().enable_weight_quantization(bits, kind, len(self.weight), stochastic)


class BNLayer_Compress(Compressed, nn.BatchNorm2d):
    """A batch norm whose channels are dropped with those of the preceding convolution."""

    def keep_outputs(self, kept: Tensor) -> None:
        super().keep_outputs(kept)
        for name in ("running_mean", "running_var"):
            self._buffers[name] = self.get_buffer(name)[kept].clone()
        self.num_features = int(kept.sum())


KINDS: dict[type[nn.Module], type[Compressed]] = {
    nn.Linear: LinearLayer_Compress,
    nn.Conv2d: Conv2dLayer_Compress,
    nn.Embedding: Embedding_Compress,
    nn.BatchNorm2d: BNLayer_Compress,
}


def _kinds() -> dict[type[nn.Module], type[Compressed]]:
    """Class of layer -> its compressed class. transformers is not imported: without it no model has its Conv1D."""
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return KINDS if conv1d is None else {**KINDS, conv1d: Conv1DLayer_Compress}


def can_compress(module: nn.Module) -> bool:
    return isinstance(module, tuple(_kinds()))


def compress(module: nn.Module, clock: Clock) -> Compressed:
    """Change the module's class to a compressed one, with the same parameters; a subclass becomes one of both. Returns it."""
    if isinstance(module, Compressed):
        return module
    own = type(module)
    base, kind = next((base, kind) for base, kind in _kinds().items() if isinstance(module, base))
    is_whole = own is base and issubclass(kind, own)
    module.__class__ = kind if is_whole else type(kind.__name__, (kind, own), {"own_class": own})
    assert isinstance(module, Compressed)
    module.set_up(clock)
    return module


def release(module: Compressed) -> None:
    """Restore the own class of a layer that has no techniques left."""
    if module._since:
        return
    base = next(kind for kind, compressed in _kinds().items() if isinstance(module, compressed))
    for name in ("clock", "_since", "_kinds", "scheduled", "snip"):
        vars(module).pop(name, None)
    module.__class__ = vars(type(module)).get("own_class", base)
