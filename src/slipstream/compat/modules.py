"""The import hook of the `deepspeed` package: creates modules from the tables in `names.py` on first import.

A module resolves a name on first access, so importing `deepspeed` loads only the parts of Slipstream that are used.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.compat.constants import TABLES
from slipstream.compat.names import ALIASES, BEYOND, MISSING, RUN, SERVED

OURS = frozenset({"__init__.py", "__pycache__"})


def _with_parents(names: Iterable[str]) -> frozenset[str]:
    parts = (name.split(".") for name in names)
    return frozenset(".".join(part[:i]) for part in parts for i in range(1, len(part) + 1))


MODULES = _with_parents([*SERVED, *TABLES, *ALIASES])


def serve(package: str) -> None:
    """Serve the table's names from the imported module `package` and all modules below it."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _fill(sys.modules[package])


def refuse_mixture(folders: Sequence[str]) -> None:
    """Raise ImportError if the package's folders contain files of the original DeepSpeed, or if its metadata is the original's."""
    strangers = [str(Path(folder) / name) for folder in folders for name in sorted(os.listdir(folder)) if name not in OURS]
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:  # run from the repository
        installed = "+slipstream"
    why = f"its folder contains files of another one ({strangers[0]} and {len(strangers) - 1} more)" if strangers else ""
    if "+slipstream" not in installed:
        why = f"the installed metadata are those of DeepSpeed {installed}"
    if why:
        raise ImportError(
            f"this is Slipstream's deepspeed, but {why}: run `pip uninstall deepspeed`, remove what is left of its folder, and "
            "install one of the two again"
        )


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith("deepspeed."):  # the package itself is a file
            return None
        if fullname.endswith(".__main__") and fullname.removesuffix(".__main__") in RUN:
            return ModuleSpec(fullname, self, origin=fullname.removesuffix(".__main__"))  # sys.argv[0]
        # importlib.util.find_spec, which checks whether a module exists, gets None for a module without names
        imports = sys._getframe(2).f_code.co_name != "find_spec"
        if fullname in MODULES or (imports and _why_not(fullname, "*") is not None):
            return ModuleSpec(fullname, self, is_package=True)
        if not imports:
            return None
        raise ModuleNotFoundError(
            f"Slipstream's deepspeed has no module {fullname!r}; docs/DEEPSPEED_KEYS.md lists the modules", name=fullname
        )

    def get_code(self, fullname: str) -> Any:
        """The code that `python -m` runs."""
        home, _, name = RUN[fullname.removesuffix(".__main__")].partition(":")
        return compile(f"import sys\nfrom {home} import {name}\nsys.exit({name}())\n", fullname, "exec")

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        _fill(module)


def _fill(module: ModuleType) -> None:
    real = ALIASES.get(module.__name__, module.__name__)
    names = [*(name for listed in SERVED.get(real, {}).values() for name in listed.split()), *TABLES.get(real, {})]
    below = [name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == module.__name__]
    filled: Any = module
    filled.__getattr__ = partial(_find, module)
    filled.__dir__ = lambda: sorted({*vars(module), *names, *below})
    filled.__all__ = names
    # `deepspeed.utils.z3_leaf_module` is both an importable module and a function as an attribute
    for name in sorted({*names} & {*below}):
        importlib.import_module(f"{module.__name__}.{name}")
        delattr(module, name)


def _why_not(module: str, name: str) -> str | None:
    """Why a module's name is missing: its own reason, or that of the whole module or of a parent package."""
    reasons = MISSING.get(module, {})
    package = module.rpartition(".")[0]
    return reasons.get(name) or reasons.get("*") or (_why_not(package, "*") if package else None)


def _find(module: ModuleType, name: str) -> Any:
    real = ALIASES.get(module.__name__, module.__name__)
    if name in TABLES.get(real, {}):
        return TABLES[real][name]
    for home, listed in SERVED.get(real, {}).items():
        if name in listed.split():
            value = getattr(importlib.import_module(home), name)
            setattr(module, name, value)
            return value
    for below in (f"{module.__name__}.{name}", f"{real}.{name}"):
        if below in MODULES or below in MISSING:
            return importlib.import_module(below)
    why = _why_not(real, name)
    if why is not None and not name.startswith("__"):
        # `from deepspeed import X` calls hasattr, then imports X as a module: only an ImportError raised here reaches the script
        imported = sys._getframe(1).f_code.co_name == "_handle_fromlist"
        raise (ImportError if imported else AttributeError)(f"{real}.{name} is not built yet: {why}")
    if real in BEYOND and not name.startswith("_"):
        return getattr(importlib.import_module(BEYOND[real]), name)
    raise AttributeError(f"module {module.__name__!r} of Slipstream has no {name!r}; docs/DEEPSPEED_KEYS.md lists the names")
