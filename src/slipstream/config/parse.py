"""A user's dictionary becomes a `Config`, or an error that names the dotted key, the value and the remedy.

Three things happen before pydantic sees the dictionary, so that the schema stays a plain mirror:

- older spellings are renamed (`RENAMED`), and `"zero_optimization": true` becomes stage 1;
- `null` means "not set" and is dropped;
- `"auto"` is taken out and remembered in `Parsed.autos`; `resolution.py` resolves it.

Paths: a `key` is generic (`...different_groups.*.modules`), a `path` is concrete
(`...different_groups.wq1.modules`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from slipstream.config.schema import Child, Config, ZeroOptimization, child
from slipstream.config.values import Block

# Spellings that DeepSpeed has accepted over the years, or that its documentation uses and its code does not.
_TOP = {
    "bfloat16": "bf16",
    "seq_parallel_comm_data_type": "seq_parallel_communication_data_type",
    "bf16.check_overflow": "bf16.check_grad_overflow",
    "aio.thread_count": "aio.intra_op_parallelism",
    "elasticity.prefer_large_batch": "elasticity.prefer_larger_batch",
    "tensor_parallel.tensor_parallel": "tensor_parallel.tp",
    "tensor_parallel.kernel_inject": "tensor_parallel.replace_with_kernel_inject",
}
_ZERO = {
    "cpu_offload_params": "cpu_offload_param",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "module_granularity_threshold": "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential": "stage3_allgather_sequential",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
RENAMED: Mapping[str, str] = MappingProxyType(
    _TOP | {f"zero_optimization.{old}": f"zero_optimization.{new}" for old, new in _ZERO.items()}
)


class Leaf(NamedTuple):
    """One value of a parsed config; `given` says whether the user set it."""

    key: str
    path: str
    value: Any
    default: Any
    given: bool


class Parsed(NamedTuple):
    config: Config
    leaves: Mapping[str, Leaf]  # by path; blocks that are off by being absent have none
    autos: frozenset[str]  # paths that were "auto"


def parse(raw: Mapping[str, Any]) -> Parsed:
    autos: set[str] = set()
    clean = _clean(raw, Config, "", autos)
    try:
        config = Config.model_validate(clean)
    except ValidationError as error:
        raise ValueError(_explain(error)) from None
    return Parsed(config, {leaf.path: leaf for leaf in _leaves(config)}, frozenset(autos))


@cache
def schema_keys() -> Mapping[str, Any]:
    """Every key of the schema, with its default."""
    return MappingProxyType(dict(_static(Config, "")))


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Up to three of `known` that `word` may have been meant to be, best first, none far behind the best."""
    scored = [(difflib.SequenceMatcher(None, name, word.lower()).ratio(), name) for name in known]
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    return [name for score, name in scored[:3] if score >= max(0.5, scored[0][0] - 0.15)]


def _clean(raw: Any, block: type[Block], prefix: str, autos: set[str]) -> Any:
    """`raw` in today's spelling, without `null` and `"auto"`; pydantic refuses what is no mapping."""
    if block is ZeroOptimization and isinstance(raw, bool):
        return {"stage": 1} if raw else {}
    if not isinstance(raw, Mapping):
        return raw
    clean: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for written, value in raw.items():
        if not isinstance(written, str):
            raise ValueError(f"config keys are strings, got {written!r} in {prefix.rstrip('.') or 'the top level'}")
        path = RENAMED.get(prefix + written, prefix + written)
        name = path.removeprefix(prefix)
        if name in origin:
            raise ValueError(
                f"{prefix}{origin[name]} and {prefix}{written} are two spellings of one key; keep {path} and drop the other"
            )
        origin[name] = written
        field = block.model_fields.get(name)
        if field is None:
            clean[name] = value
        elif isinstance(value, str) and value.lower() == "auto":
            autos.add(path)
        elif value is not None:
            below = child(field.annotation)
            clean[name] = value if below is None else _clean_below(value, below, path, autos)
    return clean


