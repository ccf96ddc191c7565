"""Cut a model's layers for tensor parallelism by their plan (parallel/cuts.py).

Attention layers are cut between heads, and a key head stays with its query heads. Parameters keep their identity, so optimizers
that hold them remain valid.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.config.arguments import load_config
from slipstream.config.plan import TensorPlan
from slipstream.parallel.around import class_before, connect_before, connect_behind, first_of, with_first
from slipstream.parallel.cuts import Cut, cuts_of, is_of_stack
from slipstream.parallel.exchange import even_shares
from slipstream.parallel.sequence import Heads, deal_heads
from slipstream.parallel.tensor import Column, Row, Sliced, Slices, Stacked, StackRegion, Vocab, even_share
from slipstream.parallel.vocabulary_loss import ShiftedLoss, calls_loss_function
from slipstream.world.mesh import Axis, nearest_divisor
from slipstream.zero.leaves import Ranges, is_quantized, mark_part, parts_of, take
from slipstream.zero.recording import keep_source
from slipstream.zero.wrap import repeated_blocks

_WANTED = "_slipstream_tp_size"  # attribute of a model
_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
_NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_NUM_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_WIDTHS = ("all_head_size", "inner_dim", "split_size")  # attributes for the width of all heads of query, key or value
_QUANTIZED = (
    "parameter {!r} is quantized; a quantized weight cannot be cut over tp ranks: use slipstream.mesh.tp 1 and ZeRO stage 3, or "
    "load the model unquantized"
)


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
    cuts = dict(cuts_of(model, plan))
    slicing = _Slicing(model, axis, plan, cuts)
    slicing.run()
    return slicing.slices


class _Slicing:
    """One pass over a model in the order of its modules, which checks every cut; then the changes that cut it, in that order."""

    def __init__(self, model: nn.Module, axis: Axis, plan: TensorPlan, cuts: Mapping[str, Cut]) -> None:
        self.model, self.axis, self.plan, self.cuts = model, axis, plan, cuts
        self.slices = Slices(axis, shares_tokens=plan.shares_tokens, dropout=_draws(model), overlaps=plan.overlaps)
        self.config = getattr(model, "config", None)
        self.modules = dict(model.named_modules())
        self.changes: list[Callable[[], Any]] = []
        self.done: set[int] = set()  # ids of parameters that are cut, and of attention modules that get fewer heads
        self.attention: str | None = None  # the attention module whose layers came last

    def run(self) -> None:
        for name, how in self.cuts.items():
            module = self.modules.get(name)
            if module is None:
                path, _, leaf = name.rpartition(".")
                self._bare(self.modules[path], leaf, how)
            elif how.kind in ("column", "row") and is_of_stack(module):
                self._of_stack(name, module, how)
            else:
                getattr(self, f"_{how.kind}")(name, module, how)
        self._tied_embeddings()
        if self.slices.shares_tokens:
            self._check_tokens()
            self.changes.append(self._share_tokens)
        for change in self.changes:
            change()
        for module in self.modules.values():
            if isinstance(module, nn.TransformerEncoderLayer):  # its fast path in evaluation reads weights; hooks disable it
                module.register_forward_pre_hook(lambda *_: None)

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
        if not is_causal:
            key, remedy = ("tensor_parallel.vocab_parallel_lm_head", "drop the key")
            if not self.plan.vocab_head:
                key, remedy = f"{name!r} is a head without gather_output", "set gather_output in its partition_config entry"
            raise ValueError(
                f"{key}: {type(base).__name__} computes a loss of its own from whole logits, not transformers' ForCausalLMLoss by "
                f"`self.loss_function`; {remedy}"
            )
        self.changes.append(partial(setattr, base, "loss_function", ShiftedLoss(self.slices)))

    def _row(self, name: str, module: nn.Module, how: Cut) -> None:
        layer = self._linear(name, module, how, Row, 1, "lora_A", splits=how.whole)
        if self.slices.shares_tokens and layer.bias is not None:
            self._partial(name, layer, how, only="bias")

    def _linear(
        self, name: str, module: nn.Module, how: Cut, mixin: type[Sliced], dim: int, adapter: str, **attributes: Any
    ) -> Any:
        """Cut dimension `dim` of [out, in] of a layer and its adapter. Returns the layer."""
        layer: Any = getattr(module, "base_layer", module)  # inside a LoRA adapter
        _weight(name, layer)
        transposed = is_transposed(layer)
        ranges, shares = self._ranges(name, layer.weight.shape[1 - dim if transposed else dim], how)
        for each in (layer, *adapters_of(module, adapter)):
            flipped = transposed and each is layer
            self._part(each.weight, 1 - dim if flipped else dim, ranges, shares)
            if dim == 0 and each.bias is not None:
                self._part(each.bias, 0, ranges, shares)
            self._become(each, mixin, shares=shares, is_transposed=flipped, **attributes)
        return layer

    def _of_stack(self, name: str, layer: Any, how: Cut) -> None:
        """Cut a linear layer [experts, out, in] of a stack of experts."""
        above = [each for path, each in self.modules.items() if name.startswith(f"{path}.".lstrip("."))]
        owner = next(each for each in reversed(above) if isinstance(each, Stacked))
        if isinstance(layer, nn.Linear):
            raise ValueError(f"{name!r} is a layer of experts that run one by one, which cannot be sliced: keep it whole (skip)")
        dim = ("column", "row").index(how.kind)
        ranges, shares = self._ranges(name, layer.weight.shape[1 + dim], how)
        self._part(layer.weight, 1 + dim, ranges)
        if layer.bias is not None and dim == 0:
            self._part(layer.bias, 1, ranges)
        elif layer.bias is not None:
            self._partial(name, layer, how, only="bias")

        def change() -> None:
            features = "out_features" if dim == 0 else "in_features"
            share = 1.0 if dim == 0 or self.axis.index == 0 else 0.0  # other ranks contribute zero gradients at the same time
            vars(layer).update({features: shares[self.axis.index], "share_of_bias": share})
            owner.region = owner.region or StackRegion(self.slices)

        self.changes.append(change)

    def _vocab(self, name: str, module: nn.Module, how: Cut) -> None:
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) is not an embedding without max_norm, so its rows cannot be shared"
            )
        (first, stop), *_ = ranges = (even_share(module.num_embeddings, self.axis),)
        self._part(_weight(name, module), 0, ranges)
        padding = module.padding_idx
        local = padding - first if padding is not None and first <= padding < stop else None
        self._become(module, Vocab, first=first, padding_idx=local, num_embeddings=stop - first)

    def _heads(self, name: str, module: nn.Module, how: Cut) -> None:
        heads, _ = self._dealt(name)
        own = heads[self.axis.index].queries
        self._part(_weight(name, module), 1, ((own.start, own.stop),))

    def _partial(self, name: str, module: nn.Module, how: Cut, only: str = "") -> None:
        for leaf, param in module.named_parameters(recurse=False):
            if not only or leaf == only:
                self.changes.append(partial(mark_part, param, "tp", 1))

    def _experts(self, name: str, module: nn.Module, how: Cut) -> None:
        self.changes.append(partial(_around, module, self.slices))

    def _bare(self, module: nn.Module, leaf: str, how: Cut) -> None:
        """A stacked parameter [experts, out, in], or a matrix."""
        param = getattr(module, leaf)
        dim = param.dim() - (1 if how.kind == "row" or (how.kind == "packed" and how.parts is None) else 2)
        self._part(param, dim, self._ranges("", param.shape[dim], how)[0])

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
        queries = _first(parent, config, _NUM_HEADS)
        keys = _first(parent, config, _NUM_KEY_HEADS) or queries
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
        if id(parent) not in self.done:
            self.done.add(id(parent))
            self.changes.append(partial(self._tell, parent, queries, width, heads[self.axis.index]))
        return heads, (queries, keys, width)

    def _tell(self, parent: nn.Module, queries: int, width: int, own: Heads) -> None:
        """Set the numbers of this rank's heads on the attention module."""
        vars(parent).update(_slipstream_heads=queries)
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

    def _part(self, param: nn.Parameter, dim: int, ranges: Ranges, shares: Sequence[int] = ()) -> None:
        if id(param) not in self.done:
            self.done.add(id(param))
            length = param.shape[dim]
            different = self.axis.size * length // max(sum(shares), length)  # fewer than ranks if several share each key head
            self.changes.append(partial(keep_part, param, "tp", different, dim, ranges))

    def _become(self, module: nn.Module, mixin: type[Sliced], **attributes: Any) -> None:
        self.changes.append(partial(become, module, mixin, self.slices, **attributes))

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

    def _check_tokens(self) -> None:
        """Raise ValueError if there are no blocks between which to share tokens, or if ranks would attend only to their own."""
        blocks = repeated_blocks(self.model)
        if not blocks:
            raise ValueError(
                f"{type(self.model).__name__} has no repeated blocks, between which ranks could share the tokens: drop "
                f"slipstream.tensor.sequence_parallel"
            )
        for path in blocks:
            parents = [self.modules[name.rpartition(".")[0]] for name in self.cuts if name.startswith(f"{path}.")]
            is_sliced = any(isinstance(getattr(parent, each, None), int) for parent in parents for each in _HEAD_DIMS)
            if hasattr(self.config, "num_attention_heads") and not is_sliced:
                raise ValueError(
                    f"slipstream.tensor.sequence_parallel: the attention of {path!r} ({type(self.modules[path]).__name__}) is not "
                    "sliced, and needs the tokens of all ranks: drop the key, or slice it by tensor_parallel.partition_config"
                )

    def _share_tokens(self) -> None:
        """Between regions, each rank has a share of the tokens (Korthikanti et al., arXiv:2205.05198)."""
        blocks = {path: self.modules[path] for path in repeated_blocks(self.model)}
        for path, block in blocks.items():
            for name, module in block.named_modules():
                if f"{path}.{name}" not in self.cuts:
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
        order = list(blocks.values())
        scatter_before(order[0], self.slices)
        gather_behind(order[-1], self.slices)
        getattr(self.model, "base_model", self.model).register_forward_hook(_all_router_logits(self.slices))


def keep_part(param: nn.Parameter, axis: str, size: int, dim: int, ranges: Ranges, slices: int = 1) -> None:
    """Cut a whole parameter in place to this rank's ranges of a dimension, and mark it as a part (`mark_part`)."""
    keep_source(param)
    length = param.shape[dim]
    with torch.no_grad():
        param.data = take(param.data, dim, ranges)
    param.grad = None
    mark_part(param, axis, size, dim, whole=length, ranges=ranges, slices=slices)


def become(module: Any, mixin: type[Sliced], slices: Slices, **attributes: Any) -> None:
    """Make a layer whose parameters are cut a sliced one."""
    if not isinstance(module, mixin):
        module.__class__ = class_before(
            mixin, type(module), f"{mixin.__name__}Parallel{type(module).__name__}", __module__=__name__
        )
    vars(module).update(attributes, slices=slices)
    for each, dim in (("out_features", 0), ("in_features", 1)):
        if isinstance(vars(module).get(each), int):
            setattr(module, each, module.matrix.shape[dim])


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
