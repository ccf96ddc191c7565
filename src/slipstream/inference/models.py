"""Translates Hugging Face's format: config.json -> `TransformerConfig`, weights by name -> `DecoderWeights`.

Pure, and without transformers; reads what transformers 4 and 5 write. `families` has the differences between families. Models that
`TransformerConfig` cannot describe raise UnsupportedModel; they can still run in transformers (`generic`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.inference.config import Latent, Layer, ModelPart, Rope, RoutedExperts, TransformerConfig
from slipstream.inference.families import ACTIVATIONS, FAMILIES, FULL, SLIDING, FamilyRow, Keys, UnsupportedModel
from slipstream.inference.weights import DecoderWeights, LayerWeights, Mlp, leaves
from slipstream.ops.matrices import K_BLOCK, Int4, Int8, KQuant, Matrix


class MisfitError(ValueError):
    """The weights do not fit the configuration."""


_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_SAME = (*_SIZES, "num_attention_heads", "num_key_value_heads")  # must be equal in all layers; some families have lists here


def from_hf(config: Mapping[str, Any]) -> TransformerConfig:
    """Convert a config.json (or `model.config.to_dict()`). Raises UnsupportedModel."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(f"model_type {family!r} is not supported by the fast forward, which has {', '.join(FAMILIES)}")
    row = FAMILIES[family]
    c = row.read(config)
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [row.keys.get(key, key) for key in needed if c.get(key) is None and key not in row.defaults]:
        raise UnsupportedModel(f"the configuration of this {family} model lacks {', '.join(missing)}")
    if by_layer := [key for key in _SAME if isinstance(c.get(key), list)]:
        raise UnsupportedModel(f"{', '.join(by_layer)} of this {family} model differ from layer to layer")
    _check_supported(family, row, c)
    heads = c["num_attention_heads"]
    bias = bool(c["attention_bias"])
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": c["vocab_size"],
        "hidden_size": c["hidden_size"],
        "intermediate_size": c.get("intermediate_size") or 4 * c["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": c.get("head_dim") or c["hidden_size"] // heads,
        "norm_eps": c["rms_norm_eps"],
        "max_context": _max_context(c),
        "activation": ACTIVATIONS[c["hidden_act"]],
        "tied": c["tie_word_embeddings"],
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bool(c["mlp_bias"]),
        "end_ids": ids_of(c.get("eos_token_id")),
    }
    values |= {name: value(c) if callable(value) else value for name, value in row.fields.items()}
    kinds = row.kinds(c)
    ropes = {kind: _rope(row, c, kind, values["head_dim"]) for kind in {kind for kind, _ in kinds} if kind is not None}
    layers = tuple(
        Layer(
            rope=None if kind is None else ropes[kind], window=window, experts=row.experts(c, i), has_input_norm=i >= row.first_norm
        )
        for i, (kind, window) in enumerate(kinds)
    )
    return TransformerConfig(layers=layers, **values)


def ids_of(tokens: Any) -> tuple[int, ...]:
    """None, one token or several, as configurations give their end tokens."""
    return () if tokens is None else tuple(tokens) if isinstance(tokens, list | tuple) else (tokens,)


