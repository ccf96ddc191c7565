"""What the zygote of a run imports, by the words of the script and of the modules beside it, and when a fork would be another."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.launch import worker
from slipstream.launch.imports import Walk

FILES = {
    "train.py": """
        import os, numpy as np, own_tool
        import own_model.layers
        from own_model import heads
        import missing_package
        size: int = max(1, 2)
        def later():
            import pandas
        if __name__ == "__main__":
            later()
    """,
    "own_model/__init__.py": "from transformers import AutoConfig",
    "own_model/layers.py": "from .parts import *\nimport slipstream",
    "own_model/parts.py": "import safetensors.torch, train",
    "own_model/heads.py": '"Heads."\nfrom ..own_tool import x\nimport tokenizers',
    "own_tool.py": "import filelock",
    "unread.py": "import pytest",
}
FOUND = ["numpy as np", "filelock", "AutoConfig", "safetensors.torch", "slipstream", "tokenizers", "missing_package"]


def walked(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> Walk:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("\n".join(line.removeprefix("        ") for line in text.splitlines()))
    monkeypatch.syspath_prepend(str(folder))
    return Walk(folder / "train.py", folder)


def test_imports_of_installed_packages_are_found_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = walked(tmp_path, monkeypatch, FILES)
    assert [ast.unparse(node).removeprefix("import ").removeprefix("from transformers import ") for node in walk.found] == FOUND
    assert walk.is_whole and walk.is_fit


FILES_OF_SCRIPTS = {
    "own_patch.py": "import numpy\nnumpy.float = float",
    "own_space/part.py": "print('runs')\nx = 1",
    "own_tools.py": "def setup_root(dotenv): ...",
}


@pytest.mark.parametrize(
    ("script", "is_fit"),
    [
        ("import sys\nsys.path.insert(0, 'vendored')\nimport slipstream", False),
        ("import slipstream\nprint('now')\nimport numpy", True),  # numpy is left to the rank
        ("import torch\nprint('now')\nimport slipstream", False),
        ("import torch\nimport transformers\ndef main(): pass", True),
        ("import own_patch\nimport slipstream", False),
        ("import slipstream, os\ndef main():\n    os.environ['HF_HOME'] = '/mine'", False),
        ("import slipstream\nfrom os import environ\nenviron.setdefault('A', 'b')", False),
        ("import slipstream, os\nos.environ |= {'A': 'b'}", False),
        ("import slipstream, os\ndel os.environ['A']", False),
        ("import slipstream, os\nrank = os.environ['RANK'], os.environ.get('A')", True),
        ("import slipstream\nthis is no Python", False),
        ("from own_space.part import x\nimport slipstream", False),  # a package without __init__.py
        ("import own_tools\nroot = own_tools.setup_root(dotenv=True)\nimport slipstream", False),
        ("import logging\nlogger = logging.getLogger(__name__)\nimport slipstream", True),
    ],
)
def test_scripts_that_do_more_than_import(script: str, is_fit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = walked(tmp_path, monkeypatch, FILES_OF_SCRIPTS | {"train.py": script})
    assert walk.is_fit == is_fit
    assert "import numpy" not in map(ast.unparse, walk.found) or "own_patch" in script


PACKAGES = {  # what an import does -> what its effects are found to be
    "import os\nos.environ['LEFT'] = 'here'\nrank = os.environ.get('LOCAL_RANK')": "True here True False",
    "import sys\nsys.path.append('elsewhere')": "False None True True",
    "import os, tempfile\nos.environ['LEFT'] = tempfile.mkdtemp()\nos.rmdir(os.environ['LEFT'])": "False /",
    "log = open(__file__)": "False None True True",
    "import torch\ntorch.linspace(0, 1, 3_000_000).exp().sum()": "False None True True",  # threads of OpenMP
}


def test_imports_after_which_a_fork_would_be_another(tmp_path: Path) -> None:
    """The first with the imports that are ours, in a new process; each other one in a fork of that."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for i, package in enumerate(PACKAGES):
        (folder / f"own_package{i}.py").write_text(package)
    script = f"""if True:
        import ast, os
        from slipstream.launch import zygote
        own = dict(os.environ)
        for i in range({len(PACKAGES)}):
            if i == 0 or not (pid := os.fork()):
                imports = zygote._Imports(ast.parse(f"import own_package{{i}}").body)
                changed, fits = imports.changed.get("LEFT"), [imports.fit(own | {{name: "1"}}) for name in ("RANK", "LOCAL_RANK")]
                print(imports.is_fit, changed, *fits, flush=True)
                if i:
                    os._exit(0)
            else:
                os.waitpid(pid, 0)
    """
    env = {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]), "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | env, capture_output=True, text=True, check=False)
    said = done.stdout.splitlines()
    assert len(said) == len(PACKAGES), done.stderr
    for package, line in zip(PACKAGES, said, strict=True):
        assert line.startswith(PACKAGES[package]), package


def test_the_source_of_a_worker_is_found_by_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_package").mkdir()
    for name in ("__init__", "part", "__main__"):
        (tmp_path / "own_package" / f"{name}.py").write_text("raise ValueError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert worker.source_of(["--log=a", "own_package/part.py", "-m"]) == (
        tmp_path / "own_package/part.py",
        tmp_path / "own_package",
    )
    assert worker.source_of(["-m", "own_package.part"]) == (tmp_path / "own_package/part.py", tmp_path)
    assert worker.source_of(["-m", "own_package"]) == (tmp_path / "own_package/__main__.py", tmp_path)
    assert worker.source_of(["-m", "elsewhere.part"]) is None


def test_a_module_begins_with_its_packages(tmp_path: Path) -> None:
    (folder := tmp_path / "package").mkdir()
    (folder / "__init__.py").write_text("import os\nos.environ['A'] = 'b'")
    (folder / "part.py").write_text("import slipstream")
    assert not Walk(folder / "part.py", tmp_path).is_fit
    assert Walk(folder / "part.py", folder).is_fit
