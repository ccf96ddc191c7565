"""Writes REFERENCE.md, CONFIG.md and the tables of DEEPSPEED_KEYS.md from docstrings, schema and tables of names:
`python docs/reference.py`. A test says if one is old."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import slipstream
from slipstream import zero
from slipstream.compat.constants import TABLES
from slipstream.compat.names import ALIASES, MISSING, MISSING_METHODS, SERVED
from slipstream.config import keys
from slipstream.train.pipeline import PipelineEngine

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "slipstream.initialize": slipstream.initialize,
    "slipstream.init_distributed": slipstream.init_distributed,
    "slipstream.add_config_arguments": slipstream.add_config_arguments,
    "slipstream.quantize": slipstream.quantize,
    "slipstream.zero.Init": zero.Init,
    "slipstream.zero.load": zero.load,
    "slipstream.zero.gathered": zero.gathered,
    "slipstream.ema.Ema": slipstream.ema.Ema,
    "slipstream.init_inference": slipstream.init_inference,
    "slipstream.pipeline": slipstream.pipeline,
    "slipstream.PipelineModule": slipstream.PipelineModule,
    "slipstream.LayerSpec": slipstream.LayerSpec,
    "slipstream.TiedLayerSpec": slipstream.TiedLayerSpec,
}
# For the rooms around the engine, not for users.
INTERNAL = ("wire", "together", "single", "backwards", "stores")


def page() -> str:
    """The whole page."""
    parts = [
        "# Reference",
        "Written by `python docs/reference.py` from docstrings and schema; edit those.",
        "[Functions](#functions) · [Engine](#engine) · [Engine of a pipeline](#engine-of-a-pipeline) · "
        "[Inference engine](#inference-engine) · [keys of a config](CONFIG.md)",
        "*Collective* means: all data-parallel ranks call it, in the same order.",
        "## Functions",
        *(section(name, member) for name, member in FUNCTIONS.items()),
        "## Engine",
        documented(slipstream.Engine),
        *members("engine", slipstream.Engine),
        "## Engine of a pipeline",
        documented(PipelineEngine),
        *members("pipeline_engine", PipelineEngine),
        "## Moving averages",
        *members("average", slipstream.ema.Ema),
        "## Inference engine",
        documented(slipstream.InferenceEngine),
        *members("inference_engine", slipstream.InferenceEngine),
    ]
    return "\n\n".join(parts) + "\n"


def config_page() -> str:
    """The page of all keys: DeepSpeed's and those of `slipstream {...}`."""
    honored, idle, refused = (len(keys.of_fate(fate)) for fate in keys.Fate)
    parts = [
        "# Keys of a config",
        "Written by `python docs/reference.py` from the schema; edit that.",
        f"This page lists the keys of DeepSpeed's config and of the block `slipstream`. {honored} are honored. {idle} are accepted "
        f"but have no effect; one line of the log names those that you set. {refused} belong to features that are not built: a "
        "value that enables such a feature is an error that says what to do instead, and a value that leaves it off is accepted. "
        "[DEEPSPEED_KEYS.md](DEEPSPEED_KEYS.md) groups the keys by these three fates.",
        'A default of "-" means that the key is not set. Sizes may be written as floats. `"auto"` asks for the derived value.',
        *tables(),
    ]
    return "\n\n".join(parts) + "\n"


def section(name: str, member: Callable[..., Any]) -> str:
    return f"### `{name}`\n\n{documented(member, signature(name.rpartition('.')[2], member))}"


def documented(member: Any, first: str = "") -> str:
    """Signature and docstring as they are: their columns are made for a fixed width."""
    lines = "\n\n".join(part for part in (first, inspect.getdoc(member) or "") if part)
    return f"```text\n{lines}\n```"


def signature(name: str, member: Callable[..., Any]) -> str:
    """Names and defaults; types are in the source."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(member).parameters.values()
        if parameter.name != "self"
    ]
    text = str(inspect.Signature(parameters))
    text = name + re.sub(r"<[^>]*>", "...", text)
    return "\n".join(textwrap.wrap(text, 120, subsequent_indent=" " * (len(name) + 1), break_long_words=False))


def members(prefix: str, owner: type) -> Iterator[str]:
    """The class's own public methods and properties, in the order of the source."""
    for name, member in vars(owner).items():
        if name.startswith("_") or name in INTERNAL or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        if not member.__doc__:  # of a pipeline: it raises PipelineError
            continue
        text = documented(member) if isinstance(member, property) else documented(member, signature(name, member))
        yield f"### `{prefix}.{name}`\n\n{text}"


