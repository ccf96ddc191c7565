"""Blocks of DeepSpeed's JSON and of `slipstream` that observe a run: the profiler, monitors, communication logs, timers.

The rules are those of `schema.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from slipstream.config.values import Block, Count, Int, Names, Positive, Real, Size, honored, no_effect


class FlopsProfiler(Block):
    enabled: bool = honored(False, "Profile one step: parameters, MACs, FLOP and latency of each module.")
    profile_step: Annotated[Int, Field(ge=-1)] = honored(1, "Number of steps before the profiled one; -1: no step is profiled.")
    module_depth: Annotated[Int, Field(ge=-1)] = honored(-1, "Depth to which top modules are listed; -1: all depths.")
    top_modules: Size = honored(1, "Number of top modules at each depth.")
    detailed: bool = honored(True, "Print the tree of all modules.")
    output_file: str | None = honored(
        None, "File for the profile; FILE.json and FILE.svg are written beside it; not set: standard output."
    )
    recompute_fwd_factor: Real = no_effect(0.0, "the backward is counted, including what it recomputes, not estimated")


class Tensorboard(Block):
    enabled: bool = honored(False, "Rank 0 writes the metrics of each step to `output_path/job_name`.")
    output_path: str = honored("", "Folder that contains the job's folder.")
    job_name: str = honored("DeepSpeedJobName", "Name of the job's folder.")


class Wandb(Block):
    enabled: bool = honored(False, "Rank 0 sends the metrics of each step to Weights & Biases.")
    group: str | None = honored(None, "Group of the run.")
    team: str | None = honored(None, "Entity (team) of the run.")
    project: str = honored("deepspeed", "Project of the run.")


class CsvMonitor(Tensorboard):
    pass


class Comet(Block):
    enabled: bool = honored(False, "Rank 0 sends the metrics of each step to Comet.")
    samples_log_interval: Count = honored(100, "Samples between two logged values of a metric.")
    project: str | None = honored(None, "Project of the experiment.")
    workspace: str | None = honored(None, "Workspace of the experiment.")
    api_key: str | None = honored(None, "API key of the service.")
    experiment_name: str | None = honored(None, "Name of the experiment.")
    experiment_key: str | None = honored(None, "Key of an existing experiment to continue.")
    online: bool | None = honored(None, "false: write to disk, for a later upload.")
    mode: str | None = honored(None, "What to do with the experiment: `get`, `create` or `get_or_create`.")


class Mlflow(Block):
    tracking_uri: str | None = honored(None, "Server, database or folder of MLflow; not set: MLflow's own default.")
    experiment: str | None = honored(None, "Name of the experiment.")
    run_name: str | None = honored(None, "Name of the run.")
    run_id: str | None = honored(None, "ID of a run that the script has started; metrics are logged to it, and it is left open.")


class Trackio(Block):
    project: str = honored("slipstream", "Project of the run.")
    name: str | None = honored(None, "Name of the run.")
    group: str | None = honored(None, "Group of the run.")
    space_id: str | None = honored(None, "Hugging Face Space to log to; not set: this machine only.")


class Prometheus(Block):
    port: Annotated[Count, Field(le=65535)] = honored(9400, "Port on which rank 0 serves the newest metrics.")
    host: str = honored("127.0.0.1", "Address to listen on; 0.0.0.0: all addresses of the machine.")


class Otlp(Block):
    endpoint: str | None = honored(None, "URL of a collector (http://HOST:4318/v1/metrics); not set: OpenTelemetry's own default.")
    headers: dict[str, str] = honored({}, "HTTP headers, for example for authorization.")
    interval_s: Positive = honored(10.0, "Seconds between two exports of the newest metrics.")
    service_name: str = honored("slipstream", "The attribute service.name of the metrics.")


class JsonLines(Block):
    path: str = honored("figures.jsonl", "File to which each step appends a line.")


class ReportPage(Block):
    path: str = honored("report.html", "HTML file with the curves of the run, its settings and environment.")
    title: str = honored("Training", "Title of the page.")


class OwnMonitors(Block):
    """`slipstream.monitors`: the presence of a block enables it; {} uses its defaults."""

    mlflow: Mlflow | None = None
    trackio: Trackio | None = None
    prometheus: Prometheus | None = None
    otlp: Otlp | None = None
    jsonl: JsonLines | None = None
    report: ReportPage | None = None
    custom: dict[str, dict[str, Any]] = honored(
        {}, "Dotted names of classes with `write(events)` and `close()`, each with the arguments of its constructor."
    )


class CommsLogger(Block):
    enabled: bool = honored(False, "Record communication between ranks: operations, bytes, times and waits.")
    prof_all: bool = honored(True, "Record all operations; false: only those of `prof_ops`.")
    prof_ops: Names = honored([], "Operations to record, by DeepSpeed's names.")
    verbose: bool = honored(False, "Log each operation.")
    debug: bool = no_effect(False, "with `verbose`, each line names the unit whose states are moved")


class ThroughputTimer(Block):
    enabled: bool = honored(True, "Show samples per second in progress lines.")
    synchronized: bool = no_effect(True, "timers read the clock only where the step synchronizes anyway")


class Timers(Block):
    throughput: ThroughputTimer = ThroughputTimer()
