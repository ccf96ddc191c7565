"""`slipstream tune`: find the fastest config of an unmodified script by predictions and short runs.

Each run is `slipstream run SCRIPT` with the variable of config/trial.py. The first one has the user's config and surveys the
candidates, with predicted memory and time (train/trial.py); search.py decides which of them run, and for how long. FOLDER has

    tuning.json     all that is known, after each run: the same command goes on from it
    tuning.md       the table of candidates, with the reason of each that was dropped
    best.json       the config with the best changes
    runs/N/         trial.json, log.txt, progress.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.config.arguments import read_config
from slipstream.config.trial import PROGRESS, STOP, SURVEY, TASK, VARIABLE, laid_over, nested, write_json
from slipstream.launch import hyper, search
from slipstream.launch.search import BATCH, Candidate, Outcome, Rules
from slipstream.world.host import available_memory

STATE, TABLE, BEST, RUNS = "tuning.json", "tuning.md", "best.json", "runs"
_MEASURED = ("seconds", "loss", "peak_bytes")
_POLL_S, _GRACE_S = 0.05, 15.0
_REMEDY = ": raise --memory, name a --disk for offload, start more ranks, or allow more --axes"
_SEED = 0  # for tuner_type random
_MARGIN = 1.15
_DEFAULTS: Mapping[str, Any] = {
    "folder": "tuning",
    "overwrite": False,
    "warmup": 2,
    "steps": 12,
    "runs": 8,
    "patience": 2,
    "metric": "throughput",
    "tuner": "model_based",
    "max_batch": None,
    "axes": list(search.AXES),
}
_FROM_BLOCK: Mapping[str, str] = {  # option -> DeepSpeed's name
    "folder": "results_dir",
    "overwrite": "overwrite",
    "warmup": "start_profile_step",
    "runs": "tuner_num_trials",
    "patience": "tuner_early_stopping",
    "metric": "metric",
    "tuner": "tuner_type",
    "max_batch": "max_train_batch_size",
}


def _say(text: str) -> None:
    print(f"slipstream tune: {text}", file=sys.stderr, flush=True)


def smallest(config: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of a config with which a model is most likely to fit, at the same global batch size."""
    changes: dict[str, Any] = {"zero_optimization.stage": 3, "slipstream.activations": "recompute"}
    micro, steps = config.get(BATCH[0]), config.get(BATCH[1], 1)
    if isinstance(micro, int) and (isinstance(steps, int) or BATCH[2] in config):
        changes |= {BATCH[0]: 1, BATCH[1]: None if BATCH[2] in config else micro * steps}
    return changes


def with_mappings(arguments: Sequence[str], mappings: Mapping[str, str], config: Mapping[str, Any]) -> list[str]:
    """The script's arguments, with the config's values of the mapped keys: `--flag VALUE` is replaced or added."""
    result = list(arguments)
    for key, flag in mappings.items():
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None or value == "auto":
            continue
        places = [i for i, word in enumerate(result) if word == flag or word.startswith(f"{flag}=")]
        for place in reversed(places):
            del result[place : place + (1 if "=" in result[place] else 2)]
        result += [flag, str(value)]
    return result


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The lines written by rank 0 of a run: its input first, then a line per step."""
    with suppress(FileNotFoundError):
        text = (folder / PROGRESS).read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return []


class Started:
    """One run of the script in its own process group."""

    def __init__(self, folder: Path, argv: Sequence[str]) -> None:
        self.folder, self.began = folder, time.monotonic()
        with open(folder / "log.txt", "wb") as log:
            environ = os.environ | {VARIABLE: str(folder.absolute())}
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
            )

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def kill(self) -> None:
        """Stop the launcher and its ranks, and wait for them."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE_S)
                return


