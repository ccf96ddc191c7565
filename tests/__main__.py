"""`python -m tests [--all] [pytest's arguments]`: run the suite in parallel lanes, then the tests that must run alone.

Tests marked `alone` depend on clocks or on all processes of the machine: they run afterwards, in one lane. `--all` also runs the
tests marked `slow`, full products instead of pairs (tests/cases.py), and a random seed.
"""

import os
import subprocess
import sys
import time

NO_TESTS = 5  # pytest's exit code if no test was selected
LANES = (os.cpu_count() or 1) + 1  # a distributed test waits for its slowest rank: one more lane than processors keeps them busy


def main(arguments: list[str]) -> int:
    everything = "--all" in arguments
    arguments = [argument for argument in arguments if argument != "--all"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"SLIPSTREAM_TESTS": "all"} if everything else {})
    speed = "" if everything else " and not slow"
    codes = []
    for mark, lanes in ((f"not alone{speed}", ["-n", str(LANES), "--dist", "loadfile"]), (f"alone{speed}", [])):
        began, before = time.monotonic(), os.times()
        command = [sys.executable, "-m", "pytest", "-m", mark, *lanes, *arguments]
        codes.append(subprocess.run(command, env=environment).returncode)
        after, seconds = os.times(), time.monotonic() - began
        busy = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"{mark}: {seconds:.0f} s, {busy:.0f} s of processors, {busy / seconds / (os.cpu_count() or 1):.0%} busy", flush=True)
        if codes[-1] not in (0, NO_TESTS):
            return codes[-1]
    return NO_TESTS if set(codes) == {NO_TESTS} else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
