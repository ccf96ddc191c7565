"""Test modules compiled as pytest does it, with asserts that show their values, from its cache and into it.

Rewriting all asserts takes 15 processor seconds: `python -m tests` does it once for all lanes, and the pool's workers read it.

The names of `_pytest` are private. Where a version lacks one, each lane rewrites for itself, as pytest does without this module,
and a failed assert in a worker shows its line without the values.
"""

import contextlib
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import CodeType

try:
    from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc_fp, get_cache_dir

    KNOWN = True
except ImportError:
    KNOWN = False


def compiled(path: Path) -> CodeType:
    if not KNOWN:
        return compile(path.read_bytes(), path, "exec")
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
    if sys.dont_write_bytecode or not KNOWN:
        return
    with ProcessPoolExecutor() as processes:
        for _ in processes.map(_compile, folder.rglob("test_*.py"), chunksize=8):
            pass


def _compile(path: Path) -> None:
    compiled(path)
