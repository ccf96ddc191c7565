"""The leg `fair`: one API key floods the queue while another sends a request a second. The other's time to first token over that of
an idle server, and what the flood loses.

`slipstream serve smollm2` and `slipstream bench-serve` share all cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from benchmarks.serving.load import server
from benchmarks.worker import ROOT

FLOOD = ("--api-key", "flood", "--requests", "200")
OTHER = ("--api-key", "other", "--requests", "20", "--rate", "1", "--seed", "1")


def ask(address: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "slipstream.launch.cli", "bench-serve", f"http://{address}", "--json", *options]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=400).stdout)


def run(options: Options) -> str:
    with server("--api-key", "flood", "--api-key", "other") as (address, _), ThreadPoolExecutor(1) as beside:
        ask(address, *OTHER[:2], "--requests", "4")  # warm
        idle, alone = ask(address, *OTHER), ask(address, *FLOOD)
        flooding = beside.submit(ask, address, *FLOOD)
        other = ask(address, *OTHER)
        flooded = flooding.result()
    rows = [
        [
            name,
            f"{one['first_token']['p50'] * 1e3:.0f}",
            f"{one['first_token']['p95'] * 1e3:.0f}",
            f"{one['output_tokens_per_second']:.0f}",
        ]
        for name, one in (("one a second, alone", idle), ("one a second, beside the flood", other), ("the flood, alone", alone))
    ]
    total = [one["output_tokens_per_second"] * one["seconds"] for one in (flooded, other)]
    kept = sum(total) / max(flooded["seconds"], other["seconds"]) / alone["output_tokens_per_second"]
    waits = other["first_token"]["p95"] / idle["first_token"]["p95"]
    return "\n\n".join(
        (
            "SmolLM2-135M-Instruct; a flood of requests at once by one key, one a second by another.",
            table(["requests", "first token, P50 ms", "P95 ms", "output tokens per second"], rows),
            verdicts(
                [
                    verdict("P95 of the first token beside the flood, over alone", waits, 2.0),
                    verdict("of the flood's rate", kept, 0.9, at_least=True),
                ]
            ),
        )
    )
