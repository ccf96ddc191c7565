"""Parse a user's dictionary into a `Config`. Errors name the dotted key, the value and how to fix it.

Before pydantic validates the dictionary (so that the schema stays a plain mirror of DeepSpeed's):

- keys that start with `_` are comments and are dropped;
- with `"slipstream": {"unknown_keys": "warn"}`, top-level keys that are not similar to a known key are dropped and noted;
- older spellings are renamed (`RENAMED`), and `"zero_optimization": true` becomes stage 1;
- `null` means "not set" and is dropped;
- `"auto"` is removed and recorded in `Parsed.autos`; `resolution.py` resolves it.

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

from slipstream.config import keys
from slipstream.config.schema import Child, Config, ZeroOptimization, child
from slipstream.config.text import check_depth, shown
from slipstream.config.values import Block

MOST_ERRORS = 20  # in one message
MOST_UNKNOWN = 100  # top-level keys that are ignored; a file with more is not a config

# Spellings that DeepSpeed has accepted, or that its documentation uses but its code does not.
_TOP = {
    "bfloat16": "bf16",
    "seq_parallel_comm_data_type": "seq_parallel_communication_data_type",
    "bf16.check_overflow": "bf16.check_grad_overflow",
    "aio.thread_count": "aio.intra_op_parallelism",
    "elasticity.prefer_large_batch": "elasticity.prefer_larger_batch",
    "tensor_parallel.tensor_parallel": "tensor_parallel.tp",
    "tensor_parallel.kernel_inject": "tensor_parallel.replace_with_kernel_inject",
}
_STAGE_3 = """prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance
module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential gather_16bit_weights_on_model_save"""
_ZERO = {
    "cpu_offload_params": "cpu_offload_param",
    **{name: f"stage3_{name}" for name in _STAGE_3.split()},
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
RENAMED: Mapping[str, str] = MappingProxyType(
    _TOP | {f"zero_optimization.{old}": f"zero_optimization.{new}" for old, new in _ZERO.items()}
)


class KeyValue(NamedTuple):
    """One value of a parsed config. given: whether the user set it."""

    key: str
    path: str
    value: Any
    given: bool


class Parsed(NamedTuple):
    config: Config
    leaves: Mapping[str, KeyValue]  # by path; absent optional blocks have none
    autos: frozenset[str]  # paths that were "auto"
    notes: tuple[str, ...]  # about keys that were ignored


def parse(raw: Mapping[str, Any]) -> Parsed:
    """Parse a config. Raises ValueError that lists the first `MOST_ERRORS` unknown keys and invalid values."""
    check_depth(raw, "the config")
    cleaning = _Cleaning(lenient=_is_lenient(raw))
    clean = cleaning.block(raw, Config, "")
    try:
        config = Config.model_validate(clean)
    except ValidationError as error:
        raise ValueError(_explain(error)) from None
    leaves = {leaf.path: leaf for leaf in _leaves(config)}
    return Parsed(config, leaves, frozenset(cleaning.autos), tuple(cleaning.notes()))


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three of `known` that are similar to `word`, best first, with scores close to the best."""
    word = word[:100].lower()  # a comparison needs time proportional to the product of the lengths
    scored = [(difflib.SequenceMatcher(None, name, word).ratio(), name) for name in known]
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    return [name for score, name in scored[:3] if score >= max(0.5, scored[0][0] - 0.15)]


def is_typo(word: str, block: type[Block]) -> bool:
    """Whether an unknown key differs from a known key of the block by one inserted, missing, wrong or swapped letter."""
    return not _one_less(word.lower()).isdisjoint(_near(block))


def is_comment(word: str, block: type[Block]) -> bool:
    """Whether `_x` is a comment or a commented-out key, not a key with a mistyped first letter."""
    return word.startswith("_") and (word[1:] in _names(block) or not is_typo(word, block))


def is_left_out(word: str) -> bool:
    """Whether an unknown top-level key is ignored in lenient mode, because no known key is similar."""
    if is_typo(word, Config):
        return False
    word = word[:100].lower()
    known = [name for name in _names(Config) if not word.startswith(f"{name}_")]  # tensorboard_dir is not a misspelled tensorboard
    return not difflib.get_close_matches(word, known, n=1, cutoff=0.8)


_NAMED = ("optimizer", "scheduler")  # a type of null means none


def _is_lenient(raw: Any) -> bool:
    own = raw.get("slipstream") if isinstance(raw, Mapping) else None
    return isinstance(own, Mapping) and str(own.get("unknown_keys")).lower() == "warn"