def tables() -> Iterator[str]:
    """One table a block of the JSON."""
    blocks: dict[str, list[str]] = {}
    for name, key in keys.table().items():
        block, _, last = name.rpartition(".")
        row = f"| `{last}` | {kind_of(key.annotation)} | {shown(key.default)} | {does(key)} |"
        blocks.setdefault(block, []).append(row)
    for block, rows in blocks.items():
        title = f"### Block `{block}`" if block else "### Top level"
        yield "\n".join([title, "", "| key | value | default | what it does here |", "|---|---|---|---|", *rows])


def does(key: keys.Key) -> str:
    if key.feature is None:
        return key.meaning or f"No effect: {key.reason}."
    return f"{'Configures' if key.off is None else 'Asks for'} {key.feature.what}, which is not built: {key.feature.remedy}."


def kind_of(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    inner = [kind_of(each) for each in get_args(annotation) if isinstance(each, type) or get_args(each)]
    if get_origin(annotation) is dict:
        return "object"
    names = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}
    kinds = inner or [names.get(annotation, "")]
    return ", ".join(dict.fromkeys(kind for kind in kinds if kind))


def shown(default: Any) -> str:
    if default is None:
        return "-"
    return f"`{str(default).lower()}`" if isinstance(default, bool) else f"`{default}`"


def deepspeed_page(old: str) -> str:
    """The page of DeepSpeed's keys and names, with new tables."""
    head, rest = old.split("### Honored", 1)
    between = rest[rest.index("## Names") : rest.index("### Served")]
    return "\n\n".join([head + "\n\n".join(tables_of_keys()), between + "\n\n".join(tables_of_names())]) + "\n"


def tables_of_keys() -> list[str]:
    """Honored keys by block, keys without effect by reason, and the others by feature."""
    blocks: dict[str, list[str]] = {}
    reasons: dict[str, list[str]] = {}
    features: dict[keys.Feature, dict[str, None]] = {}  # switches, then blocks
    for name, key in keys.table().items():
        if key.feature is not None:
            of_feature = features.setdefault(key.feature, {})
            of_feature |= dict.fromkeys(([] if key.off is None else [name]) + ([f"{key.block}.*"] if key.block else []))
        elif key.fate is keys.Fate.HONORED:
            block, _, last = name.rpartition(".")
            blocks.setdefault(f"`{block}`" if block else "", []).append(last)
        else:
            reasons.setdefault(key.reason, []).append(name)
    refused = {
        f"{feature.what}: {feature.remedy}": sorted(names, key=lambda name: name.endswith(".*"))
        for feature, names in features.items()
    }
    return [
        table("Honored", ("block", "keys"), ((block, coded(names)) for block, names in blocks.items())),
        table("Without effect (logged once)", ("keys", "why"), ((coded(names), why) for why, names in reasons.items())),
        table(
            "Refused if they enable a feature that is not built",
            ("keys", "feature and alternative"),
            ((coded(names), why) for why, names in refused.items()),
        ),
    ]


def tables_of_names() -> list[str]:
    served = ((f"`{module}`", coded(sorted(" ".join(homes.values()).split()))) for module, homes in SERVED.items())
    constants = ((f"`{module}`", f"{len(values)}, such as {coded(sorted([*values][:3]))}") for module, values in TABLES.items())
    missing = (
        (f"`{module}`: {coded(sorted(n for n in names if n != '*')) or 'all other names, and the modules below'}", why)
        for module, reasons in MISSING.items()
        for why, names in by_reason(reasons).items()
    )
    methods = ((coded(sorted(f"engine.{name}" for name in names)), why) for why, names in by_reason(MISSING_METHODS).items())
    return [
        table("Served", ("module", "names"), served),
        table("Constants (a constant exists even where its feature is missing)", ("module", "how many"), constants),
        table("The same under another path", ("module", "is"), ((f"`{alias}`", f"`{of}`") for alias, of in ALIASES.items())),
        table("Missing: using one says why", ("name", "why, and what to do"), [*missing, *methods]),
    ]


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    names_of: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names_of.setdefault(why, []).append(name)
    return names_of


def coded(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table(title: str, head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"### {title}", "", f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)]
    return "\n".join(lines)


def pages(folder: Path) -> dict[str, str]:
    """The text of each page that this file writes, by its name."""
    old = (folder / "DEEPSPEED_KEYS.md").read_text()
    return {"REFERENCE.md": page(), "CONFIG.md": config_page(), "DEEPSPEED_KEYS.md": deepspeed_page(old)}


if __name__ == "__main__":
    for name, text in pages(Path(__file__).parent).items():
        Path(__file__).with_name(name).write_text(text)
