"""What a user installs: the files that are declared, one version, the public names, and what `make` alone does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from benchmarks import install

import slipstream

ROOT = Path(__file__).resolve().parents[2]


def test_package_data_is_there() -> None:
    """Each declared pattern matches a file, kernels aside, which the build makes; `py.typed` is what type checkers look for."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package, patterns in declared.items():
        folder = ROOT / "src" / Path(*package.split("."))
        for pattern in patterns:
            assert pattern == "*.so" or list(folder.glob(pattern)), f"{package}: {pattern}"
    assert "py.typed" in declared["slipstream"]


@pytest.mark.slow
def test_a_source_archive_makes_a_wheel_that_trains_without_a_compiler(tmp_path: Path) -> None:
    """Neither of them needs a network; the wheel's tag is that of the glibc that its kernels need, not of the host's."""
    script = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, timeout=300)
    (archive,) = tmp_path.glob("*.tar.gz")
    wheel = install.wheel_of(archive, tmp_path)
    assert re.fullmatch(rf"slipstream-{slipstream.__version__}-py3-none-manylinux_2_(17|2[0-8])_\w+\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"slipstream/py.typed", "slipstream/inference/server/page.html", "slipstream/ops/csrc/threads.h"} <= names
    installed = install.install(wheel, tmp_path / "environment")
    assert installed.package.is_relative_to(tmp_path) and installed.steps == 1
    assert installed.kernels.endswith("built when installed")


def test_the_version_is_in_one_place() -> None:
    """Of each distribution: its package's `__version__`. The aliases name ours in their own."""
    for folder, package in ((ROOT, "slipstream"), (ROOT / "compat" / "deepspeed", "deepspeed"), (ROOT / "compat" / "mii", "mii")):
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
        assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": f"{package}.__version__"}
        if package == "slipstream":
            continue
        source = (folder / package / "__init__.py").read_text()
        (alias,) = (
            ast.literal_eval(line.value)
            for line in ast.parse(source).body
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__version__"
        )
        assert alias.partition("+slipstream.")[2] == slipstream.__version__
    dates = re.findall(r"^## (\S+) - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert dates[0][0] == slipstream.__version__


def test_the_changelog_has_one_line_an_entry() -> None:
    for line in (ROOT / "CHANGELOG.md").read_text().splitlines()[4:]:
        assert not line or line.startswith(("- ", "## ", "### ")), line


def test_public_names_are_listed_before_they_are_imported() -> None:
    script = "import sys, slipstream; print(*dir(slipstream)); print('slipstream.train.engine' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    names, imported = done.stdout.splitlines()
    assert {"initialize", "init_inference", "Engine", "zero"} <= set(names.split()) and imported == "False"
    assert set(names.split()) == set(slipstream.__all__)
    assert all(getattr(slipstream, name) is not None for name in slipstream.__all__)


def test_make_alone_says_what_there_is() -> None:
    """Every target that is no file, and how long those take that train."""
    done = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.M)
    listed = set(re.findall(r"^  make (\S+)", done.stdout, re.M))
    assert listed == set(phony.split()) - {"setup"}
    for target in ("train", "finetune", "train-big"):
        assert re.search(rf"^  make {target} +[\d.]+ min: ", done.stdout, re.M), target


def test_the_site_has_every_page() -> None:
    """`make site` fails for a link that leads nowhere; here, without its environment, that no page of docs is left out."""
    listed = set(re.findall(r"- (?:[\w ]+: )?([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    there = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")}
    assert there <= listed and all((ROOT / page).is_file() for page in listed)
