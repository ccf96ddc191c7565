"""What the pages for operators quote is the code's: messages, options, variables, metrics; and their command lines run."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from slipstream.inference.server.metrics import ModelFigures, Traffic, render
from slipstream.inference.stats import Histogram, Stats
from slipstream.launch import cli, environment

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def texts() -> str:
    """All text constants of the package, f-strings with a star for each value."""
    strings = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                strings.append("".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
    return "\n".join(strings)


def test_quoted_messages_are_the_code_s(texts: str) -> None:
    page = (DOCS / "TROUBLESHOOTING.md").read_text()
    quoted = [" ".join(quote.split()) for quote in re.findall(r"^(?:- )?`([^`]+)`[:,]", page, re.M)]
    assert len(quoted) >= 16
    for quote in quoted:
        pattern = (
            re.escape(quote)
            .replace(r"'layers\.3\.weight'", r"%r")
            .replace("step\\ skipped", "step\\ %s")
            .replace("parameter\\);", "parameter\\)%s;")
        )
        assert re.search(pattern, texts), quote


def test_options_and_metrics_are_the_code_s(tmp_path: Path) -> None:
    page = (DOCS / "DEPLOYMENT.md").read_text()
    (tmp_path / "config.json").write_text("{}")
    (commands,) = (action for action in cli.build_parser()._actions if action.dest == "command")
    flags = {word for action in commands.choices["serve"]._actions for word in action.option_strings}  # type: ignore[index, union-attr]
    options = set(re.findall(r"(--[a-z][a-z-]+)", page))
    assert options and options <= flags, options - flags
    empty = Histogram((), (0,), 0.0)
    histograms = [name for name, one in Stats.__dataclass_fields__.items() if one.type == "Histogram"]
    numbers = dict.fromkeys(Stats.__dataclass_fields__, 1) | {"finished": {}, **dict.fromkeys(histograms, empty)}
    metrics = set(re.findall(r"# TYPE (\S+)", render([ModelFigures("", Stats(**numbers))], Traffic())))  # type: ignore[arg-type]
    named = set(re.findall(r"`(slipstream_\w+)`", page))
    assert len(named) >= 6 and named <= metrics, named - metrics
    units = re.findall(r"^ExecStart=\S+/slipstream (.*)$", page, re.M)
    parsed = [cli.build_parser().parse_args(shlex.split(unit.replace("/srv/model", str(tmp_path)))) for unit in units]
    assert [(each.command, each.drain_timeout) for each in parsed] == [("serve", 60), ("engine", 60), ("serve", 60)]


def test_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command line prints what it would start, and the variables that the page says go along do."""
    page = (DOCS / "MULTINODE.md").read_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("node1 slots=8\nnode2 slots=8\n")
    (tmp_path / "train.py").touch()
    lines = re.findall(r"^slipstream run .*", page, re.M)
    assert len(lines) == 4
    for line, starter in zip(lines, ("ssh", "pdsh", "mpirun", "--node-rank=0"), strict=True):
        assert cli.main(shlex.split(line)[1:]) == 0
        assert starter in "".join(capsys.readouterr())
    (sentence,) = re.findall(r"that begin with (.*?) and the like", page, re.S)
    prefixes = re.findall(r"`(\w+)`", sentence)
    assert len(prefixes) == 7 and set(prefixes) <= set(environment.PREFIXES)
    assert set(re.findall(r"`(\.\w+)`", page)) == set(environment.FILES)
