"""Monitors: files and services get the figures of each step; slow, failing and missing ones hold nothing."""

import csv
import json
import logging
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from slipstream.compat import config as configs
from slipstream.compat import engine as compat
from slipstream.compat import monitors as compat_monitors
from slipstream.config import describe, resolve
from slipstream.config.plan import DataWorld, ModelFacts
from slipstream.observe import monitors
from slipstream.observe.monitors import Figure, Monitors


def trained(steps: int = 3, **blocks: Any) -> tuple[list[dict[str, float]], Any]:
    """What each step should tell, and the engine after them."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **blocks,
    }
    engine, *_ = compat.initialize(model=nn.Linear(4, 1), config=config)
    told = []
    for _ in range(steps):
        losses = []
        for _ in range(2):
            loss = engine(torch.randn(2, 4)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        told.append({"train_loss": sum(losses) / 2, "lr": 1e-3, "grad_norm": engine.get_global_grad_norm()})
    return told, engine


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_files_have_the_figures_of_each_step(tmp_path: Path) -> None:
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    told, engine = trained(csv_monitor=block, wall_clock_breakdown=True)
    engine.monitor.write_events([("Own/accuracy", 0.5, 7)])
    engine.destroy()
    for name in ("train_loss", "lr", "grad_norm"):
        head, *found = rows(tmp_path / "run" / f"Train_Samples_{name}.csv")
        assert head == ["step", name]
        assert [int(samples) for samples, _ in found] == [4, 8, 12]
        assert [float(value) for _, value in found] == pytest.approx([figures[name] for figures in told], rel=1e-5)
    assert rows(tmp_path / "run" / "Own_accuracy.csv") == [["step", "accuracy"], ["7", "0.5"]]
    for name in ("samples_per_s", "elapsed_time_ms_forward", "elapsed_time_ms_backward", "elapsed_time_ms_step"):
        assert all(float(value) > 0 for _, value in rows(tmp_path / "run" / f"Train_Samples_{name}.csv")[1:])
    _, engine = trained(1, csv_monitor=block)
    engine.destroy()
    assert len(rows(tmp_path / "run" / "Train_Samples_lr.csv")) == 5, "a later run appends"


def test_services_get_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: calls.append((name, args, kwargs))

    def started(**options: Any) -> Recorder:
        calls.append(("start", (), options))
        return Recorder()

    wandb, comet = types.ModuleType("wandb"), types.ModuleType("comet_ml")
    wandb.init = comet.start = started  # type: ignore[attr-defined]
    for module in (wandb, comet):
        module.__spec__ = types.SimpleNamespace(name=module.__name__)  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    told, engine = trained(wandb={"enabled": True, "group": "g", "team": "t", "project": "p"})
    engine.destroy()
    assert calls[0] == ("start", (), {"project": "p", "group": "g", "entity": "t"})
    logged = [(kwargs["step"], args[0]["Train/Samples/train_loss"]) for name, args, kwargs in calls if name == "log"]
    assert logged == [(4 * (i + 1), pytest.approx(figures["train_loss"], rel=1e-5)) for i, figures in enumerate(told)]
    assert calls[-1][0] == "finish"
    calls.clear()
    block = {"enabled": True, "samples_log_interval": 8, "project": "p", "workspace": "w", "experiment_name": "n", "online": False}
    _, engine = trained(comet=block | {"api_key": "k", "experiment_key": "e", "mode": "create"})
    engine.destroy()
    options = {"project": "p", "workspace": "w", "online": False, "api_key": "k", "experiment_key": "e", "mode": "create"}
    assert calls[:2] == [("start", (), options), ("set_name", ("n",), {})]
    assert [kwargs["step"] for name, args, kwargs in calls if name == "log_metric" and args[0] == "Train/Samples/lr"] == [4, 12]
    assert calls[-1][0] == "end"


def test_tensorboard_gets_scalars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Through torch's writer, which needs the package tensorboard: a stand-in takes its place."""
    calls: list[Any] = []

    class Writer:
        def __init__(self, log_dir: str) -> None:
            calls.append(log_dir)

        def add_scalar(self, tag: str, value: float, samples: int) -> None:
            calls.append((tag, value, samples))

        def flush(self) -> None:
            pass

        def close(self) -> None:
            calls.append("closed")

    package, module = types.ModuleType("tensorboard"), types.ModuleType("torch.utils.tensorboard.writer")
    package.__spec__ = types.SimpleNamespace(name="tensorboard")  # type: ignore[assignment]
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.ModuleType("torch.utils.tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", module)
    told, engine = trained(tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "run"})
    assert isinstance(engine.monitor.tb_monitor.summary_writer, Writer)  # scripts add images and texts to it
    engine.destroy()
    assert calls[0] == str(tmp_path / "run") and calls[-1] == "closed"
    found = [(samples, value) for tag, value, samples in calls[1:-1] if tag == "Train/Samples/train_loss"]
    assert found == [(4 * (i + 1), pytest.approx(figures["train_loss"], rel=1e-5)) for i, figures in enumerate(told)]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "_has", lambda package: False)
    for name in ("tensorboard", "wandb", "comet"):
        with pytest.raises(
            ValueError, match=rf"{name}.enabled needs the package {name}.*: pip install {name}\S* \(.*extra {name}\)"
        ):
            trained(**{name: {"enabled": True}})
    for name in ("mlflow", "trackio", "prometheus", "otlp"):
        with pytest.raises(ValueError, match=rf"slipstream.monitors.{name} needs the package .*: pip install .*extra {name}"):
            trained(slipstream={"monitors": {name: {}}})


