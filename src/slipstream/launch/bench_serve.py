"""`slipstream bench-serve`: a load generator for servers of OpenAI's completions API, with latencies as clients see them.

Requests arrive as a Poisson process, whether the server keeps up or not, and all latencies count from the arrival (open loop): a
server that stalls does not slow down the load. Prompts are random token ids, so that no prefix cache has them, and outputs have
exactly the requested length.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

__all__ = ["execute"]

_PERCENTILES = (50, 95, 99)


class ServerError(RuntimeError):
    """The server rejected a request or sent an invalid response."""


class LoadRequest(NamedTuple):
    at: float  # seconds after the start
    prompt: list[int]
    outputs: int


@dataclass(slots=True)
class RequestTimes:
    """The measurements of one request. Times are seconds after the start of the run."""

    at: float  # arrival
    times: list[float] = field(default_factory=list)  # of each part of the response
    end: float = math.nan
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def first(self) -> float:
        return self.times[0] - self.at

    @property
    def between(self) -> float:
        """Mean time between tokens."""
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan

    @property
    def longest(self) -> float:
        """The longest time between two parts of the response."""
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)


_LATENCIES: dict[str, tuple[str, Callable[[RequestTimes], float]]] = {  # key in the JSON object -> (label in the table, value)
    "first_token": ("time to first token", attrgetter("first")),
    "between_tokens": ("time between tokens", attrgetter("between")),
    "longest_wait": ("longest wait", attrgetter("longest")),
    "whole": ("whole request", lambda answer: answer.end - answer.at),
}


class Client:
    """A client of the server under test; opens one HTTP connection per request."""

    def __init__(self, url: str, key: str | None, timeout: float, more: Mapping[str, Any] | None = None) -> None:
        """`more`: additional fields of each request."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a server URL; write http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        secure: dict[str, Any] = {"context": ssl.create_default_context()} if parts.scheme == "https" else {}
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._open = partial(kind, parts.hostname, parts.port or kind.default_port, timeout=timeout, **secure)
        self._timeout, self._more = timeout, more or {}
        self._headers = {"connection": "close", "content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"

    def model(self) -> str:
        """The first model in /v1/models."""
        answer = b"".join(self._send("GET", "/v1/models", None))
        try:
            return str(json.loads(answer)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError("/v1/models lists no model; name it with --model") from None

    def complete(self, model: str, request: LoadRequest, answer: RequestTimes, start: float) -> None:
        """Stream one completion and record the times of its parts in `answer`. Raises ServerError for an invalid response."""
        body = {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.outputs,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._more,
        }
        try:
            for event in _events(self._send("POST", "/v1/completions", json.dumps(body).encode())):
                if error := event.get("error"):
                    raise ServerError(str(error.get("message", error) if isinstance(error, dict) else error))
                if event.get("choices"):
                    answer.times.append(time.perf_counter() - start)
                if usage := event.get("usage"):
                    answer.prompt_tokens, answer.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        except (LookupError, TypeError, AttributeError) as error:
            raise ServerError(f"invalid completion chunk: {type(error).__name__}: {error}") from error
        finally:
            answer.end = time.perf_counter() - start
        if not answer.times or not answer.output_tokens:
            raise ServerError("the stream ended without output or without usage")
        if answer.output_tokens != request.outputs:
            raise ServerError("an output does not have the requested length: the server ignores ignore_eos or max_tokens")

    def _send(self, method: str, path: str, body: bytes | None) -> Iterator[bytes]:
        """Send a request; yields the parts of the body as they arrive. Raises ServerError if the status is not 200."""
        until = time.monotonic() + self._timeout
        with closing(self._open()) as connection:
            try:
                connection.connect()
                wire = connection.sock
            except (ssl.SSLError, TimeoutError):
                raise
            except OSError as error:
                raise ServerError(f"cannot connect ({error.strerror or error}); is the server running?") from error
            try:
                _limit(wire, until)
                connection.request(method, self._path + path, body, self._headers)
                _limit(wire, until)
                response = connection.getresponse()
                _limit(wire, until)
                if response.status != 200:
                    raise ServerError(f"{method} {path}: {_reason(response.status, response.read())}")
                while part := response.read1(1 << 16):
                    yield part
                    if not response.isclosed():
                        _limit(wire, until)
            except (http.client.HTTPException, ConnectionError) as error:
                raise ServerError(f"incomplete response: {error}") from error
            if response.length:
                raise ServerError(f"incomplete response: {response.length} bytes are missing")


def _limit(wire: socket.socket, until: float) -> None:
    """Limit the next read or write to the time that is left. Raises TimeoutError if there is none."""
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    wire.settimeout(left)


def _events(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Parse server-sent events, without the final [DONE]."""
    partial = b""
    for chunk in chunks:
        *lines, partial = (partial + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)


def _reason(status: int, body: bytes) -> str:
    with suppress(ValueError, LookupError, TypeError):
        return f"{status}, {json.loads(body)['error']['message']}"
    return f"{status}, {body[:200].decode(errors='replace')}"


def trace(options: argparse.Namespace) -> list[LoadRequest]:
    """The requests of a run. A seed fixes the sizes, and the arrival times up to the rate; token ids always differ."""
    sizes, tokens, ids = random.Random(options.seed), random.Random(), options.token_ids
    common = tokens.choices(ids, k=round(options.shared * options.prompt_tokens))
    requests, at = [], 0.0
    for _ in range(options.requests):
        at += sizes.expovariate(1.0)
        length, outputs = (
            max(1, round(sizes.gauss(mean, options.spread * mean))) for mean in (options.prompt_tokens, options.output_tokens)
        )
        own = tokens.choices(ids, k=max(1, length - len(common)))
        requests.append(LoadRequest(at / options.rate, common + own, outputs))
    return requests


def _run(
    server: Client,
    model: str,
    requests: Sequence[LoadRequest],
    concurrency: int,
    done: list[RequestTimes],
    failed: list[tuple[RequestTimes, str]],
) -> None:
    start = time.perf_counter()
    slots = threading.Semaphore(concurrency)

    def send(request: LoadRequest) -> None:
        answer = RequestTimes(request.at)
        try:
            server.complete(model, request, answer, start)
        except TimeoutError:
            failed.append((answer, "timed out (--timeout)"))
        except Exception as error:  # any: a thread that raised would be a request that counts nowhere
            failed.append((answer, str(error) or type(error).__name__))
        else:
            done.append(answer)
        finally:
            slots.release()

    threads = []
    for request in requests:
        time.sleep(max(0.0, request.at - (time.perf_counter() - start)))
        slots.acquire()
        threads.append(threading.Thread(target=send, args=(request,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def summary(
    answers: Sequence[RequestTimes], failed: Sequence[tuple[RequestTimes, str]], options: argparse.Namespace
) -> dict[str, Any]:
    """The object that `--json` prints. Times are in seconds. Rates are per second, over the time from the first arrival to the last
    end, including failed requests."""
    results: dict[str, Any] = {"requests": len(answers), "failed": dict(Counter(reason for _, reason in failed))}
    if not answers:
        return results
    sent = [*answers, *(answer for answer, _ in failed)]
    seconds = max(answer.end for answer in sent) - min(answer.at for answer in sent)
    tokens = {name: sum(getattr(answer, name) for answer in answers) for name in ("prompt_tokens", "output_tokens")}
    results |= {"seconds": seconds, "requests_per_second": len(answers) / seconds}
    results |= {f"{name}_per_second": total / seconds for name, total in tokens.items()}
    for name, (_, latency) in _LATENCIES.items():
        results |= _distribution(name, [latency(answer) for answer in answers])
    if options.first_within is not None or options.wait_within is not None:
        first, wait = options.first_within or math.inf, options.wait_within or math.inf
        good = sum(answer.first <= first and answer.longest <= wait for answer in answers)
        results |= {"within_target": good, "within_target_per_second": good / seconds}
    return results


def _distribution(name: str, latencies: Sequence[float]) -> dict[str, dict[str, float]]:
    values = [value for value in latencies if not math.isnan(value)]  # `between` is NaN for one token
    if not values:
        return {}
    return {name: {"mean": sum(values) / len(values)} | {f"p{p}": percentile(values, p) for p in _PERCENTILES}}


def show(results: dict[str, Any]) -> None:
    failed = sum(results["failed"].values())
    print(f"requests      {results['requests']} answered, {failed} failed")
    for reason, number in results["failed"].items():
        print(f"              {number} x {reason}")
    if not results["requests"]:
        return
    print(
        f"per second    {results['requests_per_second']:.2f} requests, {results['prompt_tokens_per_second']:,.0f} prompt tokens, "
        f"{results['output_tokens_per_second']:,.0f} output tokens; {results['seconds']:.1f} s in total"
    )
    columns = ("mean", *(f"p{p}" for p in _PERCENTILES))
    print(f"{'milliseconds':<22}" + "".join(f"{column:>9}" for column in columns))
    for name, (label, _) in _LATENCIES.items():
        if name in results:
            print(f"{label:<22}" + "".join(f"{results[name][column] * 1000:>9,.1f}" for column in columns))
    if "within_target" in results:
        rate = results["within_target_per_second"]
        print(f"within target {results['within_target']} of {results['requests'] + failed}, {rate:.2f} per second")


def execute(options: argparse.Namespace) -> int:
    """Run the benchmark. Returns 0, 1 if requests failed, or 130 after Ctrl-C, which still prints the results so far."""
    targets = {name: getattr(options, name) for name in ("first_within", "wait_within")} if options.send_targets else {}
    server, requests = Client(options.url, options.api_key, options.timeout, targets), trace(options)
    done: list[RequestTimes] = []
    failed: list[tuple[RequestTimes, str]] = []
    interrupted = False
    try:
        model = options.model or server.model()
        pace = "all at once" if math.isinf(options.rate) else f"{options.rate:g} per second"
        shared = f", {options.shared:.0%} of the mean prompt shared" if options.shared else ""
        print(
            f"{len(requests)} requests, {pace}, to {model} at {server.url}: prompts of {options.prompt_tokens} tokens, outputs of "
            f"{options.output_tokens}, both +- {options.spread:.0%}{shared}",
            file=sys.stderr,
        )
        _run(server, model, requests, options.concurrency or len(requests), done, failed)
    except KeyboardInterrupt:
        interrupted = True
    except (OSError, RuntimeError) as error:  # also that no more threads can start
        raise ValueError(f"{server.url}: {error or type(error).__name__}") from error
    results = summary(list(done), list(failed), options)  # after Ctrl-C, threads go on adding to both
    if options.json:
        print(json.dumps(results))
    else:
        show(results)
    return 130 if interrupted else 1 if failed or not done else 0
