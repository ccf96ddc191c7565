"""Cut a model's layers for tensor parallelism: which layers, by which plan, and at which heads.

The plan of a model is the first of: our own layers (parallel/tensor.py), the config's `partition_config` and preset, the table of
this file, and transformers' `tp_plan`. Attention layers are cut between heads, and a key head stays with its query heads.
Parameters keep their identity, so optimizers that hold them remain valid.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.config.arguments import load_config
from slipstream.config.plan import TensorPlan
from slipstream.parallel import tensor
from slipstream.parallel.around import class_before, connect_before, connect_behind, first_of, with_first
from slipstream.parallel.exchange import even_shares
from slipstream.parallel.module import PipelineModule
from slipstream.parallel.sequence import Heads, deal_heads
from slipstream.parallel.tensor import Column, Planned, Row, Sliced, Slices, Stacked, StackRegion, Vocab
from slipstream.world.mesh import Axis, nearest_divisor
from slipstream.zero.leaves import Ranges, is_quantized, is_stack, mark_part, parts_of, take, whole_shape
from slipstream.zero.recording import keep_source
from slipstream.zero.wrap import repeated_blocks

logger = logging.getLogger(__name__)

_WANTED = "_slipstream_tp_size"  # attribute of a model
_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
_NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_NUM_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_WIDTHS = ("all_head_size", "inner_dim", "split_size")  # attributes for the width of all heads of query, key or value


class Cut(NamedTuple):
    """How a module or parameter is sliced.

    kind   column, row, vocab (rows of an embedding), heads (columns of an embedding, one per head), partial (whole, with gradients
           that are partial sums), experts (a module of stacked experts), packed (a parameter of these)
    parts  lengths of the layers that a fused weight consists of, along its cut dimension; each is cut separately. (3, -1): three
           equal ones
    whole  column: gather the output; row: split a whole input
    """

    kind: str
    parts: tuple[int, ...] | None = None
    whole: bool = False


class CutSpec(NamedTuple):
    """An entry of DeepSpeed's `partition_config.layer_specs`; the first that matches counts.

    patterns       regular expressions, matched from the beginning of a parameter's name
    shape          parts of a fused weight: [3, -1] three equal ones, [[q, k, v], -1] of these lengths
    partition_dim  the dimension of `shape` that is cut
    model_types    the values of config.model_type that the entry is for, including classes that it derives from; none: all
    gather_output  all ranks get the whole output of a column layer
    grad_allreduce with skip: gradients of the layer are sums over the ranks
    """

    patterns: Sequence[str] = ()
    partition_type: str = "column"
    shape: Sequence[Any] | None = None
    partition_dim: int | None = None
    model_types: Sequence[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False


class Partition(NamedTuple):
    """DeepSpeed's `partition_config`. embedding_partition_dim has no effect, because tied embeddings are cut like their heads."""

    layer_specs: Sequence[CutSpec] = ()
    use_default_specs: bool = True
    lm_head_patterns: Sequence[str] = ("lm_head", "embed_out")
    strict_mode: bool = False
    embedding_partition_dim: int = 1


def _partition(raw: Mapping[str, Any] | None) -> Partition:
    """Parse a partition_config. Raises ValueError that names unknown keys and wrong types."""
    block = _checked(Partition, raw or {}, "tensor_parallel.partition_config")
    specs = []
    for i, each in enumerate(block.layer_specs):
        where = f"tensor_parallel.partition_config.layer_specs[{i}]"
        specs.append(spec := _checked(CutSpec, each, where))
        if spec.partition_type not in ("column", "row", "skip"):
            raise ValueError(f"{where}.partition_type {spec.partition_type!r} is none of column, row, skip")
    return block._replace(layer_specs=specs)


def _checked(kind: Any, raw: Any, where: str) -> Any:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where} must be an object, got {raw!r}")
    if unknown := sorted(raw.keys() - kind._fields):
        raise ValueError(f"{where} has unknown keys {', '.join(unknown)}; it knows {', '.join(kind._fields)}")
    for name, value in raw.items():
        default = kind._field_defaults[name]
        fits = (
            isinstance(value, type(default))
            if isinstance(default, (bool, str, int))
            else value is None or isinstance(value, (list, int))
        )
        if not fits:
            raise ValueError(f"{where}.{name} must not be {value!r}")
    return kind(**raw)


