"""The process of one rank: runs the user's script as `python script.py` would, and writes a failure record instead of a traceback.

Started as `python -m slipstream.launch.worker [--report] [--pass-local-rank] [-m | --exec] [--log=PREFIX] [--cores=LIST] TARGET
ARGS...` by torchrun (the agent reads the records from a directory), or with `--report` by srun and mpirun (the record goes to
stderr as a marked line, and the rank discovers its own rank).

Invariants: TARGET sees `sys.argv`, `sys.path[0]` and `__main__` as if started directly; a rank that raises exits within `EXIT_S`
(native libraries tend to hang at exit), so that its peers can be stopped; a rank dies with its agent.
"""

from __future__ import annotations

import argparse
import builtins
import ctypes
import faulthandler
import gc
import importlib.util
import io
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from io import open_code
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

from slipstream.launch import cores
from slipstream.launch.failure import Failure, decode, encode, is_consequence, shorten
from slipstream.world import brief
from slipstream.world import discover as places

EXIT_S = 2.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """This rank's position in the job, and where its record is written."""

    rank: int
    local_rank: int
    attempt: int
    folder: Path | None  # None: the record goes to the terminal
    terminal: int = 2  # stderr's descriptor from before it became a file


def _file(folder: Path, attempt: int, rank: int, suffix: str) -> Path:
    """The file of a rank: its failure record (.json) or the stack at a fatal signal (.stack)."""
    return folder / f"attempt{attempt}-rank{rank}{suffix}"


def read_stack(folder: Path, attempt: int, rank: int) -> str:
    """Python's stack at the fatal signal of a rank, without our frames; empty if there is none."""
    path = _file(folder, attempt, rank, ".stack")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    skipped = (
        f'File "{__file__}"',
        f'File "{Path(__file__).with_name("zygote.py")}"',
        'File "<frozen runpy>"',
        "Extension modules:",
    )
    return shorten("\n".join(line for line in lines if not line.strip().startswith(skipped)).strip())


def read_records(folder: Path, attempt: int) -> list[Failure]:
    """The failure records that the ranks of one attempt wrote."""
    records = (decode(path.read_text()) for path in sorted(folder.glob(f"attempt{attempt}-rank*.json")))
    return [record for record in records if record is not None]


def _without_our_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the user's first frame on."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return frame


