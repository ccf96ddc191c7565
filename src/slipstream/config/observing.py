"""Blocks of DeepSpeed's JSON and of `slipstream` that observe a run: the profiler, monitors, logs of communication, timers.

The rules are those of `schema.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from slipstream.config.values import Block, Count, Int, Names, Positive, Real, Size, honored, no_effect

_PROFILER = "test_flops_profiler"


class FlopsProfiler(Block):
    enabled: bool = honored(False, "Profile one step: parameters, MACs, FLOP and latency of each module.", _PROFILER)
    profile_step: Size = honored(1, "Steps before the one that is profiled.", _PROFILER)
    module_depth: Int = honored(-1, "Depth to which top modules are listed; -1: all.", _PROFILER)
    top_modules: Size = honored(1, "Number of top modules at each depth.", _PROFILER)
    detailed: bool = honored(True, "Print the tree of all modules.", _PROFILER)
    output_file: str | None = honored(
        None, "File for the profile, beside which FILE.json and FILE.svg are written; not set: standard output.", _PROFILER
    )
    recompute_fwd_factor: Real = no_effect(0.0, "the backward is counted as it is, with what it computes again")


_FILES, _SERVICES = "test_files_have_the_figures_of_each_step", "test_services_get_the_figures"


class Tensorboard(Block):
    enabled: bool = honored(False, "Rank 0 writes the figures of each step there.", _FILES)
    output_path: str = honored("", "Folder of the job's folder.", _FILES)
    job_name: str = honored("DeepSpeedJobName", "Name of the job's folder.", _FILES)


class Wandb(Block):
    enabled: bool = honored(False, "Rank 0 sends the figures of each step to Weights & Biases.", _SERVICES)
    group: str | None = honored(None, "Group of the run.", _SERVICES)
    team: str | None = honored(None, "Entity of the run.", _SERVICES)
    project: str = honored("deepspeed", "Project of the run.", _SERVICES)


class CsvMonitor(Tensorboard):
    pass


class Comet(Block):
    enabled: bool = honored(False, "Rank 0 sends the figures of each step to Comet.", _SERVICES)
    samples_log_interval: Count = honored(100, "Samples between two values of a tag.", _SERVICES)
    project: str | None = honored(None, "Project of the experiment.", _SERVICES)
    workspace: str | None = honored(None, "Workspace of the experiment.", _SERVICES)
    api_key: str | None = honored(None, "Key of the service.", _SERVICES)
    experiment_name: str | None = honored(None, "Name of the experiment.", _SERVICES)
    experiment_key: str | None = honored(None, "Key of an experiment to go on with.", _SERVICES)
    online: bool | None = honored(None, "false: write to disk, to be uploaded later.", _SERVICES)
    mode: str | None = honored(None, "get, create or get_or_create the experiment.", _SERVICES)


_CUSTOM = "test_a_class_of_the_script"
_MLFLOW, _TRACKIO, _OTLP = "test_mlflow_gets_the_figures", "test_trackio_gets_the_figures", "test_a_collector_gets_the_figures"
_SCRAPED, _PAGE = "test_prometheus_scrapes_the_figures", "test_a_report_has_the_run"


class Mlflow(Block):
    tracking_uri: str | None = honored(None, "Server, database or folder of MLflow; not set: MLflow's own default.", _MLFLOW)
    experiment: str | None = honored(None, "Name of the experiment.", _MLFLOW)
    run_name: str | None = honored(None, "Name of the run.", _MLFLOW)
    run_id: str | None = honored(None, "A run of the script to log to, which is left open.", _MLFLOW)


class Trackio(Block):
    project: str = honored("slipstream", "Project of the run.", _TRACKIO)
    name: str | None = honored(None, "Name of the run.", _TRACKIO)
    group: str | None = honored(None, "Group of the run.", _TRACKIO)
    space_id: str | None = honored(None, "A Space of Hugging Face; not set: on this machine only.", _TRACKIO)


class Prometheus(Block):
    port: Annotated[Count, Field(le=65535)] = honored(9400, "Port of rank 0 at which the newest figures are scraped.", _SCRAPED)
    host: str = honored("127.0.0.1", "Address to listen at; 0.0.0.0: all of the machine.", _SCRAPED)


class Otlp(Block):
    endpoint: str | None = honored(None, "URL of a collector (http://HOST:4318/v1/metrics); not set: OpenTelemetry's.", _OTLP)
    headers: dict[str, str] = honored({}, "HTTP headers, as for authorization.", _OTLP)
    interval_s: Positive = honored(10.0, "Seconds between two exports of the newest figures.", _OTLP)
    service_name: str = honored("slipstream", "service.name of the figures.", _OTLP)


class JsonLines(Block):
    path: str = honored("figures.jsonl", "File to which each step adds a line.", "test_lines_have_the_figures")


class ReportPage(Block):
    path: str = honored("report.html", "HTML file with the curves of the run, its settings and environment.", _PAGE)
    title: str = honored("Training", "Title of the page.", _PAGE)


class OwnMonitors(Block):
    """`slipstream.monitors`: a block that is there is on, with its defaults if it is {}."""

    mlflow: Mlflow | None = None
    trackio: Trackio | None = None
    prometheus: Prometheus | None = None
    otlp: Otlp | None = None
    jsonl: JsonLines | None = None
    report: ReportPage | None = None
    custom: dict[str, dict[str, Any]] = honored(
        {}, "Classes with `write(events)` and `close()` by dotted name, and the arguments that make them.", _CUSTOM
    )


_TRAFFIC = "test_comms_logger"


class CommsLogger(Block):
    enabled: bool = honored(False, "Record the operations between ranks: bytes, times and waits.", _TRAFFIC)
    prof_all: bool = honored(True, "Record all operations; false: those of `prof_ops`.", _TRAFFIC)
    prof_ops: Names = honored([], "Operations to record, by DeepSpeed's names.", _TRAFFIC)
    verbose: bool = honored(False, "Log each operation.", _TRAFFIC)
    debug: bool = no_effect(False, "with `verbose`, each line names the unit whose states move")


class ThroughputTimer(Block):
    enabled: bool = honored(True, "Progress lines have samples per second.", "test_timers")
    synchronized: bool = no_effect(True, "timers read the clock only where the step synchronizes anyway")


class Timers(Block):
    throughput: ThroughputTimer = ThroughputTimer()
