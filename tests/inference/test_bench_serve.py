"""`slipstream bench-serve` against the server over a fake engine, and against servers that misbehave."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from slipstream.launch.bench_serve import LoadRequest, RequestTimes, percentile, trace
from slipstream.launch.cli import build_parser, main
from tests.inference.fake_engine import FakeEngine
from tests.inference.test_server import serving

STREAM = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
DIGITS = "--token-ids=48-58"  # the fake engine's tokens are bytes; no word that it knows is made of these
SMALL = ("--requests=12", "--prompt-tokens=40", "--output-tokens=5", DIGITS)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(FakeEngine(tick=0.002), api_keys=["secret"]) as address:
        yield address


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench-serve", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def asks(*arguments: str) -> list[LoadRequest]:
    return trace(build_parser().parse_args(["bench-serve", *arguments]))


def test_what_is_counted_is_what_was_asked_for(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = bench(capsys, address, "--api-key=secret", "--rate=200", "--first-within=30", "--wait-within=30", *SMALL)
    assert (code, result["requests"], result["failed"]) == (0, 12, {})
    requests = asks("--rate=200", *SMALL)
    assert result["prompt_tokens_per_second"] * result["seconds"] == pytest.approx(sum(len(ask.prompt) for ask in requests))
    assert result["output_tokens_per_second"] * result["seconds"] == pytest.approx(sum(ask.outputs for ask in requests))
    assert result["within_target"] == 12
    assert 0 < result["first_token"]["p50"] <= result["first_token"]["p99"] <= result["whole"]["p99"] <= result["seconds"]


def test_a_target_that_nobody_meets(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, result = bench(capsys, address, "--api-key=secret", "--first-within=1e-9", *SMALL)
    assert result["within_target"] == 0


def test_waiting_for_a_place_counts(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One at a time: the last waits for all others, and its time to the first token says so."""
    _, result = bench(capsys, address, "--api-key=secret", "--concurrency=1", *SMALL)
    assert result["first_token"]["p99"] > 0.6 * result["seconds"]


def test_refusals_are_counted_by_their_reason(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = bench(capsys, address, "--api-key=secret", "--requests=3", "--token-ids=300-400")
    assert (code, result["requests"], sum(result["failed"].values())) == (1, 0, 3)
    assert all("this model's tokens are 0 to 255" in why for why in result["failed"])
    main(["bench-serve", address, "--api-key=secret", "--requests=3", "--token-ids=300-301"])
    assert "3 x POST /v1/completions: 400, the prompt has token 300" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("127.0.0.1:1",), "http://127.0.0.1:1: cannot connect (Connection refused); is the server running?"),
        (("http://[fe80::abcd]",), "http://[fe80::abcd]: cannot connect ("),
        (("ftp://somewhere",), "'ftp://somewhere' is not a server URL"),
        (("--rate=0",), "'0' is not a number above 0"),
        (("--shared=1",), "'1' is not a fraction"),
        (("--token-ids=5",), "'5' is not a range; write 1000-30000"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench-serve", *arguments])
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


def test_a_key_that_is_missing(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-serve", address, *SMALL]) == 2
    assert "401" in capsys.readouterr().err


@contextmanager
def saying(answer: bytes, times: int) -> Iterator[str]:
    """A server that says it to each of so many clients."""

    def reply() -> None:
        for _ in range(times):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 20):  # closed with something unread, it would be a reset connection
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=reply)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_a_server_of_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    with saying(STREAM + b"<html>welcome</html>", times=1) as address:
        assert main(["bench-serve", address]) == 2
    error = f"slipstream bench-serve: http://{address}: /v1/models lists no model; name it with --model\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "incomplete response"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ndata: {}\n", "incomplete response"),
        (STREAM + b"data: [DONE]\n\n", "ended without output"),
        (b"HTTP/1.1 503 Busy\r\nconnection: close\r\n\r\nlater", "503, later"),
        (STREAM + b'data: {"error": {"message": "broke"}}\n\n', "broke"),
        (STREAM + b'data: {"error": "broke"}\n\n', "broke"),
        (STREAM + b"data: [1]\n\n", "invalid completion chunk"),
        (STREAM + b"data: " + b"[" * 100_000 + b"\n\n", "maximum recursion depth exceeded"),
        (STREAM + b'data: {"usage": {"prompt_tokens": 1}}\n\n', "invalid completion chunk: KeyError"),
        (STREAM + b'data: {"choices": [1], "usage": {"prompt_tokens": 1, "completion_tokens": 9999}}\n\n', "requested length"),
    ],
)
def test_servers_that_break_off(answer: bytes, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with saying(answer, times=2) as address:
        code, result = bench(capsys, address, "--model=m", "--requests=2")
    assert code == 1
    assert sum(result["failed"].values()) == 2
    assert all(why in one for one in result["failed"])


def test_a_server_that_never_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _, result = bench(capsys, f"127.0.0.1:{listener.getsockname()[1]}", "--model=m", "--requests=2", "--timeout=0.1")
    assert result["failed"] == {"timed out (--timeout)": 2}


def test_a_timeout_is_of_the_whole_request(capsys: pytest.CaptureFixture[str]) -> None:
    def stall() -> None:
        connection, _ = listener.accept()
        with connection:
            time.sleep(0.8)
            connection.sendall(STREAM + b'data: {"choices": [1]}\n\n')
            while connection.recv(1 << 20):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=stall)
        thread.start()
        start = time.monotonic()
        _, result = bench(capsys, f"127.0.0.1:{listener.getsockname()[1]}", "--model=m", "--requests=1", "--timeout=1")
        assert time.monotonic() - start < 1.6
        thread.join()
    assert result["failed"] == {"timed out (--timeout)": 1}


