"""Compression by DeepSpeed's `compression_training` block: `init_compression` before training, `redundancy_clean` after it.

Each technique has `shared_parameters` and `different_groups`: {name: {params, modules, related_modules}}. `modules` are patterns
searched for in layer names; "*" is every layer. A pattern that matches no layer raises ValueError, and so do bits out of range.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from slipstream.compression.layers import Compressed, LinearLayer_Compress, can_compress, compress, release
from slipstream.compression.quantize import served
from slipstream.compression.schedule import Bits, Clock, Snip
from slipstream.config.compression import CompressionTraining, PruningGroup, QuantizeTraining, WeightQuantization
from slipstream.config.huggingface import read_object

BLOCK = "compression_training"
_CLOCK = "_slipstream_compression"  # attribute of a compressed model
WEIGHT, ACTIVATION = "weight_quantization", "activation_quantization"
SPARSE, ROW, HEAD, CHANNEL = "sparse_pruning", "row_pruning", "head_pruning", "channel_pruning"
# in the order of cleaning; technique -> its name in `Compressed`
TECHNIQUES = {WEIGHT: "weight", SPARSE: "sparse", ROW: "row", HEAD: "head", CHANNEL: "row", ACTIVATION: "activation"}


class LayerGroup(NamedTuple):
    technique: str
    name: str
    shared: Any  # blocks of config.compression
    params: Any
    modules: Sequence[str]
    related: Sequence[Sequence[str]] | None

    @property
    def where(self) -> str:
        return f"{BLOCK}.{self.technique}.different_groups.{self.name}"

    def is_served(self) -> bool:
        """Whether the group rounds weights to grids of the inference engine."""
        return self.technique == WEIGHT and self.shared.quantization_type == "served"

    def layers(self, model: nn.Module) -> list[str]:
        """Names of the layers that the patterns match. Raises ValueError for a pattern without a match."""
        names = [name for name, module in model.named_modules() if can_compress(module)]
        selected: list[str] = []
        for pattern in self.modules:
            matches = [name for name in names if pattern == "*" or re.search(pattern, name)]
            excluded = self.shared.excluded_modules if self.technique == SPARSE else []
            matches = [name for name in matches if not any(re.search(each, name) for each in excluded)]
            if self.technique != CHANNEL:
                matches = [name for name in matches if not isinstance(model.get_submodule(name), nn.BatchNorm2d)]
            if not matches:
                raise ValueError(
                    f"{self.where}.modules: no Linear, Conv1D, Conv2d or Embedding of the model has a name with {pattern!r} in it"
                )
            selected += [name for name in matches if name not in selected]
        return selected


def init_compression(
    model: nn.Module, deepspeed_config: str | Path | Mapping[str, Any], teacher_model: nn.Module | None = None, mpu: Any = None
) -> nn.Module:
    """Prepare a model for training under compression, in place. Returns it.

    deepspeed_config: a path to a JSON, or its dict, with the block `compression_training`. teacher_model: with `layer_reduction`,
    the model takes its layers. Raises ValueError, before the model is changed.
    """
    if mpu is not None and getattr(mpu, "get_model_parallel_world_size", lambda: 1)() > 1:
        raise ValueError("compression is not supported with sliced layers (mpu with several model-parallel ranks)")
    block = read_block(deepspeed_config)
    if block.layer_reduction.enabled:
        if teacher_model is None:
            raise ValueError(f"{BLOCK}.layer_reduction needs the teacher: init_compression(model, config, teacher_model=...)")
        student_initialization(model, teacher_model, deepspeed_config)
    plans = [(group, group.layers(model), _enabler(group)) for group in groups_of(block)]
    clock = own_clock(model)
    for group, names, enable in plans:
        for name in names:
            layer = model.get_submodule(name)
            if isinstance(layer, nn.Embedding) and group.technique != WEIGHT:
                continue
            enable(compress(layer, clock))
        for related in _related(group, model):
            compress(model.get_submodule(related), clock)
    return model


def clock_of(model: nn.Module) -> Clock | None:
    """The clock of a compressed model; None if `init_compression` has not changed it."""
    return vars(_inner(model)).get(_CLOCK)


def clocks_of(model: nn.Module) -> list[Clock]:
    """The clocks of a compressed model, and of its layers that were built compressed, without `init_compression`."""
    whole, inner = clock_of(model), _inner(model)
    layers = (module.clock for module in inner.modules() if isinstance(module, Compressed))
    return list(dict.fromkeys([*([] if whole is None else [whole]), *layers]))


def own_clock(model: nn.Module) -> Clock:
    """The clock of a model that is or will be compressed."""
    clock: Clock = vars(_inner(model)).setdefault(_CLOCK, Clock())
    return clock


def _inner(model: nn.Module) -> nn.Module:
    """The model inside a wrapper that holds it as `module`, such as an engine."""
    inner = getattr(model, "module", model)
    return inner if isinstance(inner, nn.Module) else model


def read_block(config: str | Path | Mapping[str, Any]) -> CompressionTraining:
    """The compression block of a config, with `quantize_training` as weight quantization of every layer. Raises ValueError."""
    raw = read_object(Path(config)) if isinstance(config, (str, Path)) else config
    try:
        block = CompressionTraining.model_validate(raw.get(BLOCK, {}))
        older = QuantizeTraining.model_validate(raw.get("quantize_training", {}))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{BLOCK}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if not older.enabled:
        return block
    if block.weight_quantization.shared_parameters.enabled:
        raise ValueError(f"quantize_training and {BLOCK}.{WEIGHT} both quantize weights: drop one of them")
    return block.model_copy(update={WEIGHT: _from_older(older)})


def _from_older(older: QuantizeTraining) -> WeightQuantization:
    return WeightQuantization.model_validate(
        {
            "shared_parameters": {
                "enabled": True,
                "schedule_offset": older.quantize_schedule.schedule_offset,
                "quantize_groups": older.quantize_groups,
                "quantization_type": older.quantize_algo.q_type,
                "rounding": older.quantize_algo.rounding,
                "quantize_weight_in_forward": older.quantize_weight_in_forward,
                "fp16_mixed_quantize": older.fp16_mixed_quantize,
            },
            "different_groups": {
                "all": {
                    "params": {
                        "start_bits": older.quantize_bits.start_bits,
                        "target_bits": older.quantize_bits.target_bits,
                        "quantization_period": older.quantize_schedule.quantize_period,
                    }
                }
            },
        }
    )


def groups_of(block: CompressionTraining) -> Iterator[LayerGroup]:
    """The groups of the enabled techniques, in the order of cleaning."""
    for technique in TECHNIQUES:
        part = getattr(block, technique)
        shared = part.shared_parameters
        if not shared.enabled:
            continue
        groups = part.different_groups
        if not groups and technique == SPARSE:  # its ratio may be in shared_parameters
            groups = {"all": PruningGroup.model_validate({"params": {"dense_ratio": shared.dense_ratio}})}
        if not groups:
            raise ValueError(f"{BLOCK}.{technique} is enabled and has no different_groups: name the layers there")
        for name, group in groups.items():
            yield LayerGroup(technique, name, shared, group.params, group.modules, group.related_modules)


def _enabler(group: LayerGroup) -> Callable[[Compressed], None]:
    """A function that enables the technique in a layer. Raises ValueError for invalid values."""
    shared, offset = group.shared, group.shared.schedule_offset
    if group.technique == WEIGHT:
        return _weights(group)
    if group.technique == ACTIVATION:
        bits, kind, calibration = group.params.bits, shared.quantization_type, shared.range_calibration
        _one_of(group, "bits", bits, range(1, 17))
        _one_of(group, "quantization_type", kind, ("symmetric", "asymmetric"))
        _one_of(group, "range_calibration", calibration, ("dynamic", "static"))
        return lambda layer: layer.enable_activation_quantization(bits, kind, calibration, offset)
    share, method = group.params.dense_ratio, shared.method
    methods = {HEAD: ("topk",), SPARSE: ("l1", "topk", "snip_momentum")}.get(group.technique, ("l1", "topk"))
    _one_of(group, "method", method, methods)
    if not share:
        raise ValueError(f"{group.where}: dense_ratio ({share}) must be above 0: it is the share that is kept")
    if group.technique == HEAD:
        if not shared.num_heads:
            raise ValueError(f"{BLOCK}.{HEAD}.shared_parameters needs num_heads")
        return lambda layer: layer.enable_head_pruning(share, shared.num_heads, offset)
    if method == "snip_momentum":
        snip = _snip(group)
        return lambda layer: layer.enable_snip(snip)
    if group.technique == SPARSE:
        return lambda layer: layer.enable_sparse_pruning(share, method, offset)
    return lambda layer: layer.enable_row_pruning(share, method, offset)


def _snip(group: LayerGroup) -> Snip:
    shared = group.shared
    match = re.fullmatch(r"(\d+)([x:])(\d+)", shared.block_pattern)
    rows, columns = (int(match[1]), int(match[3])) if match else (0, 0)
    of_row = match is not None and match[2] == ":"
    if not rows or not columns or (of_row and rows >= columns):
        raise ValueError(
            f"{group.where}: block_pattern ({shared.block_pattern!r}) must be NxM, blocks of N outputs and M inputs, or N:M: N of "
            "M neighbors go, fewer than all"
        )
    if not shared.schedule_offset_stride or (shared.schedule_offset_end or 0) <= shared.schedule_offset:
        raise ValueError(
            f"{group.where}: snip_momentum needs schedule_offset_end ({shared.schedule_offset_end}) above schedule_offset "
            f"({shared.schedule_offset}), and a schedule_offset_stride ({shared.schedule_offset_stride}) of at least 1"
        )
    return Snip(
        share=group.params.dense_ratio,
        offset=shared.schedule_offset,
        end=shared.schedule_offset_end,
        stride=shared.schedule_offset_stride,
        rows=rows,
        columns=columns,
        of_row=of_row,
    )


def end_step(
    model: nn.Module,
    step: int,
    mean: Callable[[list[Tensor]], list[Tensor]] = list,
    most: Callable[[Tensor], Tensor] = lambda seen: seen,
) -> None:
    """Update static ranges of inputs, and renew the masks of `snip_momentum` if they are due in this step. Collective.

    step: number of steps so far. mean, most: combine scores, and the ends of ranges, over ranks
    """
    layers = [module for module in model.modules() if isinstance(module, Compressed)]
    ranged = [layer for layer in layers if "input_seen" in layer._buffers]
    if ranged:
        for layer, seen in zip(ranged, most(torch.stack([layer.get_buffer("input_seen") for layer in ranged])), strict=True):
            layer.move_range(seen)
    due = [(layer, layer.snip, share) for layer in layers if layer.snip and (share := layer.snip.share_at(step)) is not None]
    if due:
        scores = mean([layer.get_buffer("sparse_momentum") for layer, _, _ in due])
        for (layer, snip, share), each in zip(due, scores, strict=True):
            layer.keep_best(snip, each, share)


def _weights(group: LayerGroup) -> Callable[[Compressed], None]:
    shared, params = group.shared, group.params
    target, kind, rounding = params.target_bits, shared.quantization_type, shared.rounding
    start = target if shared.quantize_weight_in_forward else params.start_bits
    _one_of(group, "target_bits", target, range(1, 17))
    _one_of(group, "start_bits", start, range(1, 33))
    _one_of(group, "quantization_type", kind, ("symmetric", "asymmetric", "served"))
    _one_of(group, "rounding", rounding, ("nearest", "stochastic"))
    if start < target:
        raise ValueError(f"{group.where}: start_bits ({start}) is below target_bits ({target}); bits only fall")
    if target <= 2 and (kind != "symmetric" or rounding != "nearest"):
        raise ValueError(f"{group.where}: {target} bits are symmetric and rounded to the nearest only")
    if kind == "served" and (start != target or target not in (8, 4)):
        raise ValueError(f'{group.where}: quantization_type "served" has 8 or 4 bits from the beginning, not {start} to {target}')
    mixed = shared.fp16_mixed_quantize
    bits = Bits(
        start=start,
        target=target,
        period=params.quantization_period,
        offset=shared.schedule_offset,
        mixed=mixed.quantize_change_ratio if mixed.enabled else 0.0,
    )
    return lambda layer: layer.enable_weight_quantization(bits, kind, shared.quantize_groups, rounding == "stochastic")


def _one_of(group: LayerGroup, name: str, value: Any, values: Any) -> None:
    if value not in values:
        shown = f"{values[0]} to {values[-1]}" if isinstance(values, range) else ", ".join(map(repr, values))
        raise ValueError(f"{group.where}: {name} ({value!r}) must be one of {shown}")


def _related(group: LayerGroup, model: nn.Module) -> list[str]:
    """The layers that lose inputs (rows, channels) or outputs (heads) with the group's layers. Raises ValueError for none."""
    related = []
    for pattern in (pattern for patterns in group.related or () for pattern in patterns):
        names = [name for name, module in model.named_modules() if can_compress(module) and re.search(pattern, name)]
        if not names:
            raise ValueError(f"{group.where}.related_modules: no layer of the model has a name with {pattern!r} in it")
        related += names
    return related


