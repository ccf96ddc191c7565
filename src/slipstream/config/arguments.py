"""Sources of a config: a file, a dictionary, or the command-line flags of DeepSpeed scripts.

`load_config` returns one dictionary for all of them. Conflicting sources raise an error that names both.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from slipstream.config.text import check_depth, read_json
from slipstream.config.trial import current, laid_over
from slipstream.world.brief import BriefError
from slipstream.world.sizes import check_stated, launched_sizes

ConfigLike: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]

_FLAGS = ("deepspeed_config", "deepscale_config")  # the second was the name before 2020


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config PATH` (and their older names) to a script's parser."""
    group = parser.add_argument_group("Slipstream", "flags of DeepSpeed scripts")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; initialize() ignores it")
    group.add_argument("--deepspeed_config", type=str, default=None, metavar="PATH", help="the JSON config")
    group.add_argument("--deepscale", action="store_true", help="older name of --deepspeed")
    group.add_argument("--deepscale_config", type=str, default=None, metavar="PATH", help="older name of --deepspeed_config")
    return parser


class ConfigError(BriefError, ValueError):
    """`initialize` cannot use a config. Uncaught, it is printed without Slipstream's frames."""


class LoadedConfig(NamedTuple):
    raw: dict[str, Any]
    notes: tuple[str, ...]  # warnings about the file; rank 0 logs them
    path: Path | None = None  # of the file

    def refusal(self, error: ValueError) -> ConfigError:
        """The error to raise for an error in the config: it names the file."""
        return ConfigError(str(error) if self.path is None else f"{self.path.absolute()}: {error}")


def load_config(config: ConfigLike | None = None, config_params: ConfigLike | None = None, args: Any = None) -> dict[str, Any]:
    """Return the config of `initialize(config=, config_params=, args=)` as a new dictionary.

    Pass one of the three arguments; several are allowed only if they are the same path or equal dictionaries.
    Raises ValueError if there is no config, if two differ, or if a file is missing or is not JSON.
    """
    return read_config(config, config_params, args).raw


def read_config(config: ConfigLike | None = None, config_params: ConfigLike | None = None, args: Any = None) -> LoadedConfig:
    """`load_config`, with notes about the file."""
    sources: dict[str, ConfigLike] = {}
    for name, value in (("config", config), ("config_params", config_params)):
        if value is not None:
            sources[f"initialize({name}=)"] = value
    for flag in _FLAGS:
        if (value := _flag(args, flag)) is not None:
            sources[f"--{flag}"] = value
    trial = current()
    if trial is not None and not sources:
        return LoadedConfig(dict(trial.config), ())
    if not sources:
        raise ValueError(
            "no config: pass a path or a dictionary as initialize(config=), or start the script with "
            "--deepspeed_config PATH and pass the parsed arguments as initialize(args=)"
        )
    (first, chosen), *others = sources.items()
    loaded = _read(chosen)
    for name, value in others:
        if not _same(chosen, value):
            raise ValueError(f"two configs: {first} is {_brief(chosen)} and {name} is {_brief(value)}; pass one of them")
    raw = loaded.raw if trial is None else laid_over(loaded.raw, trial.config)
    if sizes := launched_sizes():
        check_stated(raw, sizes)
        raw = laid_over(raw, {"slipstream": {"mesh": sizes}})
    return loaded._replace(raw=raw)


def _flag(args: Any, name: str) -> Any:
    if isinstance(args, Mapping):
        return args.get(name)
    return getattr(args, name, None)


def _same(one: ConfigLike, other: ConfigLike) -> bool:
    if isinstance(one, Mapping) or isinstance(other, Mapping):
        return one == other
    return Path(one).resolve() == Path(other).resolve()


def _brief(config: ConfigLike) -> str:
    return f"a dictionary of {len(config)} keys" if isinstance(config, Mapping) else repr(os.fspath(config))


def _read(config: ConfigLike) -> LoadedConfig:
    if isinstance(config, Mapping):
        check_depth(config, "the config")
        return LoadedConfig(copy.deepcopy(dict(config)), ())
    if not isinstance(config, (str, os.PathLike)):
        raise ValueError(f"the config must be a path or a dictionary, got {type(config).__name__}: {config!r}")
    path = Path(config)
    try:
        if not path.is_file():
            raise ValueError(f"no config file at {str(path)!r} (working directory {str(Path.cwd())!r})")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}; save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot read the config file {path.absolute()}: {error.strerror}") from None
    loaded, tolerated = read_json(text, str(path))
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} contains a JSON {type(loaded).__name__}; a config must be an object: {{...}}")
    notes = (f"{path} has comments or trailing commas, which are not valid JSON; they are ignored",) * tolerated
    return LoadedConfig(loaded, notes, path)
