"""No folder of tests is left out in silence: pytest's default skips any that is called dist."""

import fnmatch
from pathlib import Path

import pytest


def test_every_folder_is_collected(pytestconfig: pytest.Config) -> None:
    patterns = pytestconfig.getini("norecursedirs")
    folders = {file.parent for file in Path(__file__).parents[1].rglob("test_*.py")}
    assert {"unit", "dist", "parity", "contract", "gpu"} <= {folder.name for folder in folders}
    for folder in folders:
        assert not any(fnmatch.fnmatch(folder.name, pattern) for pattern in patterns), folder