def _clean_below(value: Any, below: Child, path: str, autos: set[str]) -> Any:
    if not below.many:
        return _clean(value, below.block, f"{path}.", autos)
    if isinstance(value, Mapping):
        return {name: _clean(item, below.block, f"{path}.{name}.", autos) for name, item in value.items()}
    if isinstance(value, list):
        return [_clean(item, below.block, f"{path}.{i}.", autos) for i, item in enumerate(value)]
    return value


def _static(block: type[Block], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in block.model_fields.items():
        below = child(field.annotation)
        if below is None:
            yield prefix + name, None if field.is_required() else field.get_default(call_default_factory=True)
        else:
            yield from _static(below.block, f"{prefix}{name}.*." if below.many else f"{prefix}{name}.")


def _leaves(block: Block, key: str = "", path: str = "") -> Iterator[Leaf]:
    for name, field in type(block).model_fields.items():
        value = getattr(block, name)
        below = child(field.annotation)
        if below is None:
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            yield Leaf(key + name, path + name, value, default, name in block.model_fields_set)
        elif below.many:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for item_name, item in items:
                yield from _leaves(item, f"{key}{name}.*.", f"{path}{name}.{item_name}.")
        elif value is not None:
            yield from _leaves(value, f"{key}{name}.", f"{path}{name}.")


def _explain(error: ValidationError) -> str:
    lines = [_explain_one(tuple(str(part) for part in item["loc"]), item) for item in error.errors()]
    return lines[0] if len(lines) == 1 else "the config has several errors:\n" + "\n".join(f"- {x}" for x in lines)


def _explain_one(location: tuple[str, ...], item: Mapping[str, Any]) -> str:
    if item["type"] == "extra_forbidden":
        return _unknown(location)
    path = ".".join(_only_keys(location))
    if item["type"] == "missing":
        return f"config key {path} is missing: {'.'.join(location[:-1])} needs it"
    if item["type"] == "model_type":
        return f'config key {path} must be an object such as {{"enabled": true}}, got {item["input"]!r}'
    text = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"config key {path} {text}, got {item['input']!r}"


def _unknown(location: tuple[str, ...]) -> str:
    *parents, name = location
    prefix = "".join(f"{parent}." for parent in parents)
    spellings = [old.removeprefix(prefix) for old in RENAMED if old.startswith(prefix)]
    siblings = list(_block_at(parents).model_fields)
    text = f"unknown config key {prefix}{name}"
    elsewhere = [key for key in (*schema_keys(), *Config.model_fields) if f".{key}".endswith(f".{name}")]
    close = nearest(name, [*siblings, *(spelling for spelling in spellings if "." not in spelling)])
    meant = [*(elsewhere if len(elsewhere) <= 3 else ()), *(prefix + near for near in close)]
    if meant:
        return f"{text}; did you mean {' or '.join(dict.fromkeys(meant))}?"
    return f"{text}; no key is near it" if len(siblings) > 24 else f"{text}; known here: {', '.join(siblings)}"


def _walk(location: Sequence[str]) -> Iterator[tuple[str, type[Block] | None]]:
    """The keys of an error's location, each with the block it opens (pydantic adds union members)."""
    block: type[Block] | None = Config
    many = False
    for part in location:
        if many:
            many = False
            yield part, block
            continue
        field = None if block is None else block.model_fields.get(part)
        if field is None:
            return
        below = child(field.annotation)
        block, many = (None, False) if below is None else below
        yield part, block


def _only_keys(location: Sequence[str]) -> list[str]:
    return [part for part, _ in _walk(location)]


def _block_at(location: Sequence[str]) -> type[Block]:
    block: type[Block] = Config
    for _, opened in _walk(location):
        assert opened is not None, f"{location} does not name a block"
        block = opened
    return block