def redundancy_clean(model: nn.Module, deepspeed_config: str | Path | Mapping[str, Any], mpu: Any = None) -> nn.Module:
    """Make the results of compression the model's own parameters: weights on their grid, and without masked rows, heads and
    channels if `related_modules` names their counterparts. Quantized inputs stay. In place; returns the model.
    """
    return clean(model, deepspeed_config, {})


def clean(model: nn.Module, deepspeed_config: str | Path | Mapping[str, Any], codes: dict[str, Tensor]) -> nn.Module:
    """`redundancy_clean`. codes: receives those of matrices on int4's grid, under their names and `.q`, `.scale`, `.low`."""
    # grids of rows and of groups of columns belong to the remaining ones, as in the forward
    for group in sorted(groups_of(read_block(deepspeed_config)), key=LayerGroup.is_served):
        layers = {name: layer for name in group.layers(model) if isinstance(layer := model.get_submodule(name), Compressed)}
        for name, layer in layers.items():
            if group.is_served() and isinstance(layer, LinearLayer_Compress) and group.params.target_bits == 4:
                parts = zip(("q", "scale", "low"), served(layer.weight.detach(), 4), strict=True)
                codes |= {f"{name}.weight.{part}": value for part, value in parts}
        masks = {name: layer.fix(TECHNIQUES[group.technique]) for name, layer in layers.items()}
        if group.related is not None and group.technique != SPARSE:
            for i, patterns in enumerate(group.related):
                _drop(group, model, masks, i, patterns)
    for module in list(model.modules()):
        if isinstance(module, Compressed):
            release(module)
    if not any(isinstance(module, Compressed) for module in model.modules()):
        vars(_inner(model)).pop(_CLOCK, None)
    return model


