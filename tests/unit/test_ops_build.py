"""Building and finding the native library: what is reused, what is rebuilt, and that no failure is fatal.

Compilers here are shell scripts that copy a finished library, so that nothing is really compiled.
"""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.ops import build

Compiler = Callable[[str], Path]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, no library in the package, no setting of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SLIPSTREAM_NATIVE", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "__file__", str(tmp_path / "package" / "build.py"))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Makes $CC a script; in its text, $out is the file that -o names."""

    def install(text: str) -> Path:
        script = tmp_path / "fake-cc"
        find = 'prev=; for a in "$@"; do [ "$prev" = -o ] && out=$a; prev=$a; done\n'
        script.write_text("#!/bin/sh\n" + find + text)
        script.chmod(0o755)
        monkeypatch.setenv("CC", str(script))
        return script

    return install


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that this process uses, as a file."""
    kernels = build.load().kernels
    if kernels is None:
        pytest.skip(f"no native library: {build.load().reason}")
    copy = tmp_path_factory.mktemp("finished") / build.LIBRARY
    if Path(kernels._name).exists():
        copy.write_bytes(Path(kernels._name).read_bytes())
    else:
        compiler = build.find_compiler()
        assert compiler is not None
        build.compile_library(copy, compiler)
    return copy


def load() -> build.Library:
    return build.load.__wrapped__()


def test_native_code_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_NATIVE", "0")
    assert load() == build.Library(None, None, "SLIPSTREAM_NATIVE=0")


def test_without_a_compiler_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert load().kernels is None
    assert "no C compiler" in load().reason
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert build.find_compiler() is None


def test_a_library_is_compiled_once_and_then_found(finished: Path, compiler: Compiler, tmp_path: Path) -> None:
    log = tmp_path / "log"
    compiler(f'echo "$out" >> {log}; cp {finished} "$out"')
    first = load()
    assert first.kernels is not None
    assert "compiled now, cached in" in first.reason
    objects = sum(map(len, build.SOURCES.values()))
    assert len(log.read_text().splitlines()) == objects + 1
    second = load()
    assert second.kernels is not None
    assert "cached in" in second.reason and "now" not in second.reason
    assert len(log.read_text().splitlines()) == objects + 1
    directory = Path(str(first.kernels._name)).parent
    assert [path.name for path in directory.iterdir()] == [build.LIBRARY]


def test_the_package_comes_before_the_cache(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / build.LIBRARY).write_bytes(finished.read_bytes())
    assert "built when installed" in load().reason


@pytest.mark.parametrize("text", ["not a library", "\x7fELF"])
def test_a_broken_library_is_passed_over(finished: Path, compiler: Compiler, tmp_path: Path, text: str) -> None:
    compiler(f'cp {finished} "$out"')
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / build.LIBRARY).write_text(text)
    assert "compiled now" in load().reason


def test_a_library_of_other_sources_is_passed_over(finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "source_hash", lambda: "0123456789abcdef")
    assert build._open(finished, "here") is None


def test_a_compiler_that_fails_is_quoted(compiler: Compiler) -> None:
    compiler("echo hello; echo 'words.c:1: fatal error: no stdint.h'; exit 1")
    library = load()
    assert library.kernels is None
    assert "not built: " in library.reason
    assert "exited with 1: words.c:1: fatal error: no stdint.h" in library.reason


def test_a_compiler_that_makes_rubbish_is_noticed(compiler: Compiler, tmp_path: Path) -> None:
    compiler('echo rubbish > "$out"')
    library = load()
    assert library.kernels is None
    assert "cannot be loaded here" in library.reason


def test_a_cache_that_cannot_be_written_is_done_without(
    finished: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiler(f'cp {finished} "$out"')
    library = load()
    assert library.kernels is not None
    assert "not kept" in library.reason


def test_processes_that_build_at_once_all_get_a_whole_library(finished: Path, compiler: Compiler, tmp_path: Path) -> None:
    """And one of them builds it: as many compilers for each rank would fill a host's memory."""
    compiler(f'echo >> {tmp_path}/log; sleep 0.1; cp {finished} "$out"')
    code = (
        "import importlib.util, sys;"
        "spec = importlib.util.spec_from_file_location('build', sys.argv[1]);"
        "build = importlib.util.module_from_spec(spec); spec.loader.exec_module(build);"
        "build.__file__ = '/nowhere/build.py';"
        "assert build.load().kernels is not None, build.load().reason"
    )
    source = str(Path(build.CSRC).parent / "build.py")
    processes = [subprocess.Popen([sys.executable, "-c", code, source]) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert len((tmp_path / "log").read_text()) == sum(map(len, build.SOURCES.values())) + 1


def test_the_cache_is_the_users_own(finished: Path, compiler: Compiler, tmp_path: Path) -> None:
    compiler(f'cp {finished} "$out"')
    load()
    for path in (tmp_path / "cache").rglob("*"):
        assert path.stat().st_uid == os.getuid()
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@pytest.mark.slow
def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror", "-fsyntax-only"]
    for source, sets in build.SOURCES.items():
        for isa in sets:
            command = [*build.compile_one(compiler, source, isa, tmp_path), *strict]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            assert (result.returncode, result.stderr) == (0, ""), (source, isa)
