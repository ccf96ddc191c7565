"""The plan of a model's cuts for tensor parallelism: which layers are sliced, along which dimension, into which parts.

The plan is the first of: our own layers (parallel/tensor.py), the config's `partition_config` and preset, the table of this file,
and transformers' `tp_plan`. parallel/slicing.py makes the cuts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from slipstream.config.plan import TensorPlan
from slipstream.parallel.module import PipelineModule
from slipstream.parallel.tensor import Column, Planned, Row, Vocab
from slipstream.zero.leaves import is_stack
from slipstream.zero.wrap import repeated_blocks

logger = logging.getLogger(__name__)


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
            else value is None or isinstance(value, (list, tuple, int))
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


def cuts_of(model: nn.Module, plan: TensorPlan) -> Iterator[tuple[str, Cut]]:
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
    if not isinstance(weight, Tensor) or (weight.dim() != 2 and not is_of_stack(module)):
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
        parts = tuple(fused) if isinstance(fused, (list, tuple)) else (fused, -1) if isinstance(fused, int) and fused > 0 else None
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


def is_of_stack(module: nn.Module) -> bool:
    """Whether the module is a linear layer of every expert of a stack."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 3 and is_stack(weight)
