"""Imports go one way (docs/ARCHITECTURE.md), and `import slipstream` is cheap, silent and starts nothing.

A room is a folder or file directly under `slipstream`. It sees itself, the rooms of lower layers, and within
its own layer what does not see it. `launch` and `observe` see base rooms as everybody does, and of the others
only the surface: `from slipstream.zero import x` (or a folder in it), never `from slipstream.zero.unit import x`. Imports
inside functions and for types count: the rule is about who knows whom.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "slipstream"

BASE = ("config", "world", "ops")
CORE = (*BASE, "data", "zero", "optim")
FEATURES = (*CORE, "parallel", "moe", "checkpoint", "activations", "attention", "quantized", "compression", "fused")
OUTSIDE = ("launch", "observe")
ROOMS = (*FEATURES, "train", *OUTSIDE, "inference", "__init__")
SEES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(BASE, BASE),
    "data": (*BASE, "data"),
    **dict.fromkeys(("zero", "optim"), CORE),
    **dict.fromkeys(("parallel", "moe", "checkpoint", "activations", "attention", "quantized", "compression", "fused"), FEATURES),
    "train": (*FEATURES, "observe"),
    "inference": (*BASE, "checkpoint", "quantized", "parallel"),
    "launch": ROOMS,
    "observe": tuple(room for room in ROOMS if room != "launch"),
    "__init__": tuple(room for room in ROOMS if room != "launch"),
    "__main__": ("launch",),
    "compat": ROOMS,
    "integrations": BASE,
}


class Edge(NamedTuple):
    """One import of one of our modules by another."""

    user: str  # room
    used: str  # room
    inside: bool  # names a module within the room, not the room's surface
    where: str  # file:line


def edges(source: Path) -> Iterator[Edge]:
    for file in sorted(source.rglob("*.py")):
        module = ("slipstream", *file.relative_to(source).with_suffix("").parts)
        statements = (node for node in ast.walk(ast.parse(file.read_text(), file)) if isinstance(node, ast.stmt))
        for node in statements:
            for target in imported(node, module):
                if target[0] == "slipstream":
                    used = room_of(source, target)
                    is_inside = len(target) > 2 and not source.joinpath(*target[1:]).is_dir()
                    yield Edge(module[1], used, is_inside, f"{file.relative_to(source)}:{node.lineno}")


def imported(node: ast.stmt, module: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Dotted names that an import statement reaches, as parts."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield tuple(alias.name.split("."))
    elif isinstance(node, ast.ImportFrom):
        package = module[: len(module) - node.level] if node.level else ()
        origin = (*package, *(node.module.split(".") if node.module else ()))
        for alias in node.names:
            # `from slipstream import ops` reaches the room; a name from further in is its module's business.
            yield (*origin, alias.name) if origin == ("slipstream",) else origin


def room_of(source: Path, target: tuple[str, ...]) -> str:
    """The room of a dotted name; a name defined in `__init__.py` itself belongs to that."""
    name = target[1] if len(target) > 1 else "__init__"
    is_room = (source / name).is_dir() or (source / f"{name}.py").is_file()
    return name if is_room else "__init__"


def violations(source: Path) -> list[str]:
    errors = []
    found = list(edges(source))
    for user, used, inside, where in found:
        if user == used:
            continue
        if used not in SEES.get(user, ()):
            errors.append(f"{where}: {user} may not see {used}")
        elif user in OUTSIDE and inside and used not in (*BASE, *OUTSIDE):
            errors.append(f"{where}: {user} sees public surfaces only, and this reaches inside {used}")
    graph: dict[str, set[str]] = {}
    for user, used, *_ in found:
        if user != used and user not in OUTSIDE:
            graph.setdefault(user, set()).add(used)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        errors.append("rooms in a circle: " + " <- ".join(error.args[1]))
    return errors


def test_imports_go_one_way() -> None:
    assert (SOURCE / "__init__.py").is_file()
    assert not (errors := violations(SOURCE)), "\n".join(errors)


def test_every_room_has_a_place_in_the_rule() -> None:
    rooms = {p.stem for p in SOURCE.iterdir() if p.suffix == ".py" or (p.is_dir() and any(p.glob("*.py")))}
    assert rooms <= set(SEES)


@pytest.mark.parametrize(
    ("file", "code", "message"),
    [
        ("config/plan.py", "from slipstream.zero.unit import Unit", "config/plan.py:1: config may not see zero"),
        ("zero/unit.py", "def f():\n    import slipstream.train", "zero/unit.py:2: zero may not see train"),
        ("zero/unit.py", "from ..train.engine import Engine", "zero may not see train"),
        ("zero/unit.py", "from slipstream import train", "zero may not see train"),
        ("zero/unit.py", "import slipstream", "zero may not see __init__"),
        ("optim/adam.py", "import slipstream.zero.comm", "rooms in a circle: "),
        ("inference/core.py", "from slipstream import train", "inference may not see train"),
        ("train/engine.py", "from slipstream.compat import names", "train may not see compat"),
        ("train/engine.py", "import slipstream.compat.zero", "train may not see compat"),
        ("__init__.py", "from slipstream.compat import names", "__init__ may not see compat"),
        ("observe/report.py", "from slipstream.compat import names", "observe may not see compat"),
        ("observe/report.py", "from slipstream.zero.unit import Unit", "this reaches inside zero"),
    ],
)
def test_the_rule_catches(tmp_path: Path, file: str, code: str, message: str) -> None:
    good = {
        "__init__.py": "from slipstream.train.engine import Engine",
        "world.py": "import torch",
        "zero/comm.py": "from slipstream import world\nfrom . import x\nfrom slipstream.optim.flat import y",
        "train/engine.py": "from slipstream.zero.comm import Comm\nfrom slipstream import ops",
        "observe/report.py": "from slipstream import Engine, ops\nfrom slipstream.ops import report",
        "ops/__init__.py": "",
        "compat/names.py": "from slipstream.zero.comm import Comm",
        "inference/__init__.py": "",
    }
    for name, text in good.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "optim").mkdir()
    (tmp_path / "config").mkdir()
    assert violations(tmp_path) == []
    (tmp_path / file).write_text(code)
    assert any(message in line for line in violations(tmp_path)), violations(tmp_path)


LAZY = (
    "pydantic",
    "rich",
    "safetensors",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "transformers",
)

IMPORT = """
import sys, threading, time
import torch
import torch.distributed
before = set(sys.modules)
start = time.process_time()
import slipstream
seconds = time.process_time() - start
started = torch.distributed.is_initialized() or torch.cuda.is_initialized()
print(seconds, threading.active_count(), started, file=note)
print(*(name for name in sys.modules if name not in before), file=note)
"""


def import_slipstream(note: Path) -> tuple[list[str], list[str]]:
    """What a fresh process says of the import, and the modules that it added."""
    code = f"note = open({str(note)!r}, 'w')\n{IMPORT}note.close()"
    env = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    output, added = note.read_text().splitlines()
    return output.split(), added.split()


def test_import_is_cheap_silent_and_starts_nothing(tmp_path: Path) -> None:
    (_, threads, started), added = import_slipstream(tmp_path / "note")
    assert (threads, started) == ("1", "False")
    pulled = [name for name in added if any(name == lazy or name.startswith(f"{lazy}.") for lazy in LAZY)]
    assert not pulled, f"imported where they are not used yet: {pulled}"


PARTS = {  # an import -> modules that it does not bring into a process that has torch
    "slipstream.config": ("pydantic",),
    "slipstream.checkpoint": ("torch.distributed.checkpoint", "torch.distributed.tensor"),
    "deepspeed": ("slipstream.train", "pydantic"),
    "tests.twin": ("slipstream",),
}


def test_parts_bring_only_what_they_need() -> None:
    code = f"""if True:
        import importlib, os, sys, torch
        for name, others in {PARTS}.items():
            if pid := os.fork():
                os.waitpid(pid, 0)
                continue
            importlib.import_module(name)
            print(name, *(other for other in others if other in sys.modules), flush=True)
            os._exit(0)
    """
    root = SOURCE.parents[1]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (root / "compat" / "deepspeed", root / "src", root)))}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert (done.stdout.splitlines(), done.stderr) == (list(PARTS), "")


def test_the_launcher_starts_without_torch() -> None:
    """A run that only starts others, or fails on its options, does not wait for it."""
    code = "import sys, slipstream.launch.run, slipstream.world.sizes; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE.parent, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.slow
def test_import_time_beyond_torch(tmp_path: Path) -> None:
    """CPU seconds, so that a busy machine does not count; the best of three, nor does a cold cache."""
    seconds = min(float(import_slipstream(tmp_path / "note")[0][0]) for _ in range(3))
    assert seconds <= 0.2
