"""The example, as `make train` starts it: two processes train on a small text and resume at another stage."""

from __future__ import annotations

import json
import re
import shutil
import struct
import sysconfig
from pathlib import Path

import pytest

from slipstream import checkpoint
from slipstream.observe.report_page import read_series
from tests.dist.test_launch_agents import Launcher, launcher

__all__ = ["launcher"]  # a fixture

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain"


def figure(pattern: str, text: str) -> float:
    results = re.search(pattern, text)
    assert results, f"no {pattern!r} in:\n{text}"
    return float(results[1].replace(",", ""))


@pytest.mark.slow
def test_the_example_trains_saves_and_resumes_at_another_stage(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'slipstream[examples]'")
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'slipstream[examples]'")
    monkeypatch.setenv("MPLCONFIGDIR", matplotlib.get_cachedir())  # HOME is empty: building the font cache takes seconds
    shutil.copytree(Path(sysconfig.get_paths()["stdlib"], "json"), tmp_path / "text")
    arguments = ["--data", tmp_path / "text", "--out", tmp_path / "out", "--prompt", "import json", "--new-tokens", "3"]
    command = ["--nproc", "2", str(EXAMPLE / "train.py"), *map(str, arguments), "--glance-every", "4"]
    picture, checkpoints = tmp_path / "out" / "loss.png", tmp_path / "out" / "checkpoints"

    def reported(tag: str) -> list[int]:
        return [samples for samples, _ in read_series(tmp_path / "out" / "report.html")[tag]]

    code, out, err = launcher.run(*command, "--steps", "8", "--save-every", "6")
    assert code == 0, err
    assert "ZeRO-3 on 2 x cpu, 512 tokens per step" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert (checkpoints / "latest").read_text().strip() == "step8"
    assert (checkpoints / "step6").is_dir() and (checkpoints / "step8").is_dir()
    ours = figure(r"bits per byte +([\d.]+) ", out)
    assert 0 < figure(r"gzip -9 on the same files: ([\d.]+)\)", out) < ours, "eight steps do not beat gzip"
    assert figure(r"speed +([\d,]+) tokens/s over all ranks", out) > 0
    assert figure(r"tokens seen +([\d,]+) of", out) == 8 * 512
    assert re.search(r"the model writes:\s+import json.", out, re.S), out
    assert out.count("bits per byte") == 1, "rank 0 speaks for all"
    assert reported("Train/Samples/train_loss") == reported("Train/Samples/grad_norm") == list(range(2, 17, 2))
    assert reported("validation_loss") == [8, 16, 16], "two looks, and the whole at the end"

    stage1 = tmp_path / "stage1.json"
    config = json.loads((EXAMPLE / "ds_config.json").read_text())
    stage1.write_text(json.dumps(config | {"zero_optimization": {"stage": 1}}))
    picture.unlink()
    code, out, err = launcher.run(*command, "--steps", "16", "--resume", "--config", str(stage1))
    assert code == 0, err
    assert "ZeRO-1 on 2 x cpu" in out
    assert len(list((tmp_path / "out").glob("corpus-*"))) == 1, "the text is packed once"
    assert figure(r"tokens seen +([\d,]+) of", out) == 16 * 512, "the history goes on"
    assert figure(r"bits per byte +([\d.]+) ", out) < ours
    assert picture.exists()
    assert (checkpoints / "latest").read_text().strip() == "step16"
    assert reported("Train/Samples/memory_bytes") == list(range(2, 33, 2)), "the report goes on"
    assert launcher.gone(within=1)


@pytest.mark.slow
def test_a_mixture_of_experts_trains_and_resumes_whole(launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'slipstream[examples]'")
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'slipstream[examples]'")
    monkeypatch.setenv("MPLCONFIGDIR", matplotlib.get_cachedir())
    shutil.copytree(Path(sysconfig.get_paths()["stdlib"], "json"), tmp_path / "text")
    arguments = [
        "--data",
        tmp_path / "text",
        "--out",
        tmp_path / "out",
        "--new-tokens",
        "3",
        "--glance-every",
        "4",
        "--experts",
        "4",
    ]
    command = ["--nproc", "2", str(EXAMPLE / "train.py"), *map(str, arguments)]
    code, out, err = launcher.run(*command, "--steps", "8", "--ep", "2")
    assert code == 0, err
    first = figure(r"bits per byte +([\d.]+) ", out)
    code, out, err = launcher.run(*command, "--steps", "16", "--resume")
    assert code == 0, err
    assert figure(r"bits per byte +([\d.]+) ", out) < first
    history = checkpoint.load_metadata(str(tmp_path / "out" / "checkpoints"), "step16").shared["client"]["history"]
    assert len(history["loads"]) == len(history["steps"]) >= 4 and history["steps"][-1] == 16, "both runs"
    for loads in history["loads"]:  # of each expert over the layer's mean
        layers = [loads[i : i + 4] for i in range(0, len(loads), 4)]
        assert len(layers) == 3 and all(sum(each) == pytest.approx(4) and min(each) >= 0 for each in layers)
    rows = [tag for tag in read_series(tmp_path / "out" / "report.html") if tag.startswith("expert_load/")]
    assert len(rows) == 3 * 4
    width, height = struct.unpack(">II", (tmp_path / "out" / "loss.png").read_bytes()[16:24])
    assert (width, height) == (960, 900), "the picture of the loads is below that of the losses, which has 540 lines"