Rules = Sequence[tuple[str, Cut]]  # patterns match a name from a dot or the beginning to the end; the first match wins
_COLUMN, _ROW, _HEAD = Cut("column"), Cut("row"), Cut("column", whole=True)
_FUSED = Cut("column", (3, -1))
_LLAMA: Rules = (
    (r"(q|k|v|gate|up)_proj|qkv_proj", _COLUMN),
    (r"(o|down)_proj", _ROW),
    (r"(q|k)_norm", Cut("partial")),
    (r"lm_head", _HEAD),
)
_BLOOM: Rules = (
    (r"query_key_value|dense_h_to_4h", _COLUMN),
    (r"(attention|self_attention)\.dense|dense_4h_to_h", _ROW),
    (r"lm_head|embed_out", _HEAD),
)
_BERT: Rules = (
    (r"self\.(query|key|value)|intermediate\.dense", _COLUMN),
    (r"attention\.output\.dense|layer\.\d+\.output\.dense", _ROW),
    (r"predictions\.decoder", _HEAD),
)
# For models without a plan of transformers, by `config.model_type`, and the presets of `tensor_parallel.preset_model`.
RULES: Mapping[str, Rules] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "bloom": _BLOOM,
    "gpt_neox": _BLOOM,
    "gpt2": (
        (r"attn\.c_attn", _FUSED),
        (r"crossattention\.c_attn", Cut("column", (2, -1))),
        (r"q_attn|c_fc", _COLUMN),
        (r"c_proj", _ROW),
        (r"lm_head", _HEAD),
    ),
    "opt": ((r"(q|k|v)_proj|fc1", _COLUMN), (r"out_proj|fc2", _ROW), (r"lm_head", _HEAD)),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra"), _BERT),
    "distilbert": ((r"(q|k|v)_lin|ffn\.lin1", _COLUMN), (r"out_lin|ffn\.lin2", _ROW), (r"vocab_projector", _HEAD)),
    "modernbert": ((r"attn\.Wqkv", _FUSED), (r"mlp\.Wi", Cut("column", (2, -1))), (r"attn\.Wo|mlp\.Wo", _ROW)),
    "t5": (
        (r"(SelfAttention|EncDecAttention)\.(q|k|v)|DenseReluDense\.(wi|wi_0|wi_1)", _COLUMN),
        (r"(SelfAttention|EncDecAttention)\.o|DenseReluDense\.wo", _ROW),
        (r"relative_attention_bias", Cut("heads")),
        (r"lm_head", _HEAD),
    ),
    "vit": ((r"(q|k|v)_proj|query|key|value|fc1|intermediate\.dense", _COLUMN), (r"o_proj|output\.dense|fc2", _ROW)),
}
_QUANTIZED = (
    "parameter {!r} is quantized; a quantized weight cannot be cut over tp ranks: use slipstream.mesh.tp 1 and ZeRO stage 3, or "
    "load the model unquantized"
)
# transformers' styles (integrations/tensor_parallel.py)
_STYLES: Mapping[str, Cut] = {
    "colwise": _COLUMN,
    "rowwise": _ROW,
    "colwise_gather_output": _HEAD,
    "colwise_rep": _HEAD,
    "rowwise_split_input": Cut("row", whole=True),
    "rowwise_rep": Cut("row", whole=True),
    "replicated_with_grad_allreduce": Cut("partial"),
    "embedding_rowwise": Cut("vocab"),
    "packed_colwise": Cut("packed", (2, -1)),
    "packed_rowwise": Cut("packed"),
    "moe_tp_experts": Cut("experts"),
}


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **kwargs: Any) -> nn.Module:
    """Ask for `tp_size` tensor-parallel ranks; `initialize` cuts the model. Returns it, like DeepSpeed's function of this name.

    dtype: if passed, the model is cast. config: what `initialize` will get, dict or file. Raises ValueError if its
    tensor_parallel.autotp_size differs, if `tp_group`, a process group, has another size, and for other keywords.
    """
    asked = {"config": (load_config(config).get("tensor_parallel") or {}).get("autotp_size") if config is not None else None}
    asked["tp_group"] = dist.get_world_size(group) if (group := kwargs.get("tp_group")) is not None else None
    for name, size in asked.items():
        if size not in (None, 0, tp_size):
            raise ValueError(f"tp_model_init(tp_size={tp_size}): its {name} has {size} tensor-parallel ranks")
    if unknown := sorted(kwargs.keys() - {"tp_group"}):
        raise ValueError(
            f"tp_model_init() has no argument {', '.join(unknown)}; the config's tensor_parallel block has the options"
        )
    if tp_size < 1:
        raise ValueError(f"tp_model_init(tp_size={tp_size}): at least 1")
    vars(model)[_WANTED] = tp_size
    return model if dtype is None else model.to(dtype)


def wanted_size(model: nn.Module) -> dict[str, int]:
    """The size of the tp axis that `tp_model_init` asked for; {} if it was not called."""
    return {"tp": vars(model)[_WANTED]} if _WANTED in vars(model) else {}


def has_slices(model: nn.Module) -> bool:
    """Whether a model has layers of slipstream.parallel."""
    return any(isinstance(module, (Column, Row, Vocab)) for module in model.modules())


def has_plan(model: nn.Module, plan: TensorPlan) -> bool:
    """Whether layers of a model, other than a head, have rules of its own type, not of a type that it derives from."""
    rules = [match for match, cut in _rules_of(model, plan, derived=False) if cut.kind != "skip" and cut is not _HEAD]
    return has_slices(model) or any(match(name) for name, _ in model.named_modules() for match in rules)


def has_own_cuts(model: nn.Module) -> bool:
    """Whether a model has layers of experts that are sliced without a config entry."""
    return any(isinstance(module, Planned) and module.own_cuts for module in model.modules())