class Tuner:
    """The search in a folder. `state`: the content of STATE."""

    def __init__(self, options: argparse.Namespace, config: dict[str, Any], rules: Rules) -> None:
        self.options, self.config, self.rules = options, config, rules
        self.folder = Path(options.folder)
        self.task = {"config": config, "command": self._argv(config), "axes": options.axes, "micros": options.micro_batches}
        self.task |= {"search": options.search, "lr_range": options.lr_range}
        by_loss = rules.metric == "loss" or options.lr_range
        self.task |= {"metric": rules.metric, "steps": options.steps if by_loss else None}  # which losses are of
        self.rows: list[Outcome] = []
        self.survey: dict[str, Any] | None = None
        self.base: dict[str, Any] = {}  # changes of the run that made the survey
        self.fixed: int | None = None

    # -- state --

    def open(self) -> None:
        """Create the folder, or continue the search in it. Raises ValueError if it holds another search, or other files."""
        is_known = (self.folder / STATE).is_file()
        if self.folder.exists() and not is_known and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise ValueError(f"{self.folder} exists and has no {STATE} of a search: name another --folder")
        if not is_known or self.options.overwrite:
            shutil.rmtree(self.folder / RUNS, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in (TABLE, BEST):
                (self.folder / name).unlink(missing_ok=True)
            self.save()
            return
        state = json.loads((self.folder / STATE).read_text())
        task = json.loads(json.dumps(self.task))  # as read from the file: tuples become lists
        if differ := [name for name in task if task[name] != state["task"].get(name)]:
            raise ValueError(
                f"{self.folder} has a search with another {' and '.join(differ)}: pass --overwrite, or another --folder"
            )
        self.rows = [Outcome(**row | {"rungs": tuple(row["rungs"])}) for row in state["rows"]]
        self.survey, self.base, self.fixed = state["survey"], state["base"], state["fixed"]
        if self.rows:
            _say(f"going on from {self.folder / STATE}: {len(self.rows)} runs are known")

    def save(self) -> None:
        state = {"task": self.task, "base": self.base, "fixed": self.fixed, "survey": self.survey}
        write_json(self.folder / STATE, state | {"rows": [asdict(row) for row in self.rows]})

    @property
    def candidates(self) -> list[Candidate]:
        """In the order of the tuner's type."""
        if self.survey is None:
            return []
        options = self.options
        found = [Candidate(**each | {"changes": self.base | each["changes"]}) for each in self.survey["candidates"]]
        bounds = {"micros": options.micro_batches, "largest": options.num_micro_batches, "fixed": self.fixed}
        chosen = search.kept(found, options.axes, **bounds)
        low, high = options.micro_range
        chosen = [each for each in chosen if not each.changes or (low <= each.micro <= high and each.samples >= options.min_batch)]
        if self.rules.tuner == "random":
            random.Random(_SEED).shuffle(chosen)
        return chosen

    # -- runs --

    def _argv(self, config: Mapping[str, Any]) -> list[str]:
        options = self.options
        arguments = with_mappings(options.arguments, options.mappings, config)
        return [sys.executable, "-m", "slipstream", "run", "--quiet", *options.launch, options.script, *arguments]

    def run(self, changes: Mapping[str, Any], *, surveys: bool = False, rates: tuple[float, float] | None = None) -> Outcome:
        """Run a configuration and record how it went."""
        options, number = self.options, len(self.rows)
        folder = self.folder / RUNS / str(number)
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
        folder.mkdir(parents=True)
        config = laid_over(self.config, nested(changes))
        wanted = {"memory": options.memory, "host": available_memory(), "disk": options.disk, "max_batch": options.max_batch}
        task = {"config": config, "warmup": options.warmup, "steps": options.steps, "survey": wanted if surveys else None}
        task |= {"rates": rates} if rates else {}
        write_json(folder / TASK, task)
        run = Started(folder, self._argv(config))
        try:
            killed = self._watch(run)
        except BaseException:
            run.kill()
            raise
        row = self._row(run, changes, killed)
        if surveys and (folder / SURVEY).exists():
            self.survey, self.base = json.loads((folder / SURVEY).read_text()), dict(changes)
            self._learn_rows(run)
        self.rows.append(row)
        self.save()
        _say(f"run {number}: {_short(changes)}: {_told(row, self.rules)}")
        return row

    def lines(self, number: int) -> list[dict[str, Any]]:
        """The lines that rank 0 has written in a run."""
        return lines_of(self.folder / RUNS / str(number))

    def _watch(self, run: Started) -> str:
        """Wait until a run ends. Returns why the tuner stopped it, if it did."""
        reason = ""
        while run.process.poll() is None:
            time.sleep(_POLL_S)
            if time.monotonic() - run.began > self.options.timeout:
                run.kill()
                return f"no end after {self.options.timeout:g} seconds (--timeout)"
            costs = self._rungs(lines_of(run.folder))
            if not reason and costs and self.rules.tuner == "model_based" and search.is_slow(costs, self.rows):
                steps = list(search.rungs(self.options.steps, self.rules))[len(costs) - 1]
                reason = f"after {steps} steps outside the better half of the runs"
                (run.folder / STOP).touch()
        return reason

    def _rungs(self, lines: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
        times = [line["seconds"] for line in lines[1:] if line["timed"]]
        samples = lines[0]["samples"] if lines else 1
        passed = [rung for rung in search.rungs(self.options.steps, self.rules) if rung <= len(times)]
        if self.rules.metric == "loss":
            return tuple(_late_loss(lines, rung) for rung in passed)
        return tuple(search.cost(median(times[:rung]), samples, self.rules) for rung in passed)

    def _row(self, run: Started, changes: Mapping[str, Any], ended: str) -> Outcome:
        lines, code = lines_of(run.folder), run.process.returncode
        times = [line["seconds"] for line in lines[1:] if line["timed"]]
        found: dict[str, Any] = {"changes": dict(changes), "wall": time.monotonic() - run.began, "rungs": self._rungs(lines)}
        if times:
            found |= {"seconds": median(times), "steps": len(times), "samples": lines[0]["samples"]}
            found["loss"] = loss if math.isfinite(loss := _late_loss(lines, len(times))) else None
        if len(lines) > 1:
            found["memory"] = lines[-1]["memory"]
        failed = (ended or search.reason_of(code, run.log)) if code else self._why_unusable(lines, found)
        short = len(times) < self.options.steps
        if not failed and short and not ended:
            failed = f"the script ended after {len(lines) - 1} steps, of {self.options.warmup + self.options.steps}; lower --steps"
        if failed:
            return Outcome(outcome="failed", reason=failed, **found)
        return Outcome(outcome="stopped" if short else "measured", reason=ended if short else "", **found)

    def _why_unusable(self, lines: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> str:
        """Why a run that ended well gives no measurement, or "" if it does."""
        if not lines:
            return "the script ended without a forward of an engine of slipstream.initialize in training mode"
        fed, micro = lines[0]["rows"], lines[0]["micro"]
        if self.fixed is None and self.survey is not None and fed not in (None, micro):
            return f"the script fed {fed} rows in a micro-batch of {micro}; --map {BATCH[0]}=--FLAG tells it"
        by_loss = self.rules.metric == "loss"
        if (by_loss or self.options.lr_range) and not all("loss" in line for line in lines[1:]):
            return "the loss does not go through engine.backward(loss), which tells its value"
        if by_loss and found.get("loss") is None:
            return "the loss is not finite"
        return ""

    def _learn_rows(self, run: Started) -> None:
        head = lines_of(run.folder)[0]
        if head["rows"] not in (None, head["micro"]):
            self.fixed = head["micro"]
            _say(
                f"the script feeds {head['rows']} rows whatever the config says ({head['micro']}), so the micro-batch stays: read "
                f"engine.plan.batch.micro_batch_size, or pass --map {BATCH[0]}=--FLAG of the script"
            )
        if self.survey and self.survey["note"]:
            _say(self.survey["note"])

    def look(self) -> None:
        """Make the first run, which surveys the candidates. Raises ValueError if no run reaches its first batch."""
        known = {row.key for row in self.rows}
        for changes in ({}, smallest(self.config)):
            if search.key_of(changes) not in known:
                self.run(changes, surveys=True)
            if self.survey is not None:
                fits = sum(each.fits for each in self.candidates)
                _say(f"{len(self.candidates)} candidates, {fits} of them fit by prediction{'' if fits else _REMEDY}")
                return
        log = self.folder / RUNS / str(len(self.rows) - 1) / "log.txt"
        raise ValueError(
            f"no run has reached its first batch; the last one: {self.rows[-1].reason} ({log} has all of it). Mend the script or "
            "the config, then pass --overwrite"
        )

    def search(self) -> str:
        """Run until the rules end the search. Returns why it ended."""
        if self.survey is None:
            self.look()
        while True:
            chosen = search.next_run(self.candidates, self.rows, self.rules)
            if isinstance(chosen, str):
                return chosen
            self.run(chosen.changes, surveys=False)

    def train(self) -> int:
        """Run the script to its own end with the best config."""
        config = json.loads((self.folder / BEST).read_text())
        write_json(self.folder / TASK, {"config": config})
        return subprocess.run(self._argv(config), env=os.environ | {VARIABLE: str(self.folder.absolute())}, check=False).returncode


def _short(changes: Mapping[str, Any]) -> str:
    names = {BATCH[0]: "micro-batch", BATCH[1]: "accumulation", BATCH[2]: "batch"}
    words = []
    for key, value in changes.items():
        shown = " ".join(str(part) for part in value.values()) if isinstance(value, Mapping) else value
        words.append(f"{names.get(key, key.rpartition('.')[2])} {shown}")
    return ", ".join(words) or "the config as it is"


def _late_loss(lines: Sequence[Mapping[str, Any]], steps: int) -> float:
    """The mean loss over the second half of the first `steps` timed steps; NaN if one is missing."""
    losses = [line.get("loss", math.nan) for line in lines[1:] if line["timed"]][steps // 2 : steps]
    return float(sum(losses) / len(losses))


def _told(row: Outcome, rules: Rules) -> str:
    speed = f"{row.seconds * 1e3:.1f} ms a step, {row.samples / row.seconds:.1f} samples/s" if row.seconds else ""
    loss = f"loss {row.loss:.4g}" if rules.metric == "loss" and row.loss is not None else ""
    return "; ".join(filter(None, [loss, speed, "" if row.outcome == "measured" else row.outcome, row.reason]))


def table(tuner: Tuner, ended: str) -> list[dict[str, Any]]:
    """A line per candidate, the best first: changes, predictions, measurements, and the reason if it was dropped."""
    best, rules = search.best_of(tuner.rows, tuner.rules), tuner.rules
    known = {each.key: each for each in tuner.candidates}
    budget = (tuner.survey or {}).get("budget", 0)

    def line(changes: Mapping[str, Any], outcome: str, reason: str, row: Outcome | None = None) -> dict[str, Any]:
        twin, speed = known.get(search.key_of(changes)), row.samples / row.seconds if row and row.seconds else None
        predicted = {"predicted_seconds": twin.seconds if twin else None, "predicted_bytes": twin.memory if twin else None}
        measured = {"seconds": row.seconds, "loss": row.loss, "peak_bytes": row.memory} if row else dict.fromkeys(_MEASURED)
        return {"changes": changes, "outcome": outcome, **predicted, **measured, "samples_per_second": speed, "reason": reason}

    lines = []
    for row in sorted(tuner.rows, key=lambda row: (row.outcome != "measured", not row.seconds, search.cost_of(row, rules))):
        reason = row.reason
        if row.outcome == "measured" and row is not best and best is not None:
            ratio = search.cost_of(row, rules) / search.cost_of(best, rules)
            reason = f"measured {ratio:.2f} times {'the loss of' if rules.metric == 'loss' else 'as slow as'} the best"
        lines.append(line(row.changes, "best" if row is best else row.outcome, reason, row))
    ran = {row.key for row in tuner.rows}
    costs = {each.key: value for each, value in search.order(tuner.candidates, tuner.rows, rules)}
    for each in sorted(known.values(), key=lambda each: (not each.fits, costs.get(each.key, 0.0))):
        if each.key not in ran:
            why = search.why_not_run(each, costs.get(each.key, 0.0), best, rules, ended, budget)
            lines.append(line(each.changes, "dropped", why))
    return lines


def markdown(lines: Sequence[Mapping[str, Any]], head: str) -> str:
    def number(value: float | None, scale: float) -> str:
        return "" if not value else f"{value * scale:.4g}" if value * scale < 1e4 else f"{value * scale:.0f}"

    scales = {"loss": 1, "predicted_seconds": 1e3, "seconds": 1e3, "samples_per_second": 1}
    scales |= {"predicted_bytes": 2**-20, "peak_bytes": 2**-20}
    rows = []
    for each in lines:
        figures = [number(each[name], scale) for name, scale in scales.items()]
        rows.append(f"| {' | '.join([_short(each['changes']), each['outcome'], *figures, each['reason'].replace('|', '/')])} |")
    columns = "| config | | loss | predicted ms | measured ms | samples/s | predicted MiB | peak MiB, with Python | why |"
    return "\n".join([head, "", columns, "|---|---|---|---|---|---|---|---|---|", *rows, ""])


def _without_unset(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def finish(tuner: Tuner, ended: str) -> int:
    """Write the table and the best config. Returns the exit code: 1 if no run was measured."""
    lines, best, folder = table(tuner, ended), search.best_of(tuner.rows, tuner.rules), tuner.folder
    write_json(folder / STATE, json.loads((folder / STATE).read_text()) | {"table": lines, "ended": ended})
    among = f" of {len(tuner.candidates)} candidates" if tuner.candidates else ""
    head = f"{len(tuner.rows)} runs{among}; the search ended: {ended}."
    (folder / TABLE).write_text(markdown(lines, head))
    if best is None:
        fits = any(each.fits for each in tuner.candidates) or not tuner.candidates
        remedy = ": lower --steps, raise --timeout, or mend the script" if fits else _REMEDY
        _say(f"no configuration was measured, for the reasons in {folder / TABLE}{remedy}")
        return 1
    write_json(folder / BEST, _without_unset(laid_over(tuner.config, nested(best.changes))))
    first = next((row for row in tuner.rows if not row.changes and row.seconds), None)
    gain = ""
    if first is not None and first is not best and first.seconds:
        ratio = search.cost_of(first, tuner.rules) / search.cost_of(best, tuner.rules)
        gain = f", {ratio:.2f} times as fast as the config as it is"
    _say(f"the search ended: {ended}")
    print(f"best: {_short(best.changes)}: {_told(best, tuner.rules)}{gain}")
    print(f"{folder / BEST} is its config, {folder / TABLE} what was tried")
    return 0


def _mapping(text: str) -> tuple[str, str]:
    key, equals, flag = text.partition("=")
    if not (equals and key and flag.startswith("-")):
        raise ValueError(f"--map {text!r} is not KEY=--FLAG; write {BATCH[0]}=--batch-size")
    return key, flag


def _of_block(options: argparse.Namespace, block: Any) -> dict[str, Any]:
    """Defaults from the block `autotuning`; its keys without an option of their own are set directly."""
    steps = block.end_profile_step - block.start_profile_step
    if steps < 1:
        raise ValueError(
            f"autotuning.end_profile_step ({block.end_profile_step}) must be above start_profile_step ({block.start_profile_step})"
        )
    options.mappings = {key.strip(): flag for key, flag in (block.arg_mappings or {}).items()} | options.mappings
    options.micro_range = (block.min_train_micro_batch_size_per_gpu, block.max_train_micro_batch_size_per_gpu)
    options.min_batch, options.num_micro_batches = block.min_train_batch_size, block.num_tuning_micro_batch_sizes
    own = {name: getattr(block, key) for name, key in _FROM_BLOCK.items()}
    return own | {"steps": steps, "axes": ["micro", "stage"] if block.fast else list(search.AXES)}


def settle(options: argparse.Namespace, config: Mapping[str, Any]) -> Rules:
    """Fill in what the command line leaves to the block `autotuning`, or to defaults.

    Raises ValueError for options that contradict each other.
    """
    from slipstream.config.parse import parse

    hyper.check(options)
    script, options.arguments = options.script, options.after
    if not options.module and not Path(script).is_file():
        raise ValueError(f"--script {script}: no such file")
    options.launch = [*(["--nproc", str(options.nproc)] if options.nproc else []), *options.launch_args]
    options.launch += ["--module"] if options.module else []
    options.mappings = dict(map(_mapping, options.map))
    options.micro_range, options.min_batch, options.num_micro_batches = (1, sys.maxsize), 1, None
    defaults: dict[str, Any] = dict(_DEFAULTS)
    block = parse(config).config.autotuning
    if block.enabled:
        defaults |= _of_block(options, block)
    if options.search:
        defaults |= {"metric": "loss", "runs": 16, "steps": 60}
    if options.lr_range:
        defaults["steps"] = 100
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return Rules(runs=options.runs, patience=options.patience, metric=options.metric, tuner=options.tuner, margin=_MARGIN)


def execute(options: argparse.Namespace) -> int:
    """Run the `slipstream tune` command. Returns the exit code. Raises ValueError for a search that cannot start."""
    config = read_config(options.config).raw
    tuner = Tuner(options, config, settle(options, config))
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        tuner.open()
        code = finish(tuner, hyper.search(tuner) if options.search or options.lr_range else tuner.search())
    except KeyboardInterrupt:
        _say(f"interrupted after {len(tuner.rows)} runs; the same command goes on from {tuner.folder}")
        return 130
    return tuner.train() if options.train and not code else code
