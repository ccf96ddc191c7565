"""examples/finetune by each of its loops, LoRA and in full, from a tiny base to the answers that are printed."""

import itertools
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import slipstream
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
    scored = []
    for model, adapter in ((out / "lora-merged", None), (base, "lora")):
        options = {"dtype": "fp32", "device": "cpu", "threads": 1}
        with slipstream.init_inference(model, adapters={"lora": out / "lora"} if adapter else None, **options) as engine:
            ask = {"max_new_tokens": 1, "prompt_logprobs": 0}
            scores = engine.generate("What is it?", adapter=adapter, **ask).prompt_logprobs
            scored.append([one.logprob for one in scores[1:]])
    assert scored[0] == pytest.approx(scored[1], abs=1e-4), "PEFT's merged model answers as its adapter beside the base"


@pytest.mark.parametrize("word", ["ranks on this host", "step 10"])
def test_ctrl_c_ends_all_with_one_line(word: str, base: Path, tmp_path: Path) -> None:
    """As a terminal does: SIGINT to the whole foreground group, while the ranks start and while they train."""
    command = [sys.executable, "-u", SCRIPT, "--base", base, "--out", tmp_path / "out", "--steps", "100000"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background jobs ignore it
    ) as process:
        assert process.stdout is not None, "it is a pipe"
        try:
            before = list(itertools.takewhile(lambda line: word not in line, process.stdout))
            os.killpg(process.pid, signal.SIGINT)
            after, _ = process.communicate(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, [*before, after]
    lines = [line for line in after.splitlines() if line.strip() and not line.startswith(("step ", "slipstream run: OMP"))]
    assert len(lines) == 1 and lines[0].startswith("stopped; "), after
    assert not list((tmp_path / "out").rglob("*"))
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and str(tmp_path).encode() in _command(pid)]


def _command(pid: str) -> bytes:
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
