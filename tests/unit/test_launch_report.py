"""`slipstream report` and `slipstream plan`: what they say, and the formulas behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import DataWorld, ModelFacts, resolve
from slipstream.launch.cli import main
from slipstream.launch.plan import parse_count, state_nbytes
from slipstream.observe.report import collect
from slipstream.world import host

FACTS = ModelFacts(device_type="cpu", supports_bf16=True)


def test_report_names_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    for word in ("versions", "torch", "devices", "CPU flags", "gloo", "shared memory", "sum_ranks", "open files"):
        assert word in text


def test_report_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["versions", "devices", "backends", "kernels", "memory", "limits"]
    assert document["kernels"]["adamw"]["value"]


def test_every_row_says_something() -> None:
    assert all(row.name and row.value for rows in collect().values() for row in rows)


def test_host_files() -> None:
    assert host.counter("low 0\noom 7\noom_kill 3\n", "oom_kill") == 3
    assert host.counter("nothing", "oom_kill") is None
    root = Path("/sys/fs/cgroup")
    assert host.cgroup_directories("0::/a/b\n", root) == [root / "a/b", root / "a", root]
    old = "5:devices:/x\n4:memory:/docker/1\n"
    assert host.cgroup_directories(old, root) == [root / "memory/docker/1", root / "memory/docker", root / "memory"]


@pytest.mark.parametrize(
    ("line", "mount", "names", "cache", "unlimited"),
    [
        ("0::{}", "", ("memory.max", "memory.current"), "inactive_file {}", "max"),
        (
            "4:cpu,memory:{}\n0::/",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "inactive_file 1\ntotal_inactive_file {}",
            "9223372036854771712",
        ),
    ],
)
def test_what_is_left_of_memory(
    line: str, mount: str, names: tuple[str, str], cache: str, unlimited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least of what the host and each control group around this process have left, not only the outermost."""
    monkeypatch.setattr(host, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "_CGROUP", tmp_path / "groups")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\n")
    assert host.available_memory() == 8000 << 10, "no control groups"
    (tmp_path / "proc/self/cgroup").write_text(line.format("/system.slice/job/step") + "\n")

    def group(path: str, limit: int | str, used: int, cached: int = 0) -> None:
        folder = tmp_path / "groups" / mount / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in zip((*names, "memory.stat"), (limit, used, cache.format(cached)), strict=True):
            (folder / name).write_text(f"{text}\n")

    group("system.slice/job/step", unlimited, 5)
    assert host.available_memory() == 8000 << 10
    group("system.slice/job", 7000, 3000, cached=2500)
    assert (host.available_memory(), host.memory_total()) == (7000 - 500, 7000)
    group("system.slice", 9000, 8000)
    assert (host.available_memory(), host.memory_total()) == (1000, 7000)
    group("system.slice/job/step", 600, 50)
    assert (host.available_memory(), host.memory_total(), host.read_pressure().limit) == (550, 600, 600)


def plan_of(raw: dict[str, Any]) -> Any:
    base = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {}}}
    return resolve(base | raw, world=DataWorld(ranks=4), facts=FACTS)


@pytest.mark.parametrize(
    ("raw", "sizes"),
    [  # the recipes F16, M16, M16 with fp32 accumulation, one moment, none
        ({}, (4, 4, 8)),
        ({"bf16": {"enabled": True}}, (2, 2, 12)),
        ({"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}, (2, 4, 12)),
        ({"bf16": {"enabled": True}, "optimizer": {"type": "Lion", "params": {}}}, (2, 2, 8)),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, (4, 4, 0)),
    ],
)
def test_bytes_per_parameter(raw: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    numel = 1 << 20
    states = state_nbytes(plan_of({**raw, "zero_optimization": {"stage": 0}}), numel, 4)
    assert tuple(nbytes / numel for nbytes in states.values()) == sizes


def test_bytes_per_rank() -> None:
    numel = 1 << 20
    plans = [plan_of({"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}) for stage in range(4)]
    totals = [sum(state_nbytes(plan, numel, 4).values()) / numel for plan in plans]
    assert totals == [16, 4 + 3, 2 + 3.5, 4]


@pytest.mark.parametrize(
    ("text", "count"), [("7e9", 7 * 10**9), ("1.3B", 13 * 10**8), ("350M", 35 * 10**7), ("46_300_000", 46_300_000), ("12k", 12_000)]
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


def test_counts_refused() -> None:
    for text in ("many", "0", "0.2", "1e999", "-1"):
        with pytest.raises(ValueError, match=rf"'{text}' is not a number above 0; write 7e9, 1\.3B or 350M"):
            parse_count(text)


def test_plan_prints_values_sources_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}))
    assert main(["plan", str(config), "--world", "4", "--num_params", "1B"]) == 0
    text = capsys.readouterr().out
    assert any(line.split()[:3] == ["train_micro_batch_size_per_gpu", "2", "config"] for line in text.splitlines())
    assert "->2" in text
    assert "1,000,000,000 parameters, sharded over 4 ranks" in text


def test_plan_builds_a_model_without_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "big_model.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(2**20, 2**20, bias=False)\ndef nothing():\n    return 1\n"
    )
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["plan", "ds.json", "--model", "big_model:build"]) == 0
    assert f"{2**40:,} parameters" in capsys.readouterr().out
    for wrong, says in (
        ("big_model", "is neither MODULE:FUNCTION"),
        ("big_model:absent", "has no absent"),
        ("no_such_module:f", "No module named"),
        ("big_model:nothing", "returned int"),
    ):
        assert main(["plan", "ds.json", "--model", wrong]) == 2
        assert says in capsys.readouterr().err


def test_plan_goes_on_where_the_training_loop_fills_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with comments, without a batch size, with a schedule that only the loop knows the length of."""
    config = tmp_path / "ds.json"
    config.write_text(
        '{"zero_optimization": {"stage": 2}, // as in the template\n'
        ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},\n'
        ' "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}},}'
    )
    assert main(["plan", str(config)]) == 0
    short = capsys.readouterr().out
    assert "auto: set by the training loop" in short and "gradient_clipping" in short
    for note in ("no batch size is set", "comments or trailing commas"):
        assert short.count(note) == 1
    assert "slipstream.timeout_s" not in short and "--all shows" in short
    assert short.splitlines()[2].split()[0] == "zero_optimization.stage"
    assert main(["plan", str(config), "--all"]) == 0
    assert "slipstream.timeout_s" in capsys.readouterr().out