def slice_model(model: nn.Module, axis: Axis, plan: TensorPlan) -> Slices | None:
    """Cut `model` in place for this rank of `axis`. The caller connects `Slices.exchange`. Returns None if nothing is to be cut.

    Raises ValueError, before any layer is cut, for a model without a plan, an unknown style, heads that cannot be distributed, or a
    quantized weight.
    """
    if axis.size == 1:
        return None
    for name, param in model.named_parameters():
        if any(part.split.axis == "tp" for part in parts_of(param)):
            return None  # the user has sliced the whole model
        if is_quantized(param):
            raise ValueError(_QUANTIZED.format(name))
    cuts = dict(_cuts_of(model, plan))
    slicing = _Slicing(model, axis, plan, cuts)
    for cut in (False, True):  # the first pass only checks
        slicing.run(cut)
    return slicing.slices


def _cuts_of(model: nn.Module, plan: TensorPlan) -> Iterator[tuple[str, Cut]]:
    """The cut of each module or bare parameter, by name."""
    rules, own, partition = _rules_of(model, plan), _cuts_of_layers(model, plan), _partition(plan.partition)
    if not own and not rules:
        raise ValueError(
            f"{type(model).__name__} has no plan for tensor parallelism; give one in tensor_parallel.partition_config "
            '({"layer_specs": [{"patterns": [".*q_proj.weight$"], "partition_type": "column"}, ...]}), or build it of '
            "slipstream.parallel.ColumnParallelLinear, RowParallelLinear and VocabParallelEmbedding"
        )
    modules = dict(model.named_modules())
    matched = {spec.partition_type for spec in _own_specs(model, plan)} == {"skip"}  # the config keeps all layers whole
    for name, module in list(modules.items())[1:]:
        if name in own:
            yield name, own[name]
            continue
        tensors = [name, *(f"{name}.{leaf}" for leaf in module._parameters if leaf not in ("weight", "bias"))]
        for path in tensors:
            cut = next((cut for match, cut in rules if match(path)), None)
            if cut is not None and (fitting := _fitting(cut, path, modules.get(path), partition)) is not None:
                matched |= cut is not _HEAD
                yield path, fitting
    if partition.strict_mode:
        _refuse_unmatched(model, rules, own)
    if not own and not matched:
        raise ValueError(f"no pattern of tensor_parallel.partition_config fits a layer of {type(model).__name__}")
    if dist.get_rank() == 0 and not isinstance(model, PipelineModule):  # a pipeline's entries may match layers of other stages
        _warn_of_idle(model, plan)


def _fitting(cut: Cut, name: str, module: nn.Module | None, partition: Partition) -> Cut | None:
    """The cut of a module, or bare parameter, whose name a pattern fits; None: whole, as containers and norms are.

    Raises ValueError for a layer whose matrix is not its `weight`, or has other than two dimensions.
    """
    if module is None or cut.kind not in ("column", "row"):
        return None if cut.kind == "skip" else cut
    if isinstance(module, nn.Embedding):
        return Cut("vocab")  # its outputs are whole, as are those of DeepSpeed's hidden-parallel embedding
    layer: Any = getattr(module, "base_layer", module)  # inside a LoRA adapter
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or (weight.dim() != 2 and not _is_of_stack(module)):
        own = dict((*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)))
        if matrices := [leaf for leaf, value in own.items() if value.dim() > 1 and not list(layer.children())]:
            raise ValueError(
                f"{name!r} ({type(layer).__name__}) has no 2D weight to cut, but {', '.join(matrices)}; keep it whole by an entry "
                "of tensor_parallel.partition_config with partition_type skip"
            )
        return None
    if cut.kind == "row" and name.endswith(tuple(partition.lm_head_patterns)):
        return cut._replace(kind="column", whole=True)  # its inputs and outputs are whole, in both forms
    return cut


def _cuts_of_layers(model: nn.Module, plan: TensorPlan) -> dict[str, Cut]:
    """The cuts of sliced layers, and of layers with their own plan that no config entry keeps whole."""
    kinds = ((Column, "column"), (Row, "row"), (Vocab, "vocab"))
    skipped = [spec for spec in _own_specs(model, plan) if spec.partition_type == "skip"]
    kept = [_of_parameters(pattern) for spec in skipped for pattern in spec.patterns]
    own = {
        name: Cut(kind, whole=getattr(module, "gathers", False) or getattr(module, "splits", False))
        for name, module in model.named_modules()
        for cls, kind in kinds
        if name and isinstance(module, cls)
    }
    for name, module in model.named_modules():
        if isinstance(module, Planned):
            cuts = {f"{name}.{leaf}".lstrip("."): Cut(*cut) for leaf, cut in module.own_cuts.items()}
            own |= {path: cut for path, cut in cuts.items() if not any(match(path) for match in kept)}
    return own


