"""README is executed, and its counts are the code's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from slipstream.config import keys

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_quick_start_runs_and_is_short(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 15
    script = tmp_path / "script.py"
    script.write_text("import torch; torch.manual_seed(0)\n" + snippet + "\nassert loss < 8, loss  # the variance of the target\n")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoints" / "latest").is_file()


def test_key_counts_are_the_code_s() -> None:
    """Those of DeepSpeed's; the block "slipstream" is ours, and all of it is honoured."""
    counts = keys.counts()
    ours = sum(name.startswith("slipstream.") for name in keys.HONOURED)
    assert ours == sum(name.startswith("slipstream.") for name in keys.table())
    told = re.search(
        r"Of the (\d+) keys in DeepSpeed's .*?, (\d+) are honoured, (\d+) have no effect .*? and (\d+) ask .*? adds (\d+) keys",
        README, re.S,
    )  # fmt: skip
    assert told is not None
    assert tuple(map(int, told.groups())) == (sum(counts) - ours, counts.honoured - ours, counts.no_effect, counts.refused, ours)


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\((?!http|#)([^)]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
