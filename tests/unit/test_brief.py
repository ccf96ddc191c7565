"""Errors that say it all in their words are printed without the frames of torch and slipstream."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import pytest

from slipstream.launch.worker import RankPlace, describe
from slipstream.world import brief
from slipstream.world.watch import PeerLostError, Watch
from tests.pool import run

WORDS = "slipstream.world.watch.PeerLostError: rank 1 has ended its script\nrank 0 waited in a collective of torch's"


PLAIN = "def step(wait):\n    wait(0.0)\n\nstep(wait)\n"
BY_CONTEXTLIB = "import contextlib\nwith contextlib.ExitStack() as stack:\n    stack.callback(wait, 0.0)\n"


def lost(tmp_path: Path, text: str = PLAIN) -> PeerLostError:
    """An error that a script has got out of a wait of ours."""
    script = tmp_path / "train.py"
    script.write_text(text)
    watch = Watch(timeout_s=9)
    watch.failure = "rank 1 has ended its script"
    with pytest.raises(PeerLostError) as raised:
        exec(compile(script.read_text(), str(script), "exec"), {"wait": watch.check})
    return raised.value


def test_words_and_the_scripts_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(brief.SWITCH, raising=False)
    text = brief.describe(lost(tmp_path))
    assert text.startswith(f"{WORDS} (step 0, idle, unit -)\n")
    assert text.splitlines()[2:] == [
        f'  File "{tmp_path}/train.py", line 2, in step',
        "    wait(0.0)",
        "SLIPSTREAM_TRACEBACK=1 shows the whole traceback",
    ]
    assert f'{tmp_path}/train.py", line 2, in <module>' in brief.describe(lost(tmp_path, BY_CONTEXTLIB)).splitlines()[2]
    monkeypatch.setenv(brief.SWITCH, "1")
    full = brief.describe(lost(tmp_path))
    assert full.startswith(f"{WORDS} ") and "Traceback (most" in full and "watch.py" in full
    assert full.splitlines()[-2:] == full.splitlines()[:2]


def test_the_launchers_record_has_no_frames_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(brief.SWITCH, raising=False)
    record = describe(lost(tmp_path), RankPlace(rank=0, local_rank=0, attempt=0, folder=tmp_path))
    assert record.consequence and record.traceback.startswith(WORDS)
    assert "Traceback" not in record.traceback and "watch.py" not in record.traceback


def test_the_hook_leaves_other_errors_to_the_one_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[BaseException] = []

    def before(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        seen.append(error)

    monkeypatch.setattr(sys, "excepthook", before)
    other, own = ValueError("other"), brief.BriefError("in brief")
    brief.BriefError("installed once")
    for error in (other, own):
        sys.excepthook(type(error), error, None)
    assert seen == [other]
    assert capsys.readouterr().err == f"slipstream.world.brief.BriefError: in brief\n{brief.SWITCH}=1 shows the whole traceback\n"


@pytest.mark.slow
def test_an_interrupted_script_is_one_line_with_the_last_checkpoint(tmp_path: Path) -> None:
    script = """
import signal, torch, slipstream
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
engine = slipstream.initialize(model=torch.nn.Linear(2, 2), config=config)[0]
engine.save_checkpoint("saved", tag="good")
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs of a shell that has no job control
signal.raise_signal(signal.SIGINT)
"""
    env = {name: value for name, value in os.environ.items() if name != brief.SWITCH}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    (told,) = [line for line in done.stderr.splitlines() if "interrupted" in line]
    assert told == f"slipstream: interrupted; the last complete checkpoint is 'good' in {tmp_path / 'saved'}"
    assert "Traceback" not in done.stderr and done.returncode in (130, -signal.SIGINT)


def told(script: Path) -> str:
    """What Python prints of the error that ends a script."""
    os.environ.pop(brief.SWITCH, None)
    sys.excepthook = sys.__excepthook__  # the worker's earlier jobs may have called initialize
    with contextlib.chdir(script.parent), contextlib.redirect_stderr(io.StringIO()) as output:
        try:
            exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
    return output.getvalue()


def test_a_config_error_names_the_file_and_has_no_frames_of_ours(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 1, "zero_optimization": {"stage": 4}}')
    script = tmp_path / "train.py"
    script.write_text("import torch, slipstream\nslipstream.initialize(model=torch.nn.Linear(2, 2), config='ds.json')\n")
    error = f"{tmp_path}/ds.json: config key zero_optimization.stage must be 0, 1, 2 or 3, got 4"
    (text,) = run(1, told, script)
    assert text.splitlines() == [
        f"slipstream.config.arguments.ConfigError: {error}",
        f'  File "{tmp_path}/train.py", line 2, in <module>',
        "    slipstream.initialize(model=torch.nn.Linear(2, 2), config='ds.json')",
        "SLIPSTREAM_TRACEBACK=1 shows the whole traceback",
    ]