def test_certificates_are_loaded_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[ssl.SSLContext] = []
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda context, *_: loads.append(context))
    _, result = bench(capsys, "https://127.0.0.1:1", "--model=m", "--requests=2")
    assert (sum(result["failed"].values()), len(loads)) == (2, 1)


def test_ctrl_c_shows_what_there_is() -> None:
    """The fake engine has the time that it needs for a few of a thousand."""
    with serving(FakeEngine(tick=0.002)) as address:
        command = [sys.executable, "-um", "slipstream.launch.cli", "bench-serve", address, "--requests=999", "--rate=9", *SMALL[1:]]
        # A shell's background jobs ignore SIGINT, and hand that down.
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler), **pipes)
        assert process.stderr is not None
        assert process.stderr.readline().startswith("999 requests, 9 per second, to fake/model")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out.startswith("requests ")
    assert " 0 answered" not in out
    assert error == ""


def test_traces() -> None:
    one, faster = asks("--rate=10", "--shared=0.5"), asks("--rate=20", "--shared=0.5")
    assert [ask.at / 2 for ask in one] == [ask.at for ask in faster]
    assert [(len(ask.prompt), ask.outputs) for ask in one] == [(len(ask.prompt), ask.outputs) for ask in faster]
    assert len({tuple(ask.prompt[:130]) for ask in one}) == 1
    assert one[0].prompt != faster[0].prompt  # new tokens: no cache knows them
    many = asks("--requests=2000", "--rate=10")
    assert many[-1].at == pytest.approx(200, rel=0.1)
    assert sum(len(ask.prompt) for ask in many) / 2000 == pytest.approx(260, rel=0.02)
    assert asks("--requests=3")[-1].at == 0


def test_figures() -> None:
    answer = RequestTimes(at=1.0, times=[1.5, 1.6, 2.0], output_tokens=6)
    assert answer.first == pytest.approx(0.5)
    assert answer.between == pytest.approx(0.1)
    assert answer.longest == pytest.approx(0.4)
    assert [percentile([3, 1, 2, 4], percent) for percent in (1, 50, 75, 100)] == [1, 2, 3, 4]
