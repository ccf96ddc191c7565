"""The processor time of each test, of each file and of all, and their limits.

A test's cost covers its process tree: this process, the children that it waited for, and the pool's workers (each reports the cost
of its job). Wall time is meaningless, because other tests run concurrently.
"""

import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

TEST_S = 10.0  # limit in processor seconds for a test without the mark `slow`; the summary lists those above it
FAILS_S = 80.0  # above this the run fails: a slow machine does not explain it (30 s on one that was not half as fast as usual)
FILE_S = 20.0  # limit for the tests of a file with their fixtures; the summary lists files above it
ALL_S = 24 * 60.0  # of `make test`: two cores for twelve minutes
ALL_FAILS_S = 4 * ALL_S  # the same tests took 900 to 2,730 s of processors, by the machine and its neighbors
NUM_SHOWN = 20

_in_workers = 0.0  # processor seconds of the pool's workers so far, for this process's tests


def add_workers(seconds: float) -> None:
    global _in_workers
    _in_workers += seconds


def spent_here() -> float:
    """Processor seconds of this process and of the children that it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Budget:
    """A pytest plugin that records the cost of each phase in its report, sums the costs in the controller, and fails the run."""

    def __init__(self) -> None:
        self.costs: dict[str, float] = defaultdict(float)  # node id -> processor seconds
        self._calls: dict[str, float] = {}  # without fixtures, whose cost falls on the first and the last test of a module
        self._slow: set[str] = set()
        self._last = spent_here()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = spent_here() + _in_workers
        report.cpu_s = now - self._last  # type: ignore[attr-defined]  # xdist sends it to the controller with the report
        report.is_slow = item.get_closest_marker("slow") is not None  # type: ignore[attr-defined]
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.costs[report.nodeid] += getattr(report, "cpu_s", 0.0)
        if report.when == "call":
            self._calls[report.nodeid] = getattr(report, "cpu_s", 0.0)
        if getattr(report, "is_slow", False):
            self._slow.add(report.nodeid)

    def over(self) -> dict[str, float]:
        return {name: cost for name, cost in self._calls.items() if cost > TEST_S and name not in self._slow}

    def files(self) -> dict[str, float]:
        """Processor seconds of the tests of each file that are not slow."""
        sums: dict[str, float] = defaultdict(float)
        for name, cost in self.costs.items():
            if name not in self._slow:
                sums[name.partition("::")[0]] += cost
        return sums

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and (
            any(cost > FAILS_S for cost in self.over().values()) or sum(self.files().values()) > ALL_FAILS_S
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(self.costs.values()) < TEST_S:
            return
        write = terminalreporter.write_line
        terminalreporter.write_sep("=", "processor time")
        folders: dict[str, float] = defaultdict(float)
        for name, cost in self.costs.items():
            folders[str(Path(name.partition("::")[0]).parent)] += cost
        write("s by folder: " + ", ".join(f"{folder} {cost:.0f}" for folder, cost in sorted(folders.items())))
        for name, cost in sorted(self.costs.items(), key=lambda pair: -pair[1])[:NUM_SHOWN]:
            write(f"{cost:6.1f} s  {name}")
        files = self.files()
        large = sorted(((cost, name) for name, cost in files.items() if cost > FILE_S), reverse=True)
        write(f"files above {FILE_S:g} s: " + ", ".join(f"{name} {cost:.0f}" for cost, name in large))
        if sum(files.values()) > ALL_S:
            write(f"OVER BUDGET: all tests took {sum(files.values()):.0f} s of processors (limit {ALL_S:g})", red=True)
        for name, cost in self.over().items():
            write(f"OVER BUDGET: {name} took {cost:.1f} s (limit {TEST_S:g}): make it cheaper, or mark it slow", red=True)
