"""The backends of monitors.py, a class each, which imports its library when it is created.

All methods of a backend run in its thread. An exception is logged, and the backend is then disabled.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from slipstream.observe.report_page import Report


class Figure(NamedTuple):
    tag: str
    value: float
    samples: int


class Monitor(Protocol):
    """The interface of a backend, also of a custom one. It is created with the values of its block."""

    def write(self, events: Sequence[Figure]) -> None: ...

    def close(self) -> None: ...


def by_samples(events: Sequence[Figure]) -> dict[int, dict[str, float]]:
    """{number of samples: {tag: value}}."""
    steps: dict[int, dict[str, float]] = {}
    for tag, value, samples in events:
        steps.setdefault(samples, {})[tag] = value
    return steps


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


class CsvFiles:
    """One file for each tag in output_path/job_name; rows are (samples, value)."""

    def __init__(self, output_path: str, job_name: str) -> None:
        self.folder = os.path.join(output_path, job_name)
        os.makedirs(self.folder, exist_ok=True)
        self._files: dict[str, Any] = {}

    def write(self, events: Sequence[Figure]) -> None:
        rows: dict[str, list[tuple[int, float]]] = {}
        for tag, value, samples in events:
            rows.setdefault(tag, []).append((samples, value))
        for tag in rows:
            if tag not in self._files:
                path = os.path.join(self.folder, tag.replace("/", "_") + ".csv")
                is_new = not os.path.exists(path)
                self._files[tag] = open(path, "a", newline="")  # noqa: SIM115 (closed in close)
                if is_new:
                    csv.writer(self._files[tag]).writerow(["step", tag.rpartition("/")[2]])
            csv.writer(self._files[tag]).writerows(rows[tag])
            self._files[tag].flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class Tensorboard:
    """Event files in output_path/job_name."""

    def __init__(self, output_path: str, job_name: str) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.summary_writer: Any = SummaryWriter(log_dir=os.path.join(output_path, job_name))

    def write(self, events: Sequence[Figure]) -> None:
        for tag, value, samples in events:
            self.summary_writer.add_scalar(tag, value, samples)
        self.summary_writer.flush()

    def close(self) -> None:
        self.summary_writer.close()


class ServiceRun:
    """A run of a service with the interface of Weights & Biases."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def write(self, events: Sequence[Figure]) -> None:
        for samples, values in by_samples(events).items():
            self.run.log(values, step=samples)

    def close(self) -> None:
        self.run.finish()


def wandb(group: str | None, team: str | None, project: str) -> ServiceRun:
    return ServiceRun(importlib.import_module("wandb").init(project=project, group=group, entity=team))


def trackio(project: str, **options: str | None) -> ServiceRun:
    """A run of Trackio, local unless `space_id` names a Space of Hugging Face."""
    return ServiceRun(importlib.import_module("trackio").init(project=project, embed=False, **given(**options)))


class Comet:
    """An experiment of Comet. A tag is written once `samples_log_interval` samples have passed since its last value."""

    def __init__(self, samples_log_interval: int, experiment_name: str | None, project: str | None, **options: Any) -> None:
        self.experiment: Any = importlib.import_module("comet_ml").start(**given(project=project, **options))
        if experiment_name is not None:
            self.experiment.set_name(experiment_name)
        self.interval, self._last = samples_log_interval, dict[str, int]()

    def write(self, events: Sequence[Figure]) -> None:
        for tag, value, samples in events:
            if tag not in self._last or samples - self._last[tag] >= self.interval:
                self._last[tag] = samples
                self.experiment.log_metric(tag, value, step=samples)

    def close(self) -> None:
        self.experiment.end()


class Mlflow:
    """A run of MLflow: a new one, or the existing run `run_id`, which is not ended."""

    MOST = 1000  # metrics in a call of its interface

    def __init__(self, tracking_uri: str | None, experiment: str | None, run_name: str | None, run_id: str | None) -> None:
        self.mlflow: Any = importlib.import_module("mlflow")
        if tracking_uri is not None:
            self.mlflow.set_tracking_uri(tracking_uri)
        if experiment is not None:
            self.mlflow.set_experiment(experiment)
        self.is_own = run_id is None
        self.run_id: str = self.mlflow.start_run(run_id=run_id, run_name=run_name).info.run_id  # active in this thread only
        self.client: Any = self.mlflow.MlflowClient()
        self.metric: Any = importlib.import_module("mlflow.entities").Metric

    def write(self, events: Sequence[Figure]) -> None:
        now = int(1e3 * time.time())
        metrics = [self.metric(tag, value, now, samples) for tag, value, samples in events]
        for i in range(0, len(metrics), self.MOST):
            self.client.log_batch(self.run_id, metrics=metrics[i : i + self.MOST])

    def close(self) -> None:
        if self.is_own:
            self.mlflow.end_run()