class _Cleaning:
    """Convert a config to current spellings and remove `null`, `"auto"` and comments."""

    def __init__(self, *, lenient: bool) -> None:
        self.lenient = lenient
        self.autos: set[str] = set()
        self.left_out: list[str] = []  # ignored unknown keys
        self.switched_off: list[str] = []  # known keys after an underscore

    def notes(self) -> Iterator[str]:
        if self.left_out:
            meant = [
                f"{shown(word)} ({' or '.join(paths)}?)" if (paths := _elsewhere(word)) else shown(word) for word in self.left_out
            ]
            yield f"unknown top-level keys are ignored: {', '.join(meant)}"
        if self.switched_off:
            disabled = ", ".join(map(shown, self.switched_off[:MOST_ERRORS]))
            yield f"keys that start with an underscore are comments, so these have no effect: {disabled}"

    def block(self, raw: Any, block: type[Block], prefix: str) -> Any:
        """Clean a block. A value that is not a mapping is returned unchanged; pydantic rejects it."""
        if block is ZeroOptimization and isinstance(raw, bool):
            return {"stage": 1} if raw else {}
        if not isinstance(raw, Mapping):
            return raw
        clean: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for written, value in raw.items():
            if not isinstance(written, str):
                raise ValueError(f"config keys must be strings, got {shown(written)} in {prefix.rstrip('.') or 'the top level'}")
            path = RENAMED.get(prefix + written, prefix + written)
            name = path.removeprefix(prefix)
            if name in origin:
                raise ValueError(
                    f"{prefix}{origin[name]} and {prefix}{written} are two spellings of the same key; keep only {path}"
                )
            field = block.model_fields.get(name)
            if field is None and self._is_dropped(written, block, prefix):
                continue
            origin[name] = written
            if field is None:
                clean[name] = value
            elif isinstance(value, str) and value.lower() == "auto":
                self.autos.add(path)
            elif value is not None and not (path in _NAMED and isinstance(value, Mapping) and value.get("type", "") is None):
                below = child(field.annotation)
                clean[name] = value if below is None else self.below(value, below, path)
        return clean

    def below(self, value: Any, below: Child, path: str) -> Any:
        if not below.many:
            return self.block(value, below.block, f"{path}.")
        if isinstance(value, Mapping):
            return {name: self.block(item, below.block, f"{path}.{name}.") for name, item in value.items()}
        if isinstance(value, list):
            return [self.block(item, below.block, f"{path}.{i}.") for i, item in enumerate(value)]
        return value

    def _is_dropped(self, word: str, block: type[Block], prefix: str) -> bool:
        if is_comment(word, block):
            if word[1:] in _names(block):
                self.switched_off.append(prefix + word)
            return True
        if prefix or not self.lenient or not is_left_out(word):
            return False
        self.left_out.append(word)
        if len(self.left_out) > MOST_UNKNOWN:
            raise ValueError(
                f"the config has more than {MOST_UNKNOWN} unknown top-level keys ({', '.join(map(shown, self.left_out[:3]))}, "
                "...), so it is not a DeepSpeed config; pass a DeepSpeed config to initialize"
            )
        return True


@cache
def _names(block: type[Block]) -> frozenset[str]:
    """Return the keys of a block and their older spellings."""
    older = (old.split(".") for old in RENAMED)
    return frozenset((*block.model_fields, *(name for *parents, name in older if _block_at(parents) is block)))


@cache
def _near(block: type[Block]) -> frozenset[str]:
    return frozenset().union(*(_one_less(name.lower()) for name in _names(block)))


def _one_less(word: str) -> set[str]:
    """Return a word and all words with one letter removed. Words that differ by one letter share one of these."""
    return {word[:100], *(word[:i] + word[i + 1 : 100] for i in range(min(len(word), 100)))}


def _leaves(block: Block, key: str = "", path: str = "") -> Iterator[KeyValue]:
    for name, field in type(block).model_fields.items():
        value = getattr(block, name)
        below = child(field.annotation)
        if below is None:
            yield KeyValue(key + name, path + name, value, name in block.model_fields_set)
        elif below.many:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for item_name, item in items:
                yield from _leaves(item, f"{key}{name}.*.", f"{path}{name}.{item_name}.")
        elif value is not None:
            yield from _leaves(value, f"{key}{name}.", f"{path}{name}.")


def _explain(error: ValidationError) -> str:
    items = error.errors(include_url=False)
    lines = [_explain_one(tuple(str(part) for part in item["loc"]), item) for item in items[:MOST_ERRORS]]
    if len(items) == 1:
        return lines[0]
    if len(items) > MOST_ERRORS:
        lines.append(f"and {len(items) - MOST_ERRORS} more")
    return "the config has several errors:\n" + "\n".join(f"- {line}" for line in lines)


def _explain_one(location: tuple[str, ...], item: Mapping[str, Any]) -> str:
    if item["type"] == "extra_forbidden":
        return _unknown(location)
    path = ".".join(part for part, _ in _walk(location))
    if item["type"] == "missing":
        return f"config key {path} is missing, but the block {'.'.join(location[:-1])} requires it; set it, or drop the block"
    if item["type"] == "model_type":
        return f'config key {path} must be an object such as {{"enabled": true}}, got {shown(item["input"])}'
    text = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"config key {path} {text}, got {shown(item['input'])}"


def _unknown(location: tuple[str, ...]) -> str:
    *parents, name = location
    prefix = "".join(f"{parent}." for parent in parents)
    block = _block_at(parents)
    text = f"unknown config key {prefix}{name[:100]}"
    elsewhere, close = _elsewhere(name), nearest(name, _names(block))
    meant = [*elsewhere, *(prefix + key for key in close)]
    if meant:
        return f"{text}; did you mean {' or '.join(dict.fromkeys(meant))}?"
    if parents:
        known = (
            f"known here: {', '.join(block.model_fields)}" if len(block.model_fields) <= 24 else "no similar key exists; remove it"
        )
        return f"{text}; {known}"
    return f'{text}; no similar key exists: remove it, or set "slipstream": {{"unknown_keys": "warn"}} to ignore such keys'


def _elsewhere(name: str) -> list[str]:
    """Return the paths at which a key of this name exists, if there are at most three."""
    paths = [key for key in (*keys.table(), *Config.model_fields) if f".{key}".endswith(f".{name}")]
    return paths if len(paths) <= 3 else []


def _walk(location: Sequence[str]) -> Iterator[tuple[str, type[Block] | None]]:
    """Yield the keys of an error's location, each with the block it opens, without the union members that pydantic adds."""
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


def _block_at(location: Sequence[str]) -> type[Block]:
    block: type[Block] = Config
    for _, opened in _walk(location):
        block = opened or block
    return block