def describe(error: BaseException, place: RankPlace) -> Failure:
    """The failure record of the exception that ended the script."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        message = f"sys.exit({error.code})" if isinstance(error.code, int) else str(error.code)
        text = ""
    else:
        code = 1
        message = traceback.format_exception_only(error)[-1].strip()
        error.__traceback__ = _without_our_frames(error)
        text = brief.describe(error) if isinstance(error, brief.BriefError) else "".join(traceback.format_exception(error))
    return Failure(
        rank=place.rank,
        host=socket.gethostname(),
        time_ns=time.time_ns(),
        exit_code=code,
        message=shorten(message),
        traceback=shorten(text),
        consequence=is_consequence(message),
    )


def _leave(code: int, *, at_once: bool = False) -> NoReturn:
    """Exit normally; after `EXIT_S` a C thread ends the process even if it hangs.

    at_once: for a rank that ends because of another and holds up the restart. It skips two garbage collections of torch's objects,
    which take half a second: what only they would free is not freed, but open files are flushed.
    """
    sys.stdout.flush()
    faulthandler.dump_traceback_later(EXIT_S, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115 (open until exit)
    if at_once:
        gc.unfreeze()  # objects that the zygote of this rank froze
        objects = gc.get_objects()
        files = {kind for kind in set(map(type, objects)) if issubclass(kind, io.TextIOBase | io.BufferedIOBase)}
        for file in [item for item in objects if type(item) in files]:
            with suppress(Exception):
                file.flush()
        gc.freeze()
    sys.exit(code)


def _write_record(failure: Failure, place: RankPlace) -> None:
    if place.folder is None:
        os.write(place.terminal, encode(failure).encode())
        return
    path = _file(place.folder, place.attempt, place.rank, ".json")
    partial = path.with_suffix(".part")
    partial.write_text(encode(failure).partition(" ")[2])
    partial.rename(path)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _find_place(report: bool) -> RankPlace:
    variables = places.discover(os.environ)
    if variables is None:
        raise ValueError("no rank in the environment; start scripts with `slipstream run`, which starts this module")
    os.environ.update(variables)
    folder = os.environ.get(brief.RECORDS)
    return RankPlace(
        rank=int(variables["RANK"]),
        local_rank=int(variables.get("LOCAL_RANK", "0")),
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        folder=None if report or folder is None else Path(folder),
    )


def _find(target: str, *, module: bool) -> tuple[CodeType, ModuleSpec | None, str]:
    """Return code, import spec and file of a script, or of a module; for a package, of its `__main__`."""
    if not module:
        with open_code(target) as file:
            return compile(file.read(), target, "exec"), None, target
    spec = importlib.util.find_spec(target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{target}.__main__")
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"no runnable module named {target!r}")
    return code, spec, spec.origin or target


def _run_target(target: str, arguments: list[str], *, module: bool) -> None:
    """Run the target as `__main__`.

    runpy does not work here: its `__main__` is temporary, and multiprocessing, which torch has already imported, keeps the old
    `__main__` as `__mp_main__`, through which child processes pickle objects of the script's classes.
    """
    sys.argv = [target, *arguments]
    if not module and not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(target))
    code, spec, file = _find(target, module=module)
    sys.argv[0] = file
    main_module = ModuleType("__main__")
    main_module.__dict__.update(
        __file__=file,
        __spec__=spec,
        __loader__=spec.loader if spec else None,
        __package__=spec.parent if spec else None,
        __builtins__=builtins,
    )
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main_module
    exec(code, main_module.__dict__)


def _open_log(prefix: str, place: RankPlace) -> RankPlace:
    """Send the output of this rank to its file; a failure record without a folder still goes to the terminal."""
    place = replace(place, terminal=os.dup(2))
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    file = os.open(f"{prefix}_rank{place.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    return place


def _bind(chosen: str, place: RankPlace) -> None:
    if "LOCAL_WORLD_SIZE" not in os.environ and os.environ["WORLD_SIZE"] != "1":  # each rank would take all cores here
        sys.exit("--bind_cores_to_rank: the launcher does not tell how many ranks a host has; let it bind them (--launcher_args)")
    try:
        cores.bind(chosen, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), place.local_rank)
    except ValueError as error:
        sys.exit(str(error))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m slipstream.launch.worker", allow_abbrev=False)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--pass-local-rank", action="store_true")
    parser.add_argument("-m", dest="module", action="store_true")
    parser.add_argument("--exec", dest="is_executable", action="store_true")
    parser.add_argument("--log")
    parser.add_argument("--cores")
    parser.add_argument("target")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def source_of(argv: list[str]) -> tuple[Path, Path] | None:
    """The file that `main` would run with these arguments, and the folder where its modules are searched first. Neither a module
    nor its packages are imported for this. None: not found."""
    options = parse(argv)
    if not options.module:
        return (file := Path(options.target).absolute()), file.parent
    root, *names = options.target.split(".")
    if (spec := importlib.util.find_spec(root)) is None:
        return None
    places = spec.submodule_search_locations or [spec.origin or ""]
    for folder in (Path(place).parent for place in places):
        place = folder.joinpath(root, *names)
        for file in (place.with_name(f"{place.name}.py"), place / "__main__.py"):
            if file.exists():
                return file, folder
    return None


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    _die_with_parent()
    try:
        place = _find_place(options.report)
    except ValueError as error:
        sys.exit(f"slipstream run: {error}")
    if place.folder is not None:
        _file(place.folder, place.attempt, place.rank, ".json").unlink(missing_ok=True)  # from before hosts joined or left
        stack = open(_file(place.folder, place.attempt, place.rank, ".stack"), "w")  # noqa: SIM115 (open until exit)
        faulthandler.enable(file=stack)
    local_rank = [f"--local_rank={place.local_rank}"] if options.pass_local_rank else []
    try:
        if options.log is not None:
            place = _open_log(options.log, place)
        if options.cores is not None:
            _bind(options.cores, place)
        if options.is_executable:
            os.execvp(options.target, [options.target, *options.arguments])
        _run_target(options.target, [*local_rank, *options.arguments], module=options.module)
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT)
    except SystemExit as error:
        if error.code in (None, 0):
            raise
        failure = describe(error, place)
    except BaseException as error:
        failure = describe(error, place)
        sys.last_value = error  # as the interpreter does, for exit handlers
    else:
        return
    _write_record(failure, place)
    if options.log is not None:
        print(failure.traceback or failure.message, file=sys.stderr, flush=True)
    _leave(failure.exit_code, at_once=failure.consequence)


if __name__ == "__main__":
    main()