def _warn_of_idle(model: nn.Module, plan: TensorPlan) -> None:
    """Warn of entries of partition_config that match nothing: their layers stay whole, and the forward may fail beside cut ones."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    for spec in _own_specs(model, plan):
        if not any(match(name) for match in map(_of_parameters, spec.patterns) for name in names):
            logger.warning(
                "tensor_parallel.partition_config: an entry with partition_type %s cuts nothing: no layer of %s fits its patterns "
                "%s; they are matched from the beginning of a parameter's name, such as %r",
                spec.partition_type,
                type(model).__name__,
                ", ".join(map(repr, spec.patterns)),
                next((name for name, param in model.named_parameters() if param.dim() > 1), ""),
            )


def _refuse_unmatched(model: nn.Module, rules: list[tuple[Callable[[str], Any], Cut]], own: Mapping[str, Cut]) -> None:
    blocks = tuple(f"{name}." for name in repeated_blocks(model))
    linear = [name for name, module in model.named_modules() if name.startswith(blocks) and isinstance(module, nn.Linear)]
    missed = [name for name in linear if name not in own and not any(match(name) for match, _ in rules)]
    if missed:
        raise ValueError(
            f"tensor_parallel.partition_config.strict_mode: no pattern fits {', '.join(missed[:4])}"
            f"{' and others' if len(missed) > 4 else ''}; add entries for them (partition_type skip keeps a layer whole)"
        )


def _own_specs(model: nn.Module, plan: TensorPlan) -> list[CutSpec]:
    """The entries of partition_config for this type of model."""
    kinds = model_types(getattr(model, "config", None))
    return [spec for spec in _partition(plan.partition).layer_specs if not spec.model_types or set(kinds) & set(spec.model_types)]


def model_types(config: Any) -> list[str]:
    """The model_type of a transformers configuration, then those of the classes that it derives from; [] for other configs."""
    every = (getattr(each, "model_type", None) for each in (config, *type(config).__mro__))
    return list(dict.fromkeys(kind for kind in every if kind))


def _rules_of(model: nn.Module, plan: TensorPlan, *, derived: bool = True) -> list[tuple[Callable[[str], Any], Cut]]:
    """derived: also use the rules of the types that the configuration derives from"""
    kinds = model_types(getattr(model, "config", None))
    partition = _partition(plan.partition)
    rules = [(_of_parameters(pattern), _cut_of(spec)) for spec in _own_specs(model, plan) for pattern in spec.patterns]
    if rules and not partition.use_default_specs:
        return rules + _compiled([(re.escape(name), _HEAD) for name in partition.lm_head_patterns])
    if plan.preset is not None and plan.preset not in (*RULES, *kinds):  # a model of that type may have a plan of transformers
        presets, kind = ", ".join(sorted(RULES)), kinds[0] if kinds else ""
        raise ValueError(f"tensor_parallel.preset_model {plan.preset!r} is none of {presets}, nor the model's type, {kind!r}")
    styles = _styles_of(model)
    inherited = kinds[1:] if derived and not styles else []  # a model's own plan takes precedence
    for known_kind in (plan.preset or "", *kinds[:1], *inherited):
        if known_kind in RULES:
            return rules + _compiled(RULES[known_kind])
    unknown = sorted({style for style in styles.values() if style not in _STYLES})
    if unknown:
        raise ValueError(
            f"transformers' tp_plan of {type(model).__name__} has the styles {', '.join(unknown)}, which are not served; name the "
            "layers to cut in tensor_parallel.partition_config with use_default_specs false"
        )
    return rules + _compiled([(re.escape(name).replace(r"\*", r"\w+"), _STYLES[style]) for name, style in styles.items()])


def _styles_of(model: nn.Module) -> dict[str, str]:
    """Transformers' plan of a model: layer name -> style."""
    config = getattr(model, "config", None)
    styles: dict[str, str] = {}
    for each in (model, getattr(model, "base_model", None)):
        styles |= getattr(each, "_tp_plan", None) or {}
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))):
        styles |= getattr(part, "base_model_tp_plan", None) or {}
    return styles


def _of_parameters(pattern: str) -> Callable[[str], Any]:
    """A matcher of modules for a pattern of parameter names, as in DeepSpeed."""
    try:
        match = re.compile(pattern).match
    except re.error as error:
        raise ValueError(f"tensor_parallel.partition_config: pattern {pattern!r} is not a regular expression ({error})") from None
    return lambda name: match(f"{name}.weight") or match(name)


def _cut_of(spec: CutSpec) -> Cut:
    if spec.partition_type == "skip":
        return Cut("partial" if spec.grad_allreduce else "skip")
    dim = ("column", "row").index(spec.partition_type)
    parts: tuple[int, ...] | None = None
    if spec.shape is not None:
        dim = dim if spec.partition_dim is None else spec.partition_dim
        lengths = spec.shape[dim] if 0 <= dim < len(spec.shape) else None
        fused = spec.shape[0] if dim == 0 and len(spec.shape) == 2 and spec.shape[1] == -1 else lengths
        parts = tuple(fused) if isinstance(fused, list) else (fused, -1) if isinstance(fused, int) and fused > 0 else None
        if parts is None or not all(isinstance(part, int) for part in parts):
            raise ValueError(
                f"tensor_parallel.partition_config: shape {spec.shape} of {', '.join(spec.patterns)} has no parts along dimension "
                f"{dim}; write [3, -1] for three equal parts of a column layer, [[q, k, v], -1] for others"
            )
    elif spec.partition_dim not in (None, dim):
        raise ValueError(
            f"tensor_parallel.partition_config: partition_dim {spec.partition_dim} of {', '.join(spec.patterns)} does not fit "
            f"partition_type {spec.partition_type}, which cuts dimension {dim} of a linear layer; drop it"
        )
    return Cut(spec.partition_type, parts, whole=spec.gather_output)