class Slow:
    def __init__(self, gate: threading.Event) -> None:
        self.gate, self.seen = gate, list[Figure]()

    def write(self, events: Sequence[Figure]) -> None:
        self.gate.wait(5)
        self.seen += events

    def close(self) -> None:
        self.seen.append(Figure("end", 0.0, 0))


class Failing(Slow):
    def write(self, events: Sequence[Figure]) -> None:
        raise OSError("no network")


def test_a_hanging_backend_holds_no_step(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(monitors, "MOST_WAITING", 4)
    gate = threading.Event()
    slow = Slow(gate)
    written = Monitors({"slow": lambda: slow})
    began = time.perf_counter()
    for i in range(100):
        written.write_events([("a", i, i)])
    assert time.perf_counter() - began < 1.0
    gate.set()
    with caplog.at_level(logging.WARNING):
        written.close()
    values = [event.value for event in slow.seen[:-1]]
    assert values == sorted(values) and values[-4:] == [96.0, 97.0, 98.0, 99.0], "the newest win"
    assert f"slow missed {100 - len(values)} steps" in caplog.text
    assert slow.seen[-1].tag == "end"


def test_a_backend_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    gate.set()
    good = Slow(gate)
    written = Monitors({"bad": lambda: Failing(gate), "good": lambda: good})
    with caplog.at_level(logging.WARNING):
        written.write_events([("a", 1, 1)])
        written.write_events([("a", 2, 2)])
        written.close()
    assert [event.value for event in good.seen] == [1.0, 2.0, 0.0]
    assert caplog.text.count("bad failed and gets no more figures: OSError: no network") == 1


def test_a_backend_that_hangs_while_it_opens_holds_neither_the_run_nor_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitors, "OPEN_S", 0.1)
    monkeypatch.setattr(monitors, "CLOSE_S", 0.2)
    gate = threading.Event()
    hung: Callable[[], Any] = lambda: gate.wait(5)  # noqa: E731
    good = Slow(gate)
    good.gate = threading.Event()
    good.gate.set()
    with caplog.at_level(logging.WARNING):
        began = time.perf_counter()
        written = Monitors({"hung": hung, "good": lambda: good})
        written.write_events([("a", 1, 1)])
        written.close()
        assert time.perf_counter() - began < 2
    gate.set()
    assert [event.value for event in good.seen] == [1.0, 0.0]
    assert "hung is not open after 0.1 s" in caplog.text and "hung still hangs after 0.2 s" in caplog.text


class Recorder:
    """A custom monitor."""

    made: ClassVar[list["Recorder"]] = []

    def __init__(self, label: str) -> None:
        self.label, self.seen, self.closed = label, list[Figure](), False
        self.made.append(self)

    def write(self, events: Sequence[Figure]) -> None:
        self.seen += events

    def close(self) -> None:
        self.closed = True


def test_a_class_of_the_script() -> None:
    name = f"{__name__}.Recorder"
    told, engine = trained(slipstream={"monitors": {"custom": {name: {"label": "mine"}}}})
    engine.log({"accuracy": torch.tensor(0.5, requires_grad=True), "x": 1})
    engine.destroy()
    recorder = Recorder.made.pop()
    assert (recorder.label, recorder.closed) == ("mine", True)
    values = {(event.tag, event.samples): event.value for event in recorder.seen}
    assert values["accuracy", 12] == 0.5 and values["x", 12] == 1.0
    assert [values["Train/Samples/grad_norm", 4 * i + 4] for i in range(3)] == [figures["grad_norm"] for figures in told]
    for wrong in ("no.such.Class", "csv.Nothing", "csv"):
        with pytest.raises(ValueError, match=f"slipstream.monitors.custom: {wrong} is not a class"):
            trained(slipstream={"monitors": {"custom": {wrong: {}}}})
    _, engine = trained(1)
    engine.log({"x": 1.0})  # without monitors: nothing
    engine.destroy()
    with pytest.raises(RuntimeError, match="this engine was destroyed"):
        engine.log({"x": 1.0})


