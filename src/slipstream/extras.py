"""Optional packages: what asks for one that is not installed says in one sentence how to get it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MissingPackageError", "needs"]


class MissingPackageError(ImportError, ValueError):
    """An optional package is not installed; the message is one sentence with the `pip install` that mends it."""


@contextmanager
def needs(what: str, *, extra: str) -> Iterator[None]:
    """Around imports of packages of an extra of pyproject.toml; `what` needs them. Raises MissingPackageError."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "slipstream"):
            raise
        how = f"pip install '.[{extra}]' in Slipstream's folder brings all that it needs, pip install {name} this one"
        raise MissingPackageError(f"{what} needs the package {name}, which is not installed: {how}", name=name) from None
