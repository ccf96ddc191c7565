"""What the zygote of a run imports, from the words of the script and of the modules beside it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from slipstream.launch import worker, zygote

FILES = {
    "train.py": """
        import os, numpy as np, own_tool
        import own_model.layers
        from own_model import heads
        import missing_package
        from own_tool import *
        def later():
            import pandas
    """,
    "own_model/__init__.py": "from transformers import AutoConfig",
    "own_model/layers.py": "from ..nothing import x\nfrom .parts import *\nimport slipstream",
    "own_model/parts.py": "import safetensors.torch, train",
    "own_model/heads.py": "import tokenizers",
    "own_tool.py": "import filelock\nthis is no Python",
    "unread.py": "import pytest",
}


def test_imports_of_installed_packages_are_found_through_own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n".join(line.removeprefix("        ") for line in text.splitlines()))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {ast.unparse(node) for node in zygote._imports(tmp_path / "train.py")}
    wanted = {"import numpy as np", "from transformers import AutoConfig", "import slipstream", "import safetensors.torch"}
    assert found == wanted | {"import tokenizers"}


def test_the_source_of_a_worker_is_found_by_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    for name in ("__init__", "part", "__main__"):
        (tmp_path / "package" / f"{name}.py").write_text("raise ValueError")
    monkeypatch.chdir(tmp_path)
    assert worker.source_of(["--log=a", "package/part.py", "-m"]) == (tmp_path / "package/part.py", tmp_path / "package")
    assert worker.source_of(["-m", "package.part"]) == (tmp_path / "package/part.py", tmp_path)
    assert worker.source_of(["-m", "package"]) == (tmp_path / "package/__main__.py", tmp_path)
    assert worker.source_of(["-m", "elsewhere.part"]) is None
