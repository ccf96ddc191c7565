"""examples/finetune by each of its loops, LoRA and in full, from a tiny base to the answers that are printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import needs

pytestmark = needs("accelerate", "transformers", "peft")
SCRIPT = Path(__file__).parents[2] / "examples" / "finetune" / "finetune.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by another process: torchao, which is imported there, warns."""
    folder = tmp_path_factory.mktemp("finetune") / "base"
    script = f"from pathlib import Path\nfrom tests import tiny_chat\ntiny_chat.write(Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, env=ENVIRONMENT, timeout=100)
    return folder


@pytest.mark.parametrize("version", ["native", "accelerate", "trainer"])
def test_a_model_learns_and_says_so(version: str, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--with", version, "--base", base, "--out", out, "--steps", "10"]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=250, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} >= {"lora", "lora-merged", "full"} and not list(out.glob("*.partial"))
    assert {path.name for path in (out / "lora").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert "torchao" not in done.stderr.lower() and "FutureWarning" not in done.stderr, done.stderr
    losses = {name: float(loss) for name, loss in re.findall(r"^(before|lora|full): loss ([\d.]+) on held-out", done.stdout, re.M)}
    assert losses["full"] < losses["before"] and losses["lora"] < losses["before"], done.stdout
