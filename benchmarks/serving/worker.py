"""A contender in its process: `python -m benchmarks.serving.worker '{"kind": ..., "models": ..., ...}'`.

Lines of JSON. It says {"facts": ..., "loaded": s, "first_token": s} when it has answered a first request (seconds since
`spawned`, by the monotonic clock), then answers each line {"trace": [...]} with an outcome. {"error": ...} is its last word.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.serving.traces import Ask, Feed, Outcome


def main() -> None:
    # Libraries print: what they write to stdout goes where stderr goes, and the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**words: Any) -> None:
        answers.write(json.dumps(words) + "\n")

    options = json.loads(sys.argv[1])
    kind, models, spawned = options.pop("kind"), Path(options.pop("models")), options.pop("spawned")
    try:
        from benchmarks.serving.systems import SYSTEMS

        system = SYSTEMS[kind](models, **options)
        loaded = time.monotonic() - spawned
        system.run(Feed([Ask(prompt=tuple(range(1000, 1008)), outputs=1)]))
        say(facts=system.facts, loaded=loaded, first_token=time.monotonic() - spawned)
        for line in sys.stdin:
            trace = [Ask(**{**ask, "prompt": tuple(ask["prompt"])}) for ask in json.loads(line)["trace"]]
            cpu = time.process_time()
            feed = Feed(trace)
            system.run(feed)
            say(**dataclasses.asdict(Outcome.of(feed, time.process_time() - cpu)))
    except Exception as error:
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {str(error).strip() or 'no message'}")
        answers.flush()
        os._exit(1)  # whatever threads there are


if __name__ == "__main__":
    main()
