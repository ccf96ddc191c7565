"""Errors that say it all in their words are printed without the frames of torch and slipstream."""

import sys
from pathlib import Path
from types import TracebackType

import pytest

from slipstream import brief
from slipstream.launch.worker import Place, describe
from slipstream.world.watch import PeerLostError, Watch

WORDS = "slipstream.world.watch.PeerLostError: rank 1 has ended its script\nrank 0 waited in a collective of torch's"


def lost(tmp_path: Path) -> PeerLostError:
    """An error that a script has got out of a wait of ours."""
    script = tmp_path / "train.py"
    script.write_text("def step(wait):\n    wait(0.0)\n\nstep(wait)\n")
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
    monkeypatch.setenv(brief.SWITCH, "1")
    full = brief.describe(lost(tmp_path))
    assert full.startswith(f"{WORDS} ") and "Traceback (most" in full and "watch.py" in full
    assert full.splitlines()[-2:] == full.splitlines()[:2]


def test_the_launchers_record_has_no_frames_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(brief.SWITCH, raising=False)
    record = describe(lost(tmp_path), Place(rank=0, local_rank=0, attempt=0, folder=tmp_path))
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
    assert capsys.readouterr().err == f"slipstream.brief.BriefError: in brief\n{brief.SWITCH}=1 shows the whole traceback\n"