def _compiled(rules: Rules) -> list[tuple[Callable[[str], Any], Cut]]:
    return [(re.compile(rf"(?:.*\.)?(?:{pattern})$").match, cut) for pattern, cut in rules]


class _Slicing:
    """One pass over a model in the order of its modules, which checks every cut or makes it."""

    def __init__(self, model: nn.Module, axis: Axis, plan: TensorPlan, cuts: Mapping[str, Cut]) -> None:
        self.model, self.axis, self.plan, self.cuts = model, axis, plan, cuts
        self.slices = Slices(axis, tokens=1 if plan.shares_tokens else None, dropout=_draws(model), overlaps=plan.overlaps)
        self.config = getattr(model, "config", None)
        self.modules = dict(model.named_modules())
        self.done: set[int] = set()  # ids of parameters that are cut
        self.attention: str | None = None  # the attention module whose layers came last
        self.cut = False

    def run(self, cut: bool) -> None:
        self.cut, self.attention = cut, None
        self.done.clear()
        for name, how in self.cuts.items():
            module = self.modules.get(name)
            if module is None:
                path, _, leaf = name.rpartition(".")
                self._bare(self.modules[path], leaf, how)
            elif how.kind in ("column", "row") and _is_of_stack(module):
                self._of_stack(name, module, how)
            else:
                getattr(self, f"_{how.kind}")(name, module, how)
        self._tied_embeddings()
        for module in self.modules.values() if cut else ():
            if isinstance(module, nn.TransformerEncoderLayer):  # its fast path in evaluation reads weights; hooks disable it
                module.register_forward_pre_hook(lambda *_: None)
        if self.slices.tokens is not None:
            self._share_tokens()

    # -- kinds --

    def _column(self, name: str, module: nn.Module, how: Cut) -> None:
        is_head = self._is_head(name)
        gathers = how.whole and not (self.plan.vocab_head and is_head)
        self._linear(name, module, how, Column, 0, "lora_B", gathers=gathers)
        if not is_head or gathers:
            return
        base: Any = getattr(self.model, "get_base_model", lambda: self.model)()  # without PEFT's wrapper
        loss = getattr(getattr(base, "loss_function", None), "__name__", "")
        is_causal = loss == "ForCausalLMLoss" and calls_loss_function(base)
        if self.plan.vocab_head and not is_causal:
            raise ValueError(
                f"tensor_parallel.vocab_parallel_lm_head: {type(base).__name__} computes a loss of its own from whole logits, not "
                "transformers' ForCausalLMLoss by `self.loss_function`; drop the key"
            )
        if self.cut and is_causal:
            base.loss_function = ShiftedLoss(self.slices)

    def _row(self, name: str, module: nn.Module, how: Cut) -> None:
        layer = self._linear(name, module, how, Row, 1, "lora_A", splits=how.whole)
        if self.slices.tokens is not None and layer.bias is not None:
            self._partial(name, layer, how, only="bias")

    def _linear(
        self, name: str, module: nn.Module, how: Cut, mixin: type[Sliced], dim: int, adapter: str, **attributes: Any
    ) -> Any:
        """Cut dimension `dim` of [out, in] of a layer and its adapter. Returns the layer."""
        layer: Any = getattr(module, "base_layer", module)  # inside a LoRA adapter
        _weight(name, layer)
        transposed = is_transposed(layer)
        length = whole_shape(layer.weight)[1 - dim if transposed else dim]  # a tied weight may be cut already
        ranges, shares = self._ranges(name, length, how)
        for each in (layer, *adapters_of(module, adapter)):
            flipped = transposed and each is layer
            self._part(each.weight, 1 - dim if flipped else dim, length, ranges, shares)
            if dim == 0 and each.bias is not None:
                self._part(each.bias, 0, length, ranges, shares)
            self._become(each, mixin, shares=shares, is_transposed=flipped, **attributes)
        return layer

    def _of_stack(self, name: str, layer: Any, how: Cut) -> None:
        """Cut a linear layer [experts, out, in] of a stack of experts."""
        above = [each for path, each in self.modules.items() if name.startswith(f"{path}.".lstrip("."))]
        owner = next(each for each in reversed(above) if isinstance(each, Stacked))
        if isinstance(layer, nn.Linear):
            raise ValueError(f"{name!r} is a layer of experts that run one by one, which cannot be sliced: keep it whole (skip)")
        dim = ("column", "row").index(how.kind)
        length = layer.weight.shape[1 + dim]
        ranges, shares = self._ranges(name, length, how)
        self._part(layer.weight, 1 + dim, length, ranges)
        if layer.bias is not None and dim == 0:
            self._part(layer.bias, 1, length, ranges)
        elif layer.bias is not None:
            self._partial(name, layer, how, only="bias")
        if self.cut:
            features = "out_features" if dim == 0 else "in_features"
            share = 1.0 if dim == 0 or self.axis.index == 0 else 0.0  # other ranks contribute zero gradients at the same time
            vars(layer).update({features: shares[self.axis.index], "share_of_bias": share})
            owner.region = owner.region or StackRegion(self.slices)

    def _vocab(self, name: str, module: nn.Module, how: Cut) -> None:
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) is not an embedding without max_norm, so its rows cannot be shared"
            )
        length = module.num_embeddings
        (first, stop), *_ = ranges = (tensor.even_share(length, self.axis),)
        self._part(_weight(name, module), 0, length, ranges)
        padding = module.padding_idx
        local = padding - first if padding is not None and first <= padding < stop else None
        self._become(module, Vocab, first=first, padding_idx=local, num_embeddings=stop - first)

    def _heads(self, name: str, module: nn.Module, how: Cut) -> None:
        heads, _ = self._dealt(name)
        own = heads[self.axis.index].queries
        weight = _weight(name, module)
        self._part(weight, 1, weight.shape[1], ((own.start, own.stop),))

    def _partial(self, name: str, module: nn.Module, how: Cut, only: str = "") -> None:
        for leaf, param in module.named_parameters(recurse=False):
            if self.cut and (not only or leaf == only):
                mark_part(param, "tp", 1)

    def _experts(self, name: str, module: nn.Module, how: Cut) -> None:
        if self.cut:
            _around(module, self.slices)

    def _bare(self, module: nn.Module, leaf: str, how: Cut) -> None:
        """A stacked parameter [experts, out, in], or a matrix."""
        param = getattr(module, leaf)
        dim = param.dim() - (1 if how.kind == "row" or (how.kind == "packed" and how.parts is None) else 2)
        self._part(param, dim, param.shape[dim], self._ranges("", param.shape[dim], how)[0])

    # -- helpers of the kinds --

    def _ranges(self, name: str, length: int, how: Cut) -> tuple[Ranges, list[int]]:
        """This rank's ranges of a dimension, and the lengths of all ranks' shares."""
        if parts := _parts(name, length, how.parts):
            dealt = [self._dealt_part(name, part, how) for part in parts]
        else:
            dealt = [self._dealt_part(name, length, how)]
        starts = [sum(parts[:i]) for i in range(len(parts))] if parts else [0]
        ranges = tuple(
            (start + a, start + b) for start, each in zip(starts, dealt, strict=True) for a, b in [each[self.axis.index]]
        )
        shares = [sum(each[rank][1] - each[rank][0] for each in dealt) for rank in range(self.axis.size)]
        if len(dealt) > 1 and sum(shares) > length:
            keys = self._dealt(f"{self.attention}.")[1][1]
            raise ValueError(
                f"{name!r}: a fused weight with {keys} key heads that {self.axis.size} tp ranks have to share; use tp "
                f"{nearest_divisor(self.axis.size, keys)} (slipstream.mesh.tp), or keep it whole (partition_type skip)"
            )
        return ranges, shares

    def _dealt_part(self, name: str, length: int, how: Cut) -> list[tuple[int, int]]:
        """All ranks' ranges: whole heads in attention, else even ranges."""
        parent = self.modules.get(name.rpartition(".")[0])
        if how.whole:  # no computation runs on a share
            self.attention = None
        elif parent is not None and any(isinstance(getattr(parent, each, None), int) for each in _HEAD_DIMS):
            self.attention = name.rpartition(".")[0]
        elif self.attention is None or not name.startswith(f"{self.attention.rpartition('.')[0]}.") or length != self._width():
            self.attention = None
        if self.attention is None:
            if length < self.axis.size:
                raise ValueError(
                    f"{name!r}: {length} features cannot be shared among {self.axis.size} tp ranks; use tp "
                    f"{nearest_divisor(self.axis.size, length)} (slipstream.mesh.tp), or keep it whole (partition_type skip)"
                )
            return list(itertools.pairwise(itertools.accumulate(even_shares(length, self.axis.size), initial=0)))
        heads, (queries, keys, width) = self._dealt(f"{self.attention}.")
        if length % queries == 0 and length // queries >= width:
            unit = length // queries
            return [(unit * each.queries.start, unit * each.queries.stop) for each in heads]
        if length != keys * width:
            raise ValueError(f"{name!r}: {length} features are not those of {queries} or {keys} heads of {width}; skip it")
        return [(width * each.keys[0], width * (each.keys[-1] + 1)) for each in heads]

    def _width(self) -> int:
        _, (queries, _, width) = self._dealt(f"{self.attention}.")
        return queries * width

    def _dealt(self, name: str) -> tuple[list[Heads], tuple[int, int, int]]:
        """The heads of all ranks in the module's attention, and the numbers of query heads, key heads and features."""
        parent = self.modules[name.rpartition(".")[0]]
        width = next(value for each in _HEAD_DIMS if isinstance(value := getattr(parent, each, None), int))
        config = getattr(parent, "config", self.config)
        queries: int = vars(parent).get("_slipstream_heads") or _first(parent, config, _NUM_HEADS)
        keys: int = vars(parent).get("_slipstream_keys") or _first(parent, config, _NUM_KEY_HEADS) or queries
        if not queries:
            raise ValueError(
                f"{name.rpartition('.')[0]!r} ({type(parent).__name__}) does not tell its number of heads; skip its layers"
            )
        size = self.axis.size
        if not _can_deal(queries, keys, size):
            fits = [n for n in range(1, size) if size % n == 0 and _can_deal(queries, keys, n)]
            raise ValueError(
                f"{queries} query and {keys} key heads ({type(parent).__name__}) cannot be dealt to {size} tp ranks; use "
                f"{fits[-1]} (slipstream.mesh.tp)"
            )
        heads = deal_heads(queries, keys, size)
        if self.cut:
            self._tell(parent, config, queries, keys, width, heads[self.axis.index])
        return heads, (queries, keys, width)

    def _tell(self, parent: nn.Module, config: Any, queries: int, keys: int, width: int, own: Heads) -> None:
        """Set the numbers of this rank's heads on the attention module."""
        if "_slipstream_heads" in vars(parent):
            return
        vars(parent).update(_slipstream_heads=queries, _slipstream_keys=keys)
        local = (
            dict.fromkeys(_NUM_HEADS, len(own.queries))
            | dict.fromkeys(_NUM_KEY_HEADS, len(own.keys))
            | dict.fromkeys(_WIDTHS, len(own.queries) * width)
            | {"num_key_value_groups": len(own.queries) // len(own.keys)}
        )
        for each, value in local.items():
            if isinstance(vars(parent).get(each), int):
                setattr(parent, each, value)
        if type(parent).__name__ == "BloomAttention":
            parent.register_forward_pre_hook(_own_slopes(queries, own.queries), with_kwargs=True)

    def _part(self, param: nn.Parameter, dim: int, length: int, ranges: Ranges, shares: Sequence[int] = ()) -> None:
        if id(param) in self.done or not self.cut:
            return
        self.done.add(id(param))
        keep_source(param)
        with torch.no_grad():
            param.data = take(param.data, dim, ranges)
        param.grad = None
        different = self.axis.size * length // max(sum(shares), length)  # fewer than ranks if several ranks share each key head
        mark_part(param, "tp", different, dim, whole=length, ranges=ranges)

    def _become(self, module: nn.Module, mixin: type[Sliced], **attributes: Any) -> None:
        if not self.cut:
            return
        if not isinstance(module, mixin):
            module.__class__ = sliced_class(type(module), mixin)
        vars(module).update(attributes, slices=self.slices)
        for each, dim in (("out_features", 0), ("in_features", 1)):
            if isinstance(vars(module).get(each), int):
                setattr(module, each, _weight(each, module).shape[0 if vars(module)["is_transposed"] else dim])

    def _is_head(self, name: str) -> bool:
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        return head is not None and self.modules[name] is head

    def _tied_embeddings(self) -> None:
        """Cut an embedding whose weight is a cut head's in the same way."""
        heads = {
            id(getattr(self.modules[name], "weight", None))
            for name, how in self.cuts.items()
            if how.kind == "column" and name in self.modules
        }
        for name, module in self.modules.items():
            if isinstance(module, nn.Embedding) and name not in self.cuts and id(module.weight) in heads:
                self._vocab(name, module, Cut("vocab"))

    def _check_attention(self, path: str) -> None:
        """Raise ValueError if the ranks that share tokens would attend only to their own."""
        parents = [self.modules[name.rpartition(".")[0]] for name in self.cuts if name.startswith(f"{path}.")]
        is_sliced = any(isinstance(getattr(parent, each, None), int) for parent in parents for each in _HEAD_DIMS)
        if hasattr(self.config, "num_attention_heads") and not is_sliced:
            raise ValueError(
                f"slipstream.tensor.sequence_parallel: the attention of {path!r} ({type(self.modules[path]).__name__}) is not "
                "sliced, and needs the tokens of all ranks: drop the key, or slice it by tensor_parallel.partition_config"
            )

    def _share_tokens(self) -> None:
        """Between regions, each rank has a share of the tokens (Korthikanti et al., arXiv:2205.05198)."""
        blocks = [self.model.get_submodule(name) for name in repeated_blocks(self.model)]
        if not blocks:
            raise ValueError(
                f"{type(self.model).__name__} has no repeated blocks, between which ranks could share the tokens: drop "
                f"slipstream.tensor.sequence_parallel"
            )
        for path in repeated_blocks(self.model):
            self._check_attention(path)
        if not self.cut:
            return
        inside = {name for name, how in self.cuts.items()}
        for path, block in zip(repeated_blocks(self.model), blocks, strict=True):
            for name, module in block.named_modules():
                if f"{path}.{name}" not in inside:
                    for param in module.parameters(recurse=False):
                        if not parts_of(param):
                            mark_part(param, "tp", 1)
                columns = [
                    self.modules[each]
                    for each, how in self.cuts.items()
                    if how.kind == "column" and each.rpartition(".")[0] == f"{path}.{name}"
                ]
                if columns and vars(module).get("_slipstream_heads"):
                    module.register_forward_pre_hook(_first_input(self.slices.enter), with_kwargs=True)
                    for column in columns:
                        for each in (getattr(column, "base_layer", column), *adapters_of(column, "lora_B")):
                            each.enters = False
        scatter_before(blocks[0], self.slices)
        gather_behind(blocks[-1], self.slices)
        getattr(self.model, "base_model", self.model).register_forward_hook(_all_router_logits(self.slices))


def scatter_before(block: nn.Module, slices: Slices) -> None:
    """Give a block, and those that follow, this rank's share of the tokens."""
    connect_before(block, _first_input(slices.scatter_tokens))


def gather_behind(block: nn.Module, slices: Slices) -> None:
    """Give everything after a block all tokens again."""
    connect_behind(block, _first_output(slices.gather_tokens))


def _all_router_logits(slices: Slices) -> Callable[..., None]:
    """A hook that gathers the router logits of a model's output, so that the auxiliary loss covers all tokens."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        logits = getattr(output, "router_logits", None)
        if logits:
            output.router_logits = tuple(map(slices.gather_rows, logits))

    return hook


def _is_of_stack(module: nn.Module) -> bool:
    """Whether the module is a linear layer of every expert of a stack."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 3 and is_stack(weight)


def is_transposed(layer: Any) -> bool:
    """Whether the layer is transformers' Conv1D, whose weight is [in, out]."""
    return not isinstance(layer, nn.Linear) and layer.weight.shape[0] == getattr(layer, "nx", None)


def _parts(name: str, length: int, parts: tuple[int, ...] | None) -> list[int]:
    """The lengths of a fused weight's parts; [] if it is not fused."""
    if parts is None:
        return []
    sizes = [length // parts[0]] * parts[0] if len(parts) == 2 and parts[1] == -1 else list(parts)
    if sum(sizes) != length:
        raise ValueError(f"{name!r}: parts {sizes} do not add up to its {length} features")
    return sizes


def _first(parent: nn.Module, config: Any, names: Sequence[str]) -> int:
    values = (getattr(each, name, None) for each in (parent, config) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)


def _weight(name: str, layer: Any) -> nn.Parameter:
    """A layer's matrix. Raises ValueError if it is quantized."""
    weight: nn.Parameter = layer.weight
    if not weight.is_floating_point():
        raise ValueError(_QUANTIZED.format(f"{name}.weight"))
    return weight


def adapters_of(module: nn.Module, name: str) -> list[Any]:
    """The layers of a LoRA adapter around a sliced one. Raises ValueError for other kinds of adapters."""
    if not hasattr(module, "base_layer"):
        return []
    other = [each for each in ("lora_magnitude_vector", "lora_embedding_A") if len(getattr(module, each, ()))]
    if other or not hasattr(module, name):
        raise ValueError(
            f"{type(module).__name__} with {', '.join(other) or 'an adapter other than LoRA'} cannot be sliced; use LoRA"
        )
    return list(getattr(module, name).values())


def _draws(model: nn.Module) -> bool:
    """Whether a model has dropout anywhere: a module, or a rate in its config."""
    config = getattr(getattr(model, "config", None), "__dict__", {})
    rates = [value for name, value in config.items() if "drop" in name]
    modules = [getattr(module, "p", 0) for module in model.modules() if "Dropout" in type(module).__name__]
    numbers = [value for module in model.modules() for name, value in vars(module).items() if "dropout" in name]
    return any(isinstance(rate, float) and rate > 0 for rate in (*rates, *modules, *numbers))


def sliced_class(cls: type, mixin: type[Sliced]) -> type:
    """A subclass of a layer's class, so that `isinstance` still holds."""
    return class_before(mixin, cls, f"{mixin.__name__}Parallel{cls.__name__}", __module__=__name__)


def _can_deal(queries: int, keys: int, size: int) -> bool:
    return queries >= size and (keys >= size or (size % keys == 0 and queries % size == 0))


def _own_slopes(heads: int, own: range) -> Callable[..., Any]:
    """BLOOM's position bias, [b x heads, 1, s], restricted to this rank's heads."""

    def pre(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        alibi = kwargs["alibi"]
        return args, kwargs | {"alibi": alibi.view(-1, heads, *alibi.shape[1:])[:, own.start : own.stop].flatten(0, 1)}

    return pre


def _first_input(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def pre(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    return pre


def _first_output(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda module, args, output: with_first(output, change(first_of(output)))


def _around(module: nn.Module, slices: Slices) -> None:
    """Make a module of stacked experts, called with hidden states, routes and their weights, a region."""
    region = StackRegion(slices)

    def pre(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = region.enter([*args, *kwargs.values()])
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    module.register_forward_pre_hook(pre, with_kwargs=True)
    module.register_forward_hook(_first_output(region.leave))


def calls_loss_function(model: nn.Module) -> bool:
    """Whether a forward of the model's class calls transformers' `self.loss_function`, which can be replaced."""
    forwards = (inspect.unwrap(vars(each)["forward"]) for each in type(model).__mro__ if "forward" in vars(each))
    return any("loss_function" in getattr(getattr(forward, "__code__", None), "co_names", ()) for forward in forwards)


class ShiftedLoss:
    """transformers' loss of a causal model, from logits of this rank's share of the vocabulary."""

    def __init__(self, slices: Slices) -> None:
        self.slices = slices

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if shift_labels is None:
            if labels is None:
                raise ValueError("the loss needs labels or shift_labels, and both are None; pass one of them")
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        losses = tensor.vocab_parallel_cross_entropy(logits, shift_labels, self.slices.exchange, ignore_index=ignore_index)
        count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return losses.sum() / count