def _drop(group: LayerGroup, model: nn.Module, masks: Mapping[str, Tensor | None], i: int, patterns: Sequence[str]) -> None:
    """Drop the masked parts of pattern i's layers, and their counterparts in the related layers of the same block."""
    pattern = group.modules[i]
    chosen = [(name, mask) for name, mask in masks.items() if pattern == "*" or re.search(pattern, name)]
    related = _related(group._replace(related=[patterns]), model)
    if not chosen or len(related) % len(chosen):
        raise ValueError(f"{group.where}: {len(chosen)} layers match {pattern!r} and {len(related)} are related to them")
    for (name, mask), others in zip(chosen, _dealt(chosen, related), strict=True):
        if mask is None:
            continue
        layer: Any = model.get_submodule(name)
        if group.technique == HEAD:
            kept = mask.repeat_interleave(layer.by_output(layer.weight).shape[1] // len(mask))
            layer.keep_inputs(kept)
            for other in others:
                _check_heads(group, model, other, len(kept))
                _compressed(model, other).keep_outputs(kept)
                _fewer_heads(model, other, mask)
            continue
        layer.keep_outputs(mask)
        for other in others:
            module: Any = _compressed(model, other)
            if isinstance(module, nn.BatchNorm2d):
                module.keep_outputs(mask)  # type: ignore[operator]
            else:
                module.keep_inputs(mask)


def _check_heads(group: LayerGroup, model: nn.Module, name: str, count: int) -> None:
    """Raise ValueError if a related layer lacks an output for each input of the projection, such as grouped-query keys."""
    layer = _compressed(model, name)
    outputs = layer.by_output(layer.weight).shape[0]
    if outputs != count:
        raise ValueError(
            f"{group.where}.related_modules: {name} has {outputs} outputs, and the heads have {count}: several share a key, "
            "which cannot go with one of them; drop related_modules, and heads become zeros"
        )


def _dealt(chosen: list[tuple[str, Tensor | None]], related: list[str]) -> list[list[str]]:
    """The related layers of each layer: those that share most of its name, equally many for each."""
    num_related = len(related) // len(chosen)
    left, dealt = list(related), []
    for name, _ in chosen:
        parts = name.split(".")

        def shared(other: str, parts: list[str] = parts) -> int:
            return next((i for i, (a, b) in enumerate(zip(parts, other.split("."), strict=False)) if a != b), len(parts))

        nearest = sorted(left, key=shared, reverse=True)[:num_related]
        dealt.append(nearest)
        left = [other for other in left if other not in nearest]
    return dealt


def _compressed(model: nn.Module, name: str) -> Compressed:
    return compress(model.get_submodule(name), Clock())


def _fewer_heads(model: nn.Module, name: str, mask: Tensor) -> None:
    """Set the remaining number of heads on transformers' attention module, the parent of query, key and value."""
    parent: Any = model.get_submodule(name.rpartition(".")[0])
    if hasattr(parent, "num_attention_heads") and hasattr(parent, "all_head_size"):
        parent.num_attention_heads = int(mask.sum())
        parent.all_head_size = parent.num_attention_heads * parent.attention_head_size


def student_initialization(student: nn.Module, teacher: nn.Module, deepspeed_config: str | Path | Mapping[str, Any]) -> nn.Module:
    """Copy into a smaller model the teacher's layers that `layer_reduction` lists, and its other modules. Returns the student.

    Raises ValueError if a layer does not exist or does not fit.
    """
    reduction = read_block(deepspeed_config).layer_reduction
    prefix, chosen, count = reduction.module_name_prefix, reduction.teacher_layer, reduction.keep_number_layer
    if not chosen or (count is not None and count != len(chosen)):
        raise ValueError(
            f"{BLOCK}.layer_reduction: teacher_layer ({chosen}) must list one layer of the teacher for each of the student's"
            + (f" {count} (keep_number_layer)" if count is not None else "")
        )
    pairs = [(f"{prefix}.{i}", f"{prefix}.{layer}") for i, layer in enumerate(chosen)]
    pairs += [(name, name) for name in reduction.other_module_name]
    copies = [(own, theirs, _submodule(student, own, "student"), _submodule(teacher, theirs, "teacher")) for own, theirs in pairs]
    for own, theirs, target, source in copies:
        shapes = [{name: tuple(value.shape) for name, value in module.state_dict().items()} for module in (target, source)]
        if shapes[0] != shapes[1]:
            name = next(name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
            raise ValueError(
                f"{BLOCK}.layer_reduction: {own}.{name} of the student has shape {shapes[0].get(name)}, and {theirs}.{name} of the "
                f"teacher {shapes[1].get(name)}: the teacher does not fit"
            )
    for _, _, target, source in copies:
        target.load_state_dict(source.state_dict())
    return student


def _submodule(model: nn.Module, name: str, which: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"{BLOCK}.layer_reduction: the {which} has no module {name!r}") from None


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replace modules of transformers' Conv1D by nn.Linear of the same values. Returns the model."""
    replaced: list[tuple[str, Any]] = [(name, module) for name, module in model.named_modules() if isinstance(module, convert_type)]
    for name, module in replaced:
        weight, bias = module.weight, getattr(module, "bias", None)
        linear = nn.Linear(weight.shape[0], weight.shape[1], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
        if bias is not None:
            linear.bias = bias
        model.set_submodule(name, linear)
    return model


class compression_scheduler:
    """Counts the steps of a compressed model that trains without an engine; an engine counts by itself."""

    def __init__(self, model: nn.Module, compression_config: Any = None) -> None:
        self.clocks, self.model = clocks_of(model), _inner(model)
        if not self.clocks:
            raise ValueError(f"{type(model).__name__} is not compressed: call init_compression first")

    @property
    def training_steps(self) -> int:
        return self.clocks[0].step

    def step(self, step_zero_check: bool = False) -> None:
        """Count an optimizer step. step_zero_check: the first step has not been made yet."""
        for clock in self.clocks:
            clock.step += not step_zero_check
        end_step(self.model, self.training_steps)


def kd_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Knowledge distillation (Hinton et al., arXiv 1503.02531): the mean Kullback-Leibler divergence of logits [..., classes]."""
    soft = torch.log_softmax(student / temperature, -1), torch.log_softmax(teacher / temperature, -1)
    divergence = nn.functional.kl_div(soft[0].flatten(0, -2), soft[1].flatten(0, -2), reduction="batchmean", log_target=True)
    return divergence * temperature**2
