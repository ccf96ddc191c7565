"""Test modules compiled as pytest does it, with asserts that show their values, from its cache and into it.

Rewriting all asserts takes 15 processor seconds: `python -m tests` does it once for all lanes, and the pool's workers read it.
"""

import contextlib
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import CodeType

from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc_fp, get_cache_dir


def compiled(path: Path) -> CodeType:
    cached = get_cache_dir(path) / (path.stem + PYC_TAIL)
    code = _read_pyc(path, cached)
    if code is None:
        source_hash, code = _rewrite_test(path, None)  # type: ignore[arg-type]  # the default settings
        if not sys.dont_write_bytecode:
            with contextlib.suppress(OSError):  # of a folder that cannot be written
                cached.parent.mkdir(parents=True, exist_ok=True)
                with (part := cached.with_suffix(f".{os.getpid()}")).open("wb") as file:
                    _write_pyc_fp(file, source_hash, code)
                part.replace(cached)
    return code


def compile_all(folder: Path) -> None:
    """Fill the cache, in as many processes as there are processors."""
    if sys.dont_write_bytecode:
        return
    with ProcessPoolExecutor() as processes:
        for _ in processes.map(_compile, folder.rglob("test_*.py"), chunksize=8):
            pass


def _compile(path: Path) -> None:
    compiled(path)
