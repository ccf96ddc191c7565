"""Blocks of DeepSpeed's JSON and of `slipstream` that observe a run: the profiler, monitors, logs of communication, timers.

The rules are those of `schema.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from slipstream.config.values import Block, Count, Int, Names, Positive, Real, Size, honored, no_effect


class FlopsProfiler(Block):
    enabled: bool = honored(False, "Profile one step: parameters, MACs, FLOP and latency of each module.")
    profile_step: Annotated[Int, Field(ge=-1)] = honored(1, "Steps before the one that is profiled; -1: none is.")
    module_depth: Annotated[Int, Field(ge=-1)] = honored(-1, "Depth to which top modules are listed; -1: all.")
    top_modules: Size = honored(1, "Number of top modules at each depth.")
    detailed: bool = honored(True, "Print the tree of all modules.")
    output_file: str | None = honored(
        None, "File for the profile, beside which FILE.json and FILE.svg are written; not set: standard output."
    )
    recompute_fwd_factor: Real = no_effect(0.0, "the backward is counted as it is, with what it computes again")


class Tensorboard(Block):
    enabled: bool = honored(False, "Rank 0 writes the figures of each step there.")
    output_path: str = honored("", "Folder of the job's folder.")
    job_name: str = honored("DeepSpeedJobName", "Name of the job's folder.")


class Wandb(Block):
    enabled: bool = honored(False, "Rank 0 sends the figures of each step to Weights & Biases.")
    group: str | None = honored(None, "Group of the run.")
    team: str | None = honored(None, "Entity of the run.")
    project: str = honored("deepspeed", "Project of the run.")


class CsvMonitor(Tensorboard):
    pass


class Comet(Block):
    enabled: bool = honored(False, "Rank 0 sends the figures of each step to Comet.")
    samples_log_interval: Count = honored(100, "Samples between two values of a tag.")
    project: str | None = honored(None, "Project of the experiment.")
    workspace: str | None = honored(None, "Workspace of the experiment.")
    api_key: str | None = honored(None, "Key of the service.")
    experiment_name: str | None = honored(None, "Name of the experiment.")
    experiment_key: str | None = honored(None, "Key of an experiment to go on with.")
    online: bool | None = honored(None, "false: write to disk, to be uploaded later.")
    mode: str | None = honored(None, "get, create or get_or_create the experiment.")


class Mlflow(Block):
    tracking_uri: str | None = honored(None, "Server, database or folder of MLflow; not set: MLflow's own default.")
    experiment: str | None = honored(None, "Name of the experiment.")
    run_name: str | None = honored(None, "Name of the run.")
    run_id: str | None = honored(None, "A run of the script to log to, which is left open.")


class Trackio(Block):
    project: str = honored("slipstream", "Project of the run.")
    name: str | None = honored(None, "Name of the run.")
    group: str | None = honored(None, "Group of the run.")
    space_id: str | None = honored(None, "A Space of Hugging Face; not set: on this machine only.")


class Prometheus(Block):
    port: Annotated[Count, Field(le=65535)] = honored(9400, "Port of rank 0 at which the newest figures are scraped.")
    host: str = honored("127.0.0.1", "Address to listen at; 0.0.0.0: all of the machine.")


class Otlp(Block):
    endpoint: str | None = honored(None, "URL of a collector (http://HOST:4318/v1/metrics); not set: OpenTelemetry's.")
    headers: dict[str, str] = honored({}, "HTTP headers, as for authorization.")
    interval_s: Positive = honored(10.0, "Seconds between two exports of the newest figures.")
    service_name: str = honored("slipstream", "service.name of the figures.")


class JsonLines(Block):
    path: str = honored("figures.jsonl", "File to which each step adds a line.")


class ReportPage(Block):
    path: str = honored("report.html", "HTML file with the curves of the run, its settings and environment.")
    title: str = honored("Training", "Title of the page.")


class OwnMonitors(Block):
    """`slipstream.monitors`: a block that is there is on, with its defaults if it is {}."""

    mlflow: Mlflow | None = None
    trackio: Trackio | None = None
    prometheus: Prometheus | None = None
    otlp: Otlp | None = None
    jsonl: JsonLines | None = None
    report: ReportPage | None = None
    custom: dict[str, dict[str, Any]] = honored(
        {}, "Classes with `write(events)` and `close()` by dotted name, and the arguments that make them."
    )


class CommsLogger(Block):
    enabled: bool = honored(False, "Record the operations between ranks: bytes, times and waits.")
    prof_all: bool = honored(True, "Record all operations; false: those of `prof_ops`.")
    prof_ops: Names = honored([], "Operations to record, by DeepSpeed's names.")
    verbose: bool = honored(False, "Log each operation.")
    debug: bool = no_effect(False, "with `verbose`, each line names the unit whose states move")


class ThroughputTimer(Block):
    enabled: bool = honored(True, "Progress lines have samples per second.")
    synchronized: bool = no_effect(True, "timers read the clock only where the step synchronizes anyway")


class Timers(Block):
    throughput: ThroughputTimer = ThroughputTimer()
