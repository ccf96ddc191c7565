"""Compile and load the shared library of native kernels.

`setup.py` compiles `csrc/` into the package if it finds a C compiler. Otherwise, or if the sources have changed since, the first
use compiles into a per-user cache. `load` never raises: without a library the torch twins in `reference.py` run, and
`Library.reason` gives the reason.

Invariants: importing this file needs only the standard library, because `setup.py` loads it by path, before the package exists. A
library is used only if it was built from the current sources and flags (`source_hash`). The compiled file is renamed into place, so
it is never partial, and processes that need it at the same time build it once. Only `load` and `find_compiler` read the
environment.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

LIBRARY = "libslipstream_ops.so"
SETS = ("portable", "avx2", "avx512", "avx512vnni", "avx512bf16")
# The instruction sets that each source is compiled for (csrc/isa.h); "": once.
SOURCES = {
    "forward.c": SETS,
    **dict.fromkeys(("kernels.c", "quantize.c", "sparse.c", "fused.c"), SETS[:3]),
    "grouped.c": (*SETS[1:3], SETS[4]),
    **dict.fromkeys(("dispatch.c", "decoder.c", "expert_store.c", "processor.c", "words.c", "disk.c", "crc32.c"), ("",)),
}
CSRC = Path(__file__).parent / "csrc"

# -ffp-contract=off: a fused multiply-add would round differently from one instruction set to the next.
FLAGS = (
    "-std=c11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)


class BuildError(RuntimeError):
    """The compiler failed. The text ends with its first error."""


class Library(NamedTuple):
    """The loaded library, or None twice. Calls through `kernels` release the GIL; `quick`, for short calls, keeps it."""

    kernels: ctypes.CDLL | None
    quick: ctypes.PyDLL | None
    reason: str


@functools.cache
def source_hash() -> str:
    digest = hashlib.sha256(f"{FLAGS} {SOURCES}".encode())
    for path in sorted(CSRC.iterdir()):
        if path.suffix in (".c", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str] | None:
    """The command of the C compiler: $CC if set, else the first of cc, gcc and clang on the PATH."""
    chosen = os.environ.get("CC")
    for candidate in [chosen] if chosen else ["cc", "gcc", "clang"]:
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    return None


def compile_library(target: Path, compiler: list[str]) -> None:
    """Compile `csrc/` and rename the result to `target`. Raises BuildError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
        commands = [compile_one(compiler, source, isa, scratch) for source, sets in SOURCES.items() for isa in sets]
        _run(commands)
        linked = str(Path(scratch, LIBRARY))
        _run([[*compiler, "-shared", *(command[-1] for command in commands), "-o", linked, "-lm", "-lpthread"]])
        os.replace(linked, target)


def compile_one(compiler: Sequence[str], source: str, isa: str, folder: str | Path) -> list[str]:
    """The command that compiles a source for an instruction set; it ends with the path of the object in `folder`."""
    defines = f'-DSLIPSTREAM_SOURCE_HASH="{source_hash()}"', f"-DISA={isa}"
    slow = ["-O2"] if (source, isa) == ("forward.c", "portable") else []  # -O3 takes three times as long there
    return [*compiler, *FLAGS, *slow, *defines, "-c", str(CSRC / source), "-o", str(Path(folder, f"{source}.{isa}.o"))]


def _run(commands: Sequence[list[str]]) -> None:
    """Run compiler commands in parallel and wait for all of them."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"))
    except OSError as error:
        raise BuildError(f"cannot start the C compiler: {error}") from error
    finally:
        outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode != 0:
            lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["no message"]
            raise BuildError(f"{command[0]} exited with {process.returncode}: {lines[0].strip()}")


@functools.cache
def load() -> Library:
    """Load the kernels from the package or the user's cache, else compile them. Never raises; the result is cached."""
    if os.environ.get("SLIPSTREAM_NATIVE") == "0":
        return Library(None, None, "SLIPSTREAM_NATIVE=0")
    cached = _cache_directory() / LIBRARY
    for path, origin in ((Path(__file__).with_name(LIBRARY), "built when installed"), (cached, f"cached in {cached}")):
        if library := _open(path, origin):
            return library
    compiler = find_compiler()
    if compiler is None:
        return Library(None, None, "no C compiler ($CC, cc, gcc or clang on the PATH); with one, the next run builds them")
    try:
        return _build_now(cached, compiler)
    except (BuildError, OSError) as error:
        return Library(None, None, f"not built: {error}")


def kernels() -> ctypes.CDLL:
    """The library. Raises RuntimeError with the reason if there is none."""
    library = load()
    if library.kernels is None:
        raise RuntimeError(f"there are no native kernels: {library.reason}")
    return library.kernels


def function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the library with the types of its result and arguments; None without a library."""
    library = load().kernels
    symbol = None if library is None else getattr(library, name)
    if symbol is not None:
        symbol.restype, symbol.argtypes = result, arguments
    return symbol


def _build_now(cached: Path, compiler: list[str]) -> Library:
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(cached.parent):  # ranks that start together build once
            if (library := _open(cached, f"cached in {cached}")) is None:
                compile_library(cached, compiler)
                library = _open(cached, f"compiled now, cached in {cached}")
    except OSError:  # the cache is not writable: build for this process alone
        with tempfile.TemporaryDirectory(prefix="slipstream-ops-") as private:
            compile_library(Path(private, LIBRARY), compiler)
            library = _open(Path(private, LIBRARY), f"compiled now, not kept: cannot write {cached.parent}")
    if library is None:
        raise BuildError(f"the library that `{shlex.join(compiler)}` built cannot be loaded here")
    return library


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, if its file system has locks."""
    file = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _cache_directory() -> Path:
    """One directory per machine type and source hash, so that versions and architectures coexist."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "slipstream", "ops", f"{platform.machine()}-{source_hash()}")


def _open(path: Path, origin: str) -> Library | None:
    """The library at `path`, or None if it does not load here or was built from other sources."""
    from slipstream.world.host import is_intel

    if not path.is_file():
        return None
    try:
        kernels, quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        kernels.slipstream_source_hash.restype = ctypes.c_char_p
        kernels.slipstream_compiler.restype = ctypes.c_char_p
        if kernels.slipstream_source_hash() != source_hash().encode():
            return None
        if is_intel():  # [Note: Pairs of bf16]
            kernels.slipstream_use_isa(b"avx512vnni")  # no effect on a processor that lacks it
        return Library(kernels, quick, f"{kernels.slipstream_compiler().decode()}, {origin}")
    except (OSError, AttributeError):  # built for another architecture or C library, or not our library
        return None