def _newest(events: Sequence[Figure]) -> dict[str, float]:
    """The newest value of each tag, and the number of samples so far: for backends without an x axis."""
    return {tag: value for tag, value, _ in events} | {"samples": float(max(event.samples for event in events))}


class Prometheus:
    """A page with the newest value of each tag as a gauge: `Train/Samples/lr` is slipstream_lr."""

    def __init__(self, port: int, host: str) -> None:
        self.client: Any = importlib.import_module("prometheus_client")
        self.registry: Any = self.client.CollectorRegistry()
        self.server: Any = self.client.start_http_server(port, host, self.registry)[0]
        self.gauges: dict[str, Any] = {}

    def write(self, events: Sequence[Figure]) -> None:
        for tag, value in _newest(events).items():
            name = "slipstream_" + re.sub("[^a-zA-Z0-9_]", "_", tag.removeprefix("Train/Samples/"))
            if name not in self.gauges:
                self.gauges[name] = self.client.Gauge(name, f"{tag}.", registry=self.registry)
            self.gauges[name].set(value)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Otlp:
    """Sends the newest value of each tag as a gauge to an OpenTelemetry collector every `interval_s` seconds, and at the end:
    `Train/Samples/lr` is slipstream.lr. OpenTelemetry writes names in lower case."""

    def __init__(self, endpoint: str | None, headers: Mapping[str, str], interval_s: float, service_name: str) -> None:
        exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        sdk, export = (importlib.import_module(f"opentelemetry.sdk.metrics{part}") for part in ("", ".export"))
        resource = importlib.import_module("opentelemetry.sdk.resources").Resource.create({"service.name": service_name})
        sender = exporter.OTLPMetricExporter(**given(endpoint=endpoint, headers=dict(headers) or None))
        reader = export.PeriodicExportingMetricReader(sender, export_interval_millis=1e3 * interval_s)
        self.provider: Any = sdk.MeterProvider([reader], resource, shutdown_on_exit=False)
        self.meter: Any = self.provider.get_meter("slipstream")
        self.gauges: dict[str, Any] = {}

    def write(self, events: Sequence[Figure]) -> None:
        for tag, value in _newest(events).items():
            name = "slipstream." + re.sub("[^a-zA-Z0-9_./-]", "_", tag.removeprefix("Train/Samples/"))
            if name not in self.gauges:
                self.gauges[name] = self.meter.create_gauge(name)
            self.gauges[name].set(value)

    def close(self) -> None:
        self.provider.shutdown()


class JsonLines:
    """An object for each step, at the end of a file: its samples, the time in seconds since 1970, and the values by tag, of
    which those that are not finite are null."""

    def __init__(self, path: str) -> None:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed in close)

    def write(self, events: Sequence[Figure]) -> None:
        for samples, values in by_samples(events).items():
            finite = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
            self.file.write(json.dumps({"samples": samples, "time": time.time(), **finite}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class Backend(NamedTuple):
    kind: Any  # the class, made with the values of its block
    package: str = ""  # the module that it needs
    install: str = ""  # its name for pip
    extra: str = ""  # of pyproject.toml


# Blocks at the top of the config; the others are in slipstream.monitors.
DEEPSPEED = ("tensorboard", "wandb", "comet", "csv_monitor")
BACKENDS: Mapping[str, Backend] = {
    "tensorboard": Backend(Tensorboard, "tensorboard", "tensorboard", "tensorboard"),
    "wandb": Backend(wandb, "wandb", "wandb", "wandb"),
    "comet": Backend(Comet, "comet_ml", "comet_ml", "comet"),
    "csv_monitor": Backend(CsvFiles),
    "mlflow": Backend(Mlflow, "mlflow", "mlflow", "mlflow"),
    "trackio": Backend(trackio, "trackio", "trackio", "trackio"),
    "prometheus": Backend(Prometheus, "prometheus_client", "prometheus-client", "prometheus"),
    "otlp": Backend(Otlp, "opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http", "otlp"),
    "jsonl": Backend(JsonLines),
    "report": Backend(Report),
}
