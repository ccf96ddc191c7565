"""Monitors through their own libraries: what each of them reads back is what was logged. A missing library skips its test."""

import http.server
import itertools
import json
import re
import sqlite3
import struct
import threading
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe import report_page
from tests.unit.test_monitors import trained

LOSS, NORM = "Train/Samples/train_loss", "Train/Samples/grad_norm"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::UserWarning")


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"a monitor's package is not installed: {name}")


def expected(told: list[dict[str, float]]) -> list[tuple[int, Any]]:
    return [(4 * i + 4, pytest.approx(figures["train_loss"], rel=1e-5)) for i, figures in enumerate(told)]


@pytest.mark.slow
def test_tensorboard_reads_its_files_back(tmp_path: Path) -> None:
    library("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told, engine = trained(tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "run"})
    engine.log({"Own/accuracy": 0.25})
    engine.destroy()
    files = EventAccumulator(str(tmp_path / "run"))
    files.Reload()
    assert [(event.step, event.value) for event in files.Scalars(LOSS)] == expected(told)
    assert [(event.step, event.value) for event in files.Scalars("Own/accuracy")] == [(12, 0.25)]


@pytest.mark.slow
def test_mlflow_gets_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = library("mlflow")
    library("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    block: dict[str, Any] = {"tracking_uri": f"sqlite:///{tmp_path}/runs.db", "experiment": "e", "run_name": "r"}
    told, engine = trained(slipstream={"monitors": {"mlflow": block}})
    engine.destroy()
    client = mlflow.MlflowClient(block["tracking_uri"])
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (run.info.run_name, run.info.status) == ("r", "FINISHED")
    assert [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, LOSS)] == expected(told)
    with mlflow.start_run() as own:
        _, engine = trained(1, slipstream={"monitors": {"mlflow": {"run_id": own.info.run_id}}})
        engine.log({f"many/{i}": i for i in range(1500)})  # more than a call takes
        engine.destroy()
        assert client.get_run(own.info.run_id).info.status == "RUNNING", "the script ends its run"
    metrics = client.get_run(own.info.run_id).data.metrics
    assert NORM in metrics and metrics["many/1499"] == 1499


@pytest.mark.slow
def test_trackio_gets_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    library("trackio")
    told, engine = trained(slipstream={"monitors": {"trackio": {"project": "p", "name": "n", "group": "g"}}})
    engine.destroy()
    with sqlite3.connect(tmp_path / "p.db") as database:
        rows = database.execute("select step, metrics from metrics where run_name = 'n' order by step").fetchall()
    values = [(step, read[LOSS]) for step, text in rows if LOSS in (read := json.loads(text))]
    assert values == expected(told)


def logged(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, after wandb's header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        size, kind = struct.unpack_from("<HB", data, at + 4)  # after the checksum; kind 1: whole, 2 to 4: first, middle, last part
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if (left := -at % 32768) < 7:  # no header fits into the rest of the block
            at += left
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_reads_its_offline_run_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    told, engine = trained(wandb={"enabled": True, "project": "p", "group": "g"})
    engine.destroy()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found = list[tuple[int, float]]()
    for record in map(Record.FromString, logged(path.read_bytes())):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append((items["_step"], items[LOSS]))
    assert found == expected(told)


@pytest.mark.slow
def test_comet_reads_its_offline_experiment_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("comet_ml")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    block = {"enabled": True, "samples_log_interval": 8, "project": "p", "experiment_name": "n", "online": False}
    told, engine = trained(comet=block)
    engine.destroy()
    (path,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        lines = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    metrics = [line["payload"]["metric"] for line in lines if line["type"] == "metric_msg"]
    values = [(metric["step"], float(metric["metricValue"])) for metric in metrics if metric["metricName"] == LOSS]
    assert values == [expected(told)[0], expected(told)[2]]


def test_prometheus_scrapes_the_figures() -> None:
    library("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as free:
        port = free.server_port
    told, engine = trained(slipstream={"monitors": {"prometheus": {"port": port, "host": "127.0.0.1"}}})
    engine.log({"Own/accuracy": 0.75, "Own_accuracy": 0.25})
    engine.log({"last": 1.0})
    found: dict[str, float] = {}
    while "slipstream_last" not in found:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        found = {sample.name: sample.value for family in families for sample in family.samples}
    engine.destroy()
    assert found["slipstream_grad_norm"] == pytest.approx(told[-1]["grad_norm"])
    assert (found["slipstream_samples"], found["slipstream_Own_accuracy"]) == (12, 0.25)
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A receiver's URL, and what it gets: authorization and body."""
    received: list[tuple[str, bytes]] = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.headers.get("authorization", ""), self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/metrics", received
        server.shutdown()


def test_a_collector_gets_the_figures(collector: tuple[str, list[tuple[str, bytes]]]) -> None:
    library("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    url, received = collector
    block = {"endpoint": url, "headers": {"authorization": "secret"}, "interval_s": 60, "service_name": "mine"}
    told, engine = trained(slipstream={"monitors": {"otlp": block}})
    engine.log({"Own/a b": 0.25})
    engine.log({"own/a b": 0.5})
    engine.destroy()
    authorization, body = received[-1]
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    metrics = {metric.name: metric.gauge.data_points[0].as_double for scope in resource.scope_metrics for metric in scope.metrics}
    assert (authorization, names["service.name"], metrics["slipstream.samples"]) == ("secret", "mine", 12)
    assert metrics["slipstream.own/a_b"] == 0.5
    assert metrics["slipstream.train_loss"] == pytest.approx(told[-1]["train_loss"], rel=1e-5)


def test_a_report_has_the_run(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "report.html"
    block = {"slipstream": {"monitors": {"report": {"path": str(path), "title": "<Mine>"}}}}
    told, engine = trained(**block)
    engine.log({"eval_loss": 0.75, "expert_load/layers.0/0": 1.0, "expert_load/layers.0/1": 2.0, "broken": float("inf")})
    explained = engine.explain()
    engine.destroy()
    series, text = report_page.read_series(path), path.read_text()
    assert [tuple(point) for point in series[LOSS]] == expected(told)
    assert series["eval_loss"] == [(12, 0.75)] and "broken" not in series
    assert "&lt;Mine&gt;" in text and "train_micro_batch_size_per_gpu" in text and explained.splitlines()[1] in text
    for title in ("Loss", "Gradient norm before clipping", "Memory", "Samples per second", "Expert load"):
        assert f"<h2>{title}" in text
    assert not re.search(r"(src|href)=.?(http|//)|@import|url\(", text)
    assert text.count("<script") == 2 and "<link" not in text, "nothing is loaded from elsewhere"

    trained(1, **block)[1].destroy()
    assert [samples for samples, _ in report_page.read_series(path)[LOSS]] == [4], "a new run begins anew"
    page = report_page.Report(str(path), "later")
    page.write([(LOSS, 2.0, 8)])
    page.close()
    assert [samples for samples, _ in report_page.read_series(path)[LOSS]] == [4, 8], "a resumed one goes on"


def test_a_page_with_as_many_points_as_it_can_have_goes_on(tmp_path: Path) -> None:
    path, points = tmp_path / "report.html", [(i, float(i)) for i in range(report_page.MOST_POINTS)]
    path.write_text(report_page.page("long", {LOSS: points}, {}))
    report = report_page.Report(str(path), "long")
    report.write([(LOSS, 7.0, report_page.MOST_POINTS)])
    report.close()
    series = report_page.read_series(path)[LOSS]
    assert [tuple(point) for point in series] == [*((2 * i + 1, 2 * i + 0.5) for i in range(len(points) // 2)), (len(points), 7.0)]


def test_a_long_curve_keeps_its_mean() -> None:
    curve = report_page.Curve([])
    for i in range(50_001):
        curve.add(i, float(i))
    points = curve.shown()
    assert report_page.MOST_POINTS / 2 <= len(points) <= report_page.MOST_POINTS and points[-1][0] == 50_000
    assert sum(value for _, value in points) / len(points) == pytest.approx(25_000, rel=0.001)
    distances = [later[0] - earlier[0] for earlier, later in itertools.pairwise(points[:-1])]
    assert set(distances) == {16}, "as fine at its start as at its end"


def test_numbers_in_few_characters() -> None:
    assert [report_page.short(value) for value in (0, 1.5, 999.7, 12_345, 1.9e11, 1e-5)] == [
        "0",
        "1.5",
        "1000",
        "12.3k",
        "190G",
        "1e-05",
    ]
    assert [report_page.short(value, "B") for value in (0, 512, 1 << 20, 1536 << 20)] == ["0", "512 B", "1 MiB", "1.5 GiB"]


def test_the_map_is_a_picture() -> None:
    import base64

    data = base64.b64decode(report_page._png([[b"\x01\x02\x03", b"\x04\x05\x06"]]))
    assert struct.unpack(">II", data[16:24]) == (2, 1)
    at = data.index(b"IDAT") + 4
    assert zlib.decompress(data[at : at + struct.unpack(">I", data[at - 8 : at - 4])[0]]) == b"\0\1\2\3\4\5\6"
