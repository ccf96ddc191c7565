"""`python -m tests [--all] [pytest's arguments]`: run the suite in parallel lanes, then the tests that must run alone.

Tests marked `alone` depend on clocks or on all processes of the machine: they run afterwards, in one lane. `--all` also runs the
tests marked `slow`, full products instead of pairs (tests/cases.py), and a random seed.

At most five tests that failed run once more, in one lane: on a loaded machine a test of deadlines may miss its own. Those that
pass then are named as flaky, and the run passes.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.rewriting import compile_all

FAILED, NO_TESTS = 1, 5  # pytest's exit codes if a test failed, and if no test was selected
AGAIN = 5  # more failures than these are no matter of chance
FAILURES = Path(".pytest_cache/v/cache/lastfailed")
LANES = (os.cpu_count() or 1) + 1  # a distributed test waits for its slowest rank: one more lane than processors keeps them busy


def again(mark: str, environment: dict[str, str]) -> int:
    """The exit code of the failed tests alone, after a failed run."""
    tests = list(json.loads(FAILURES.read_text())) if FAILURES.exists() else []
    if not 0 < len(tests) <= AGAIN:  # 0: no test failed, but a skip or the budget did
        return FAILED
    code = subprocess.run([sys.executable, "-m", "pytest", "-m", mark, *tests], env=environment).returncode
    if code == 0:
        print("FLAKY, failed and passed alone: " + " ".join(tests), flush=True)
    return code


def main(arguments: list[str]) -> int:
    everything = "--all" in arguments
    arguments = [argument for argument in arguments if argument != "--all"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"SLIPSTREAM_TESTS": "all"} if everything else {})
    compile_all(Path(__file__).parent)
    speed = "" if everything else " and not slow"
    codes = []
    if not {"--lf", "--last-failed"} & set(arguments):
        FAILURES.unlink(missing_ok=True)  # it also holds the failures of tests that later runs left out
    for mark, lanes in ((f"not alone{speed}", ["-n", str(LANES), "--dist", "loadfile"]), (f"alone{speed}", [])):
        began, before = time.monotonic(), os.times()
        command = [sys.executable, "-m", "pytest", "-m", mark, *lanes, *arguments]
        code = subprocess.run(command, env=environment).returncode
        codes.append(again(mark, environment) if code == FAILED else code)
        after, seconds = os.times(), time.monotonic() - began
        busy = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"{mark}: {seconds:.0f} s, {busy:.0f} s of processors, {busy / seconds / (os.cpu_count() or 1):.0%} busy", flush=True)
        if codes[-1] not in (0, NO_TESTS):
            return codes[-1]
    return NO_TESTS if set(codes) == {NO_TESTS} else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