def _check_supported(family: str, row: FamilyRow, c: Keys) -> None:
    if c.get("quantization_config"):
        method = c["quantization_config"].get("quant_method", "an unnamed method")
        raise UnsupportedModel(f"weights quantized by {method} are not supported; give the unquantized one with dtype int8 or int4")
    if c.get("use_bidirectional_attention"):
        raise UnsupportedModel(f"this {family} model attends in both directions (use_bidirectional_attention): it cannot generate")
    if c.get("clip_qkv") is not None:
        raise UnsupportedModel(f"clip_qkv is {c['clip_qkv']}: queries and keys are not clamped by the fast decoder")
    for key, values in row.only.items():
        if c.get(key, values[0]) not in values:
            raise UnsupportedModel(f"{key} is {c[key]!r} in this {family} model; the fast forward has {values[0]!r} only")
    if (c.get("head_dim") or 0) % 2:
        raise UnsupportedModel(f"head_dim is {c['head_dim']}; it must be even, because rotary embeddings rotate pairs")
    if c["hidden_act"] not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {c['hidden_act']!r} is none of {', '.join(ACTIVATIONS)}")
    if c["num_attention_heads"] % (c.get("num_key_value_heads") or c["num_attention_heads"]):
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        raise UnsupportedModel(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")


# -- Rotary positions ------------------------------------------------------------------------------------------------------


def _rope(row: FamilyRow, c: Keys, kind: str, head_dim: int) -> Rope:
    """The rope of a kind of layer. transformers 4 has rope_theta and rope_scaling; 5 has rope_parameters, possibly per kind."""
    scaling = c.get("rope_scaling") or c.get("rope_parameters") or {}
    nested = FULL in scaling or SLIDING in scaling
    p = dict((scaling.get(kind) or {}) if nested else scaling)
    theta = c["rope_theta"]
    if kind == SLIDING and "rope_local_base_freq" in c:
        theta = c["rope_local_base_freq"]
        p = p if nested else {}  # a single rope_scaling applies to the full layers
    p["rope_theta"] = p.get("rope_theta") or theta
    share = p.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0
    if share != 1.0 and "partial_rotary_factor" not in row.defaults:
        raise UnsupportedModel(f"partial_rotary_factor {share} is not supported for this family")
    num = c.get("rotary_dim") or int(head_dim * share)
    return rope(p, num, c["max_position_embeddings"], c.get("original_max_position_embeddings"))


def rope(p: Mapping[str, Any], head_dim: int, max_positions: int, original: int | None = None) -> Rope:
    """Compute the frequencies of rope_parameters in fp32, bit-identical to transformers. head_dim: rotated features."""
    kind = p.get("rope_type", p.get("type", "default"))
    original = original or p.get("original_max_position_embeddings") or max_positions
    powers = p["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    match kind:
        case "default" | "dynamic":  # dynamic only changes positions beyond max_position_embeddings, which max_context excludes
            return _new_rope(1.0 / powers)
        case "linear":
            return _new_rope(1.0 / powers / p["factor"])
        case "llama3":
            return _new_rope(_llama3(1.0 / powers, p, original))
        case "yarn":
            factor = p.get("factor") or max_positions / original
            return _new_rope(_yarn(powers, p, head_dim, factor, original), _yarn_scale(p, factor))
        case "longrope" | "su":
            if not original > 1:
                raise UnsupportedModel(f"longrope's original_max_position_embeddings is {original}; it must be more than 1")
            short, long = (1.0 / (_longrope_factors(p, f"{name}_factor", len(powers)) * powers) for name in ("short", "long"))
            one = _new_rope(short, _longrope_scale(p, p.get("factor") or max_positions / original, original))
            return replace(one, long_inv_freq=tuple(long.tolist()), short_context=original)
        case _:
            kinds = "default, linear, dynamic, llama3, yarn or longrope"
            raise UnsupportedModel(f"rope_type {kind!r} is not supported; it can be {kinds}")


def rope_table(rope: Rope, num: int, has_long: bool, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosine and sine, fp32 [num, rotary_dim / 2], of `num` positions, followed, if `has_long`, by those of long texts."""
    positions = torch.arange(num, dtype=torch.float32, device=device)
    both = (rope.inv_freq, rope.long_inv_freq or rope.inv_freq)[: 1 + has_long]
    angles = torch.cat([positions[:, None] * torch.tensor(one, dtype=torch.float32, device=device) for one in both])
    return angles.cos() * rope.scale, angles.sin() * rope.scale


def _new_rope(inv_freq: Tensor, scale: float = 1.0) -> Rope:
    return Rope(inv_freq=tuple(inv_freq.tolist()), scale=scale)


def _longrope_factors(p: Mapping[str, Any], name: str, num: int) -> Tensor:
    factors = p.get(name)
    if not isinstance(factors, list | tuple) or len(factors) != num or not all(isinstance(one, int | float) for one in factors):
        raise UnsupportedModel(f"longrope's {name} is {factors!r:.100}; it must be {num} numbers, one for each pair of features")
    return torch.tensor(factors, dtype=torch.float32)


def _longrope_scale(p: Mapping[str, Any], factor: float, original: int) -> float:
    """LongRoPE's attention factor (arXiv:2402.13753), which applies to short texts too."""
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _llama3(inv_freq: Tensor, p: Mapping[str, Any], original: int) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, and those in between interpolated."""
    low, high, factor = p["low_freq_factor"], p["high_freq_factor"], p["factor"]
    wavelength = 2 * math.pi / inv_freq
    keep = (original / wavelength - low) / (high - low)
    blend = (1 - keep) * inv_freq / factor + keep * inv_freq
    stretched = torch.where(wavelength > original / low, inv_freq / factor, blend)
    return torch.where(wavelength < original / high, inv_freq, stretched)


def _yarn(powers: Tensor, p: Mapping[str, Any], dim: int, factor: float, original: int) -> Tensor:
    """YaRN (arXiv:2309.00071): fast-rotating pairs are kept, slow ones stretched by the factor, with a linear ramp in between."""

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    low, high = pair(p.get("beta_fast") or 32), pair(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_scale(p: Mapping[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    one, all_dims = p.get("mscale"), p.get("mscale_all_dim")
    return scale(one) / scale(all_dims) if one and all_dims else scale(1.0)


def _max_context(c: Mapping[str, Any]) -> int:
    """The context limit. Qwen's way to enable YaRN adds it to a config whose max_position_embeddings stays the original one."""
    limit: int = c["max_position_embeddings"]
    p = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if p.get("rope_type", p.get("type")) == "yarn" and p.get("factor") and p.get("original_max_position_embeddings"):
        limit = max(limit, int(p["factor"] * p["original_max_position_embeddings"]))
    return limit


# -- Weights ---------------------------------------------------------------------------------------------------------------


def shape_of(m: Matrix) -> tuple[int, ...]:
    match m:
        case Int8():
            return tuple(m.q.shape)
        case Int4():
            return m.q.shape[0], m.q.shape[1] * 2
        case KQuant():
            return m.q.shape[0], m.features
        case _:
            return tuple(m.shape)


def _of_inputs(name: str, m: Matrix, own: slice) -> Matrix:
    """The columns for the inputs `own`, quantized as in the whole. Raises ValueError if they cut a quantization group."""
    features, blocks = shape_of(m)[1], K_BLOCK if isinstance(m, KQuant) else 1

    def cut(part: Tensor) -> Tensor:
        if part.dim() == 1:  # a scale per output
            return part
        ends = [divmod(end * part.shape[1], features) for end in (own.start, own.stop)]
        if any(rest for _, rest in ends) or own.start % blocks or own.stop % blocks:
            group, remedy = max(blocks, features // part.shape[1]), "give another tp_size, or a float dtype"
            raise ValueError(f"{name}: inputs {own.start} to {own.stop} are no whole groups of {group}, of a scale each: {remedy}")
        return part[:, ends[0][0] : ends[1][0]].contiguous()

    return cut(m) if isinstance(m, Tensor) else type(m)(*map(cut, m))


Pick = Callable[[Tensor], Tensor]  # selects the part of a stored weight that fills a role, as a view if possible
# Name suffixes that occur in only one layout of experts (`_expert_mlps`): each expert with a dense MLP's names (no such suffix),
# transformers 5's stacks, Mixtral's files. The router's name is part of the last.
_EXPERT_LAYOUTS = ("as_dense", "experts.gate_up_proj", ("0.w1.weight", "block_sparse_moe.gate.weight"))


def _all(w: Tensor) -> Tensor:
    return w


def _rows(own: slice, num: int) -> Pick:
    return _all if own == slice(0, num) else lambda w: w[own]


class _Outline:
    """A source that returns tensors on meta, and records their names."""

    def __init__(self, layout: str | tuple[str, ...]):
        self.layout = layout  # name suffixes of a layout of experts: `in` is true only for names with these
        self.named: dict[str, tuple[int, ...]] = {}
        self.found: dict[int, tuple[str, Pick, Tensor]] = {}  # by id of the returned tensor, which is kept

    def __contains__(self, name: str) -> bool:
        return name.endswith(self.layout)

    def tensor(self, name: str, *shape: int, pick: Pick = _all) -> Tensor:
        self.named[name] = shape
        part = pick(torch.empty(shape, device="meta"))
        self.found[id(part)] = name, pick, part
        return part

    def matrix(self, name: str, *shape: int, pick: Pick = _all, inputs: slice | None = None) -> Tensor:
        assert inputs is None, "models over processes have weights"
        return self.tensor(name, *shape, pick=pick)

    stored = tensor


class _State:
    """A source that returns weights of a file or model after it has checked their shapes, and records which were used. `convert` is
    applied to matrices, except to those read by `stored`."""

    def __init__(
        self, state: Mapping[str, Matrix], row: FamilyRow | None = None, convert: Callable[[Matrix], Matrix] | None = None
    ) -> None:
        self.state = state
        self.names = {name if row is None else canonical(row, name): name for name in state}
        self.convert = convert or (lambda m: m)
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def matrix(self, name: str, *shape: int, pick: Pick = _all, inputs: slice | None = None) -> Matrix:
        m = self.convert(self.stored(name, *shape, pick=pick))
        return m if inputs is None else _of_inputs(name, m, inputs)

    def stored(self, name: str, *shape: int, pick: Pick = _all) -> Matrix:
        m = self._checked(name, shape)
        return pick(m) if isinstance(m, Tensor) else type(m)(*map(pick, m))

    def _checked(self, name: str, shape: tuple[int, ...]) -> Matrix:
        if name not in self.names:
            raise MisfitError(f"the weights lack {name} {list(shape)}")
        m = self.state[self.names[name]]
        if shape_of(m) != shape:
            raise MisfitError(f"weight {name} is {list(shape_of(m))}; the configuration needs {list(shape)}")
        self.used.add(name)
        return m

    def tensor(self, name: str, *shape: int, pick: Pick = _all) -> Tensor:
        m = self._checked(name, shape)
        if not isinstance(m, Tensor):
            raise ValueError(f"weight {name} is quantized; only matrices can be")
        return pick(m)


_Source = _Outline | _State  # provides weights by name; the configuration determines their shapes


def canonical(row: FamilyRow, name: str) -> str:
    """Translate a weight's name in a file to its name in transformers' model."""
    for pattern, new in row.renames:
        name = re.sub(pattern, new, name)
    return name


def from_state(
    config: TransformerConfig,
    state: Mapping[str, Matrix],
    convert: Callable[[Matrix], Matrix] | None = None,
    blank: Callable[[Matrix], Matrix] | None = None,
) -> DecoderWeights:
    """Assign weights by Hugging Face's names to their roles, without copies where a role is a view. `convert` is applied to each
    matrix of a layer. With `blank`, which returns the form of a converted matrix on meta, layers are read later (`read_layer`).

    Raises MisfitError naming any weight that is missing, unknown or of the wrong shape."""
    row = FAMILIES[config.family]
    source = _State(state, row, blank or convert)
    weights = _weights(config, source)
    if blank is not None:
        read, at = _Reader(config, _State(state, row, convert)), row.names["layers"]
        weights.read_layer = lambda index: _layer(read, config.layers[index], f"{at}.{index}.")
    surplus = sorted(name for name in set(source.names) - source.used if not is_surplus(config, name))
    if surplus:
        more = f" and {len(surplus) - 5} more" if len(surplus) > 5 else ""
        raise MisfitError(f"the model of this configuration does not have these weights: {', '.join(surplus[:5])}{more}")
    return weights


def is_surplus(config: TransformerConfig, name: str) -> bool:
    """Whether a weight may be ignored: a tied head, old checkpoints' rope frequencies (config has them), other processes' parts."""
    row = FAMILIES[config.family]
    lists = [".experts.", *(f".{row.names[role]}." for role in ("q_norms", "k_norms") if role in row.names)]
    elsewhere = config.part.size > 1 and (name == head_name(config) or any(one in name for one in lists))
    known = name.endswith("rotary_emb.inv_freq") or re.search(row.surplus, name) is not None
    behind = re.match(re.escape(row.names["layers"]) + r"\.(\d+)\.", name) if row.has_more_layers else None
    known = known or (behind is not None and int(behind[1]) >= len(config.layers))
    return elsewhere or known or ((config.tied or not config.has_head) and name == head_name(config))


def is_encoder(model_type: Any) -> bool:
    """Whether models of this type only embed."""
    row = FAMILIES.get(model_type)
    return row is not None and row.fields.get("causal") is False


def head_name(config: TransformerConfig) -> str:
    return FAMILIES[config.family].names.get("head", "") + ".weight"


def outline(config: TransformerConfig) -> DecoderWeights:
    return _weights(config, _Outline(_EXPERT_LAYOUTS[0]))


def places(config: TransformerConfig) -> dict[str, tuple[tuple[int, ...], list[tuple[str, Pick]]]]:
    """For each Hugging Face name, in all layouts that `from_state` reads: a weight's shape and the roles that it fills (paths in
    `DecoderWeights`), each with the function that selects its part."""
    by_name: dict[str, tuple[tuple[int, ...], list[tuple[str, Pick]]]] = {}
    for layout in _EXPERT_LAYOUTS if any(layer.experts for layer in config.layers) else _EXPERT_LAYOUTS[:1]:
        source = _Outline(layout)
        roles: dict[str, list[tuple[str, Pick]]] = {}
        for role, leaf in leaves(_weights(config, source)):
            name, pick, _ = source.found[id(leaf)]
            roles.setdefault(name, []).append((role, pick))
        by_name |= {name: (source.named[name], parts) for name, parts in roles.items()}
    if config.tied and config.has_head:
        by_name[FAMILIES[config.family].names["embed"] + ".weight"][1].append(("head", _all))
    return by_name


def layer_weights(config: TransformerConfig, index: int, state: Mapping[str, Matrix]) -> LayerWeights:
    """Read one layer's weights from `state`, by their names inside the layer."""
    return _layer(_Reader(config, _State(state)), config.layers[index], "")


@dataclass(frozen=True, slots=True)
class _Reader:
    config: TransformerConfig
    source: _Source

    @property
    def row(self) -> FamilyRow:
        return FAMILIES[self.config.family]

    def table(self, role: str, *shape: int, pick: Pick = _all) -> Tensor:
        return self.source.tensor(f"{self.row.names[role]}.weight", *shape, pick=pick)

    def norm(self, at: str, role: str, present: bool, size: int = 0) -> dict[str, Tensor]:
        if not present:
            return {}
        name, size = at + self.row.names[role], size or self.config.hidden_size
        biases = {f"{role}_bias": self.source.tensor(f"{name}.bias", size)} if self.config.norm_bias else {}
        return {role: self.source.tensor(f"{name}.weight", size), **biases}

    def head_norm(self, at: str, role: str, rows: int) -> dict[str, Any]:
        """The weights that normalize queries or keys of `rows` features."""
        c, source, names, dim = self.config, self.source, self.row.names, self.config.head_dim
        if c.qk_norm == "whole":
            return {role: source.tensor(f"{at}{names[role]}.weight", rows, pick=self.own(role[0], rows))}
        if c.qk_norm == "head":
            biases = {f"{role}_bias": source.tensor(f"{at}{names[role]}.bias", dim)} if c.qk_norm_bias else {}
            return {role: source.tensor(f"{at}{names[role]}.weight", dim), **biases}
        heads, turned = range(rows // dim)[c.own_heads[role[0] != "q"]], self._turned(role[0])
        if (listed := names.get(f"{role}s")) is not None:
            return {f"{role}s": [source.tensor(f"{at}{listed}.{head}.weight", dim, pick=turned) for head in heads]}
        picks: list[Pick] = [partial(lambda head, w: turned(w[head]), head) for head in heads]
        return {f"{role}s": [source.tensor(f"{at}{names[role]}.weight", rows // dim, dim, pick=pick) for pick in picks]}

    def product(self, at: str, role: str, rows: int, columns: int, bias: bool) -> dict[str, Any]:
        """A matrix [rows, columns] and its bias, which may be rows of a larger one."""
        stored, pick = self._part(role, rows)
        name = at + self.row.names[role if role in self.row.names else "qkv" if role in "qkv" else "gate_up"]
        turned = self.row.transposed
        shape = (columns, stored) if turned else (stored, columns)
        own, inputs = (lambda w: pick(w.T)) if turned else pick, self.inputs(role)
        found: dict[str, Any] = {role: self.source.matrix(f"{name}.weight", *shape, pick=own, inputs=inputs)}
        if bias:
            found[f"{role}_bias"] = self.bias(role, f"{name}.bias", stored, pick)
        return found

    def bias(self, role: str, name: str, rows: int, pick: Pick) -> Tensor | None:
        """None where another process adds the bias to its terms."""
        bias = self.source.tensor(name, rows, pick=pick)
        return bias if self.inputs(role) is None or self.config.part.index == 0 else None

    def inputs(self, role: str) -> slice | None:
        """The inputs that this process multiplies by a matrix; None: all."""
        c = self.config
        if not c.part.sums or c.part.tp_size == 1 or role not in ("out", "down"):
            return None
        heads, _ = c.own_heads
        return c.part.columns(c.intermediate_size) if role == "down" else slice(heads.start * c.value_dim, heads.stop * c.value_dim)

    def own(self, role: str, rows: int) -> Pick:
        """Return a function that selects this process's rows of a matrix."""
        if self.config.part.tp_size == 1 or self.inputs(role) is not None:
            return _all
        if role not in ("q", "k", "v"):
            return _rows(self.config.part.columns(rows), rows)
        heads, dim = self.config.own_heads[role != "q"], self.config.head_dim
        return _rows(slice(heads.start * dim, heads.stop * dim), rows)

    def _part(self, role: str, rows: int) -> tuple[int, Pick]:
        """The number of rows of the stored matrix, and a function that selects this process's rows of a role."""
        c, row = self.config, self.row
        kv, group, dim = c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim
        stored, pick, own = rows, _all, self.own(role, rows)
        if role not in row.names and role in ("gate", "up"):
            stored, pick = 2 * rows, lambda w: w[:rows] if role == "gate" else w[rows:]
        elif role not in row.names:
            stored = kv * (group + 2) * dim
            place = slice(0, group) if role == "q" else slice(group, group + 1) if role == "k" else slice(group + 1, group + 2)
            if row.grouped:
                pick = lambda w: w.unflatten(0, (kv, group + 2, dim))[:, place].flatten(0, 2)  # noqa: E731
            else:
                pick = lambda w: w[place.start * kv * dim : place.stop * kv * dim]  # noqa: E731
        turned = self._turned(role)
        if turned is _all:
            return stored, pick if own is _all else lambda w: own(pick(w))
        return stored, lambda w: turned(own(pick(w)))

    def _turned(self, role: str) -> Pick:
        """Return a function that reorders the rows of heads as `config.Rope` expects them."""
        ropes = [layer.rope for layer in self.config.layers if layer.rope is not None]
        if not self.row.interleaved or role not in ("q", "k") or not ropes:
            return _all
        dim, num = self.config.head_dim, 2 * len(ropes[0].inv_freq)
        return lambda w: _halves(w, dim, num)


def _halves(w: Tensor, head_dim: int, num: int) -> Tensor:
    """Reorder the first `num` rows of each head from pairs (2i, 2i + 1) to pairs (i, i + num / 2). Scores do not change."""
    heads = w.unflatten(0, (-1, head_dim))
    turned = heads[:, :num].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, heads[:, num:]], 1).flatten(0, 1)


def _weights(config: TransformerConfig, source: _Source) -> DecoderWeights:
    c, hidden, read = config, config.hidden_size, _Reader(config, source)
    names = read.row.names
    has_head, own = c.has_head and c.part.has_head, _rows(c.part.columns(c.vocab_size), c.vocab_size)
    size = c.embed_size or hidden
    norms = dict[str, Any](final_norm=None, **read.norm("", "embed_norm", c.embed_norm, size))
    between: dict[str, Any] = {}
    if c.embed_size:
        between["embed_in"] = source.matrix(f"{names['embed_in']}.weight", hidden, size)
        between["embed_in_bias"] = source.tensor(f"{names['embed_in']}.bias", hidden) if c.embed_bias else None
        between["embed_out"] = source.matrix(f"{names['embed_out']}.weight", size, hidden) if has_head else None
    return DecoderWeights(
        embed=source.stored(f"{names['embed']}.weight", c.vocab_size, size, pick=own),
        head=source.stored(head_name(c), c.vocab_size, size, pick=own) if has_head and not c.tied else None,
        head_bias=source.tensor(f"{names['head']}.bias", c.vocab_size, pick=own) if has_head and c.head_bias else None,
        positions=read.table("positions", c.num_positions, hidden if c.late_positions else size) if c.num_positions else None,
        token_types=read.table("token_types", c.num_token_types, size) if c.num_token_types else None,
        **norms | read.norm("", "final_norm", c.final_norm) | between,
        layers=[_layer(read, layer, f"{names['layers']}.{i}.") for i, layer in enumerate(c.layers)],
    )


def _layer(read: _Reader, layer: Layer, at: str) -> LayerWeights:
    c, hidden = read.config, read.config.hidden_size
    q_size, kv_size, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    parts: dict[str, Any] = {}
    for role in c.norms:
        parts |= read.norm(at, role, role != "input_norm" or layer.has_input_norm)
    if c.latent is not None:
        weights = LayerWeights(**parts, **_latent_attention(read, c.latent, at))
    else:
        for role, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            parts |= read.product(at, role, rows, hidden, c.qkv_bias)
        weights = LayerWeights(**parts, **read.product(at, "out", hidden, q_size, c.out_bias))
    if c.qk_norm:
        weights = replace(weights, **read.head_norm(at, "q_norm", q_size), **read.head_norm(at, "k_norm", kv_size))
    if layer.experts is None:
        first = [read.product(at, role, inner, hidden, c.mlp_bias) for role in (["gate"] if c.gated else []) + ["up"]]
        weights.mlp = Mlp(**read.product(at, "down", hidden, inner, c.mlp_bias), **{k: m for one in first for k, m in one.items()})
        return weights
    _add_experts(weights, read, layer.experts, at)
    return weights


def _add_experts(weights: LayerWeights, read: _Reader, experts: RoutedExperts, at: str) -> None:
    c, source, hidden = read.config, read.source, read.config.hidden_size
    moe = at + ("block_sparse_moe." if at + "block_sparse_moe.gate.weight" in source else "mlp.")
    weights.router = source.tensor(moe + "gate.weight", experts.num, hidden)
    if experts.score == "sigmoid":
        weights.router_bias = source.tensor(moe + "gate.e_score_correction_bias", experts.num)
    weights.experts = _expert_mlps(source, moe + "experts.", experts, hidden, c.part)
    if size := experts.shared_size:
        own = _own_expert(c.part, size, hidden, shared=True)
        weights.shared = _expert(source, f"{moe}shared_expert{'' if experts.shared_gate else 's'}.", size, hidden, own)
        if experts.shared_gate:
            weights.shared_gate = source.tensor(moe + "shared_expert_gate.weight", 1, hidden)


def _latent_attention(read: _Reader, latent: Latent, at: str) -> dict[str, Any]:
    """Attention weights. Files have a head's rotated features last, in pairs (2i, 2i + 1), and its keys beside its values."""
    c, source, names = read.config, read.source, read.row.names
    heads, turned, plain, values, rank = c.num_heads, latent.rotary_dim, latent.plain_dim, latent.value_dim, latent.rank
    mine, _ = c.own_heads

    def of_heads(w: Tensor) -> Tensor:
        """This process's heads: [heads, rows of one, columns]."""
        if w.dim() != 2:
            raise ValueError(
                "stored codes of latent attention cannot be rearranged; give the unquantized model, and dtype int8 or int4"
            )
        return w.unflatten(0, (heads, -1))[mine]

    def queries(w: Tensor) -> Tensor:
        own = of_heads(w)
        return _halves(torch.cat([own[:, plain:], own[:, :plain]], 1).flatten(0, 1), plain + turned, turned)

    def key(w: Tensor) -> Tensor:
        return torch.cat([_halves(w[rank:], turned, turned), w[:rank]])

    def matrix(role: str, name: str, *shape: int, pick: Pick = _all) -> dict[str, Any]:
        found: dict[str, Any] = {role: source.matrix(f"{at}{names[name]}.weight", *shape, pick=pick, inputs=read.inputs(role))}
        if c.qkv_bias and name in ("latent", "q_latent", "out"):
            found[f"{role}_bias"] = read.bias(role, f"{at}{names[name]}.bias", shape[0], pick)
        if role in ("latent", "q_latent"):
            size = rank if role == "latent" else latent.q_rank
            found[f"{role}_norm"] = source.tensor(f"{at}{names[f'{role}_norm']}.weight", size)
        return found

    both, of_q = heads * (plain + values), "of_q_latent" if latent.q_rank else "q"
    return {
        **matrix("latent", "latent", rank + turned, c.hidden_size, pick=key),
        **(matrix("q_latent", "q_latent", latent.q_rank, c.hidden_size) if latent.q_rank else {}),
        **matrix("q", of_q, heads * (plain + turned), latent.q_rank or c.hidden_size, pick=queries),
        **matrix("k", "k", both, rank, pick=lambda w: of_heads(w)[:, :plain].transpose(1, 2).flatten(0, 1)),
        **matrix("v", "v", both, rank, pick=lambda w: of_heads(w)[:, plain:].flatten(0, 1)),
        **matrix("out", "out", c.hidden_size, heads * values, pick=read.own("out", c.hidden_size)),
    }


_DENSE = "gate_proj up_proj down_proj"


class _OwnExpert(NamedTuple):
    """The part of an expert that this process holds."""

    inner: slice  # rows of gate and up
    out: slice  # rows of down
    inputs: slice | None  # of down; None: all


def _own_expert(part: ModelPart, size: int, hidden: int, *, shared: bool = False) -> _OwnExpert:
    inner = part.expert_columns(size, shared=shared)
    if not part.sums:
        return _OwnExpert(inner, part.expert_columns(hidden, shared=shared), None)
    return _OwnExpert(inner, slice(None), None if inner == slice(0, size) else inner)


def _expert(source: _Source, at: str, size: int, hidden: int, own: _OwnExpert, names: str = _DENSE) -> Mlp:
    gate, up, down = names.split()
    return Mlp(
        gate=source.matrix(f"{at}{gate}.weight", size, hidden, pick=lambda w: w[own.inner]),
        up=source.matrix(f"{at}{up}.weight", size, hidden, pick=lambda w: w[own.inner]),
        down=source.matrix(f"{at}{down}.weight", hidden, size, pick=lambda w: w[own.out], inputs=own.inputs),
    )


def _expert_mlps(source: _Source, at: str, experts: RoutedExperts, hidden: int, part: ModelPart) -> list[Mlp]:
    """Three layouts: transformers 5's stacks (live models), Mixtral's w1 w3 w2, and a dense MLP's names for each expert."""
    size, mine = experts.intermediate_size, part.experts(experts.num)
    own = _own_expert(part, size, hidden)
    if at + "gate_up_proj" not in source:
        names = "w1 w3 w2" if at + "0.w1.weight" in source else _DENSE
        return [_expert(source, f"{at}{e}.", size, hidden, own, names) for e in mine]

    def stacked(name: str, e: int, rows: slice, cut: slice, inputs: slice | None = None) -> Matrix:
        shape = (2 * size, hidden) if name == "gate_up_proj" else (hidden, size)
        return source.matrix(at + name, experts.num, *shape, pick=lambda w: w[e, rows][cut], inputs=inputs)

    return [
        Mlp(
            gate=stacked("gate_up_proj", e, slice(size), own.inner),
            up=stacked("gate_up_proj", e, slice(size, None), own.inner),
            down=stacked("down_proj", e, slice(None), own.out, own.inputs),
        )
        for e in mine
    ]