def test_lines_have_the_figures(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.jsonl"
    told, engine = trained(slipstream={"monitors": {"jsonl": {"path": str(path)}}})
    engine.log({"broken": float("nan")})
    engine.destroy()
    by_samples: dict[int, dict[str, float]] = {}
    for line in path.read_text().splitlines():
        read = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        by_samples.setdefault(read["samples"], {}).update(read)
    assert list(by_samples) == [4, 8, 12] and by_samples[12]["broken"] is None
    for figures, read in zip(told, by_samples.values(), strict=True):
        assert read["Train/Samples/train_loss"] == pytest.approx(figures["train_loss"], rel=1e-5)
        assert read["Train/Samples/grad_norm"] == figures["grad_norm"]
        assert read["Train/Samples/memory_bytes"] > 1 << 20 and abs(read["time"] - time.time()) < 300


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(16, 4), nn.Linear(4, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(ids))


def test_tokens_and_products_where_they_are_known() -> None:
    name = f"{__name__}.Recorder"
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    block = {"slipstream": {"monitors": {"custom": {name: {"label": ""}}}}}
    engine, *_ = compat.initialize(model=Tokens(), config=config | block)
    with torch.no_grad():
        engine(torch.zeros(3, 5, dtype=torch.long))  # an evaluation counts for nothing
    engine.backward(engine(torch.zeros(3, 5, dtype=torch.long)).square().mean())
    engine.step()
    engine.destroy()
    values = {event.tag.rpartition("/")[2]: event.value for event in Recorder.made.pop().seen}
    assert values["tokens_per_s"] == pytest.approx(5 * values["samples_per_s"])
    assert values["flops_per_s"] == pytest.approx(6 * (4 * 16 + 16) * values["tokens_per_s"]), "an embedding is looked up"
    trained(1, **block)[1].destroy()
    assert not {"tokens_per_s", "flops_per_s"} & {event.tag.rpartition("/")[2] for event in Recorder.made.pop().seen}


def test_a_script_that_does_not_close_its_engine_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    code = (
        "from slipstream.observe.monitors import open_monitors\n"
        f"monitors = open_monitors({{'jsonl': {{'path': {str(path)!r}}}}})\n"
        "monitors.write_events([('a', i, i) for i in range(1000)])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert len(path.read_text().splitlines()) == 1000


def test_secrets_are_not_logged() -> None:
    own = {"otlp": {"headers": {"a": "k2"}}, "custom": {"a.B": {"token": "k3"}}}
    config = {"train_batch_size": 1, "comet": {"enabled": True, "api_key": "k1"}, "slipstream": {"monitors": own}}
    facts = ModelFacts(device_type="cpu", supports_bf16=True)
    text = describe(resolve(config, world=DataWorld(ranks=1), facts=facts), defaults=True)
    assert not any(secret in text for secret in ("k1", "k2", "k3")), text
    assert "a.B" in text and "slipstream.monitors.otlp.interval_s" in text


def test_deepspeeds_monitors_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What DeepSpeed's own tests of its monitors ask."""
    for name, kind in {
        "tensorboard": compat_monitors.TensorBoardMonitor,
        "wandb": compat_monitors.WandbMonitor,
        "csv_monitor": compat_monitors.csvMonitor,
        "comet": compat_monitors.CometMonitor,
    }.items():
        off = kind(getattr(configs.get_monitor_config({}), name))
        block = getattr(configs.get_monitor_config({}), name)
        assert off.enabled is False and {key: getattr(off, key) for key in type(block).model_fields} == dict(block)
        off.write_events([("Train/Samples/lr", 0.25, 3)], flush=False)
        with pytest.raises(AttributeError, match="nothing"):
            _ = off.nothing
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "j"}
    files = compat_monitors.csvMonitor(configs.get_monitor_config({"csv_monitor": block}).csv_monitor)
    assert (files.enabled, files.output_path, files.job_name) == (True, str(tmp_path), "j")
    files.write_events([("Train/Samples/lr", 0.25, 3)])
    files.close()
    assert rows(tmp_path / "j" / "Train_Samples_lr.csv") == [["step", "lr"], ["3", "0.25"]]

    module, names = types.ModuleType("comet_ml"), []
    experiment = types.SimpleNamespace(set_name=names.append, end=lambda: names.append("end"))
    module.start = lambda **options: names.append(options) or experiment  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace(name="comet_ml")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    block = {"enabled": True, "samples_log_interval": 42, "project": "p", "api_key": "k", "experiment_name": "n"}
    comet = compat_monitors.CometMonitor(configs.get_monitor_config({"comet": block}).comet)
    assert comet.samples_log_interval == 42 and comet.experiment is experiment
    comet.close()
    assert names == [{"project": "p", "api_key": "k"}, "n", "end"]


def test_deepspeeds_master(tmp_path: Path) -> None:
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "j"}
    master = compat_monitors.MonitorMaster(configs.get_monitor_config({"csv_monitor": block}))
    assert master.enabled and master.tb_monitor is None
    master.write_events([("Train/Samples/lr", 0.25, 3)])
    master.close()
    assert rows(tmp_path / "j" / "Train_Samples_lr.csv") == [["step", "lr"], ["3", "0.25"]]
    assert not compat_monitors.MonitorMaster(configs.get_monitor_config({})).enabled
