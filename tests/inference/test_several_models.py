"""Several models behind one address: who is loaded, who waits, who goes, and what becomes of those that fail."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import transformers

from slipstream.inference.server import HostedModel, Models, Router
from slipstream.inference.server import models as loading
from slipstream.inference.server.sources import Connected
from slipstream.launch.cli import build_parser, main
from tests import tiny_chat
from tests.inference.test_adapters import write as write_adapter
from tests.inference.test_embedding import folder_of
from tests.inference.test_replicas import Local, descendants, gone, server
from tests.inference.test_server import COMPLETIONS, Reply, call, serving, until
from tests.unit.test_inference_engine import byte_tokenizer


class Source(Local):
    """Of a model whose forwards wait for `steps`, if it is slow."""

    def __init__(self, name: str, nbytes: int = 100, slow: bool = False) -> None:
        self.steps = threading.Semaphore(0)
        super().__init__(name, (lambda batch: self.steps.acquire(timeout=30)) if slow else (lambda batch: None), model_name=name)
        self.nbytes, self.error = nbytes, ""

    def open(self) -> Connected:
        if self.error:
            self.opens += 1
            raise ValueError(self.error)
        link, facts = super().open()
        return Connected(link, {**facts, "nbytes": self.nbytes})


@contextmanager
def served(
    *sources: Source | list[Source], max_loaded: int | None = None, max_bytes: int | None = None, **options: Any
) -> Iterator[str]:
    """A list: a model with several engines."""
    each = [source if isinstance(source, list) else [source] for source in sources]
    hosted = [
        HostedModel(name=own[0].name, adapters=(), make=lambda own=own: Router(own, byte_tokenizer()), nbytes=10) for own in each
    ]
    with closing(Models(hosted, max_loaded=max_loaded, max_bytes=max_bytes)) as models, serving(models, **options) as address:  # type: ignore[arg-type]
        yield address


def ask(address: str, model: str | None, **fields: Any) -> Reply:
    body = {"model": model, "prompt": "some text", "max_tokens": 3, "ignore_eos": True, **fields}
    return call(address, "POST", COMPLETIONS, json.dumps(body))


def states(address: str) -> dict[str, str]:
    return json.loads(call(address, "GET", "/health").body)["models"]


def listed(address: str) -> dict[str, Any]:
    return {one["id"]: one for one in json.loads(call(address, "GET", "/v1/models").body)["data"]}


def until_waiting(address: str, model: str, num: int) -> None:
    line = f'slipstream_model_requests_waiting{{model="{model}"}} {num}\n'.encode()
    until(lambda: line in call(address, "GET", "/metrics").body)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


def test_a_model_is_loaded_once_at_its_first_request(pool: ThreadPoolExecutor) -> None:
    a, b = Source("a"), Source("b")
    a.allowed.clear()
    with served(a, b) as address:
        assert states(address) == {"a": "unloaded", "b": "unloaded"} and not a.opens
        assert "max_model_len" not in listed(address)["a"]
        replies = [pool.submit(ask, address, "a") for _ in range(4)]
        until_waiting(address, "a", 4)
        assert states(address) == {"a": "loading", "b": "unloaded"}
        assert ask(address, "b").status == 200, "it does not wait for the other"
        body = json.dumps({"model": "b", "prompt": "some text"}).encode()
        assert call(address, "POST", COMPLETIONS, b"\xef\xbb\xbf" + body).status == 200, "as PowerShell writes UTF-8"
        a.allowed.set()
        assert [reply.result().status for reply in replies] == [200] * 4
        assert (a.opens, b.opens) == (1, 1)
        assert listed(address)["a"]["status"] == {"value": "loaded"} and listed(address)["a"]["max_model_len"] > 0
        assert listed(address)["a"]["root"] == "a"
        assert json.loads(call(address, "GET", "/v1/models/b").body)["id"] == "b"
        tokens = {name: {"model": name, "prompt": "text"} for name in ("a", "b", "c")}
        found = [call(address, "POST", "/tokenize", json.dumps(body)) for body in tokens.values()]
        assert [reply.status for reply in found] == [200, 200, 404]
        assert found[2].error["message"] == "the model 'c' does not exist; this server serves 'a', 'b'"
        assert call(address, "POST", "/tokenize", '{"prompt": "text"}').error["param"] == "model"
        assert ask(address, None).error["message"].startswith("model is missing: this server has several")
        assert call(address, "POST", "/v1/load_lora_adapter", '{"lora_name": "x", "lora_path": "x"}').status == 403
        assert call(address, "POST", COMPLETIONS, "{").error["code"] == "invalid_json"


def test_the_least_recently_used_goes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sources = [Source(name) for name in "abc"]
    with served(*sources, max_loaded=2) as address:
        for name in "abac":
            assert ask(address, name).status == 200
        assert states(address) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert ask(address, "b").status == 200
        assert states(address) == {"a": "unloaded", "b": "loaded", "c": "loaded"}
        assert [source.opens for source in sources] == [1, 2, 1]
        lines = dict(line.rsplit(" ", 1) for line in call(address, "GET", "/metrics").body.decode().splitlines() if line[0] != "#")
        assert lines['slipstream_generated_tokens_total{model="a"}'] == "6", "figures outlive the engine"
        assert lines['slipstream_generated_tokens_total{model="b"}'] == "6"
        assert lines['slipstream_finished_total{model="b",reason="length"}'] == "2"
        assert lines['slipstream_model_loads_total{model="b"}'] == "2" and lines['slipstream_model_loaded{model="a"}'] == "0"
        assert lines['slipstream_replica_ready{model="b",replica="0"}'] == "1"
    assert "a: unloading, to make room for b" in caplog.text


def test_a_model_that_works_stays_and_keeps_nobody_out(pool: ThreadPoolExecutor) -> None:
    """Requests for it that come later wait behind the one that waits for room."""
    a, b = Source("a", slow=True), Source("b", slow=True)
    ended = list[str]()

    def asked(name: str, **fields: Any) -> Future[Reply]:
        def run() -> Reply:
            reply = ask(address, name, **fields)
            ended.append(f"{name}{fields.get('seed', '')}")
            return reply

        return pool.submit(run)

    with served(a, b, max_loaded=1) as address:
        replies = [asked("a", seed=1, max_tokens=40)]
        a.steps.release(3)
        until(lambda: states(address)["a"] == "loaded")
        replies.append(asked("b"))
        until_waiting(address, "b", 1)
        replies.append(asked("a", seed=2))
        until_waiting(address, "a", 1)
        assert states(address) == {"a": "loaded", "b": "unloaded"}
        a.steps.release(100)
        until(lambda: states(address)["b"] == "loaded")
        assert ended == ["a1"]
        b.steps.release(100)
        assert [reply.result().status for reply in replies] == [200] * 3
        assert ended == ["a1", "b", "a2"] and (a.opens, b.opens) == (2, 1)


def test_another_model_that_becomes_idle_goes_instead(pool: ThreadPoolExecutor) -> None:
    a, b, c = Source("a", slow=True), Source("b", slow=True), Source("c")
    with served(a, b, c, max_loaded=2) as address:
        first = list[Future[Reply]]()
        for source in (a, b):
            first.append(pool.submit(ask, address, source.name, max_tokens=40))
            source.steps.release(2)
            until(lambda: states(address)[source.name] == "loaded")
        waits = pool.submit(ask, address, "c")
        until_waiting(address, "c", 1)
        behind = pool.submit(ask, address, "a")
        until_waiting(address, "a", 1)
        b.steps.release(100)
        assert waits.result().status == 200
        a.steps.release(200)
        assert [one.result().status for one in (*first, behind)] == [200] * 3
        assert (a.opens, b.opens, c.opens) == (1, 1, 1)


def test_memory_is_what_the_processes_say() -> None:
    a, b, big = Source("a", 60), Source("b", 60), Source("big", 101)
    with served(a, b, big, max_bytes=100) as address:
        assert [ask(address, name).status for name in "ab"] == [200, 200]
        until(lambda: states(address)["a"] == "unloaded")  # b took more than was thought
        error = ask(address, "big").error
        assert "it takes 0 MiB, and --max-loaded-bytes allows 0 MiB" in error["message"]
        assert ask(address, "big").status == 503 and big.opens == 1, "it is not tried again"
        assert ask(address, "a").status == 200


def test_a_model_with_several_engines(pool: ThreadPoolExecutor) -> None:
    """Both work, both take memory, one that ends is waited for by none, and both go when another model needs the room."""
    pair, b = [Source("a", 60, slow=True), Source("a", 60)], Source("b", 60)
    with served(pair, b, max_bytes=150) as address:
        replies = [pool.submit(ask, address, "a", prompt=f"text {number}", max_tokens=40) for number in range(4)]
        pair[0].steps.release(2)
        until(lambda: states(address)["a"] == "loaded")
        pair[1].allowed.clear()
        until(lambda: sum(reply.done() for reply in replies) == 2)
        call(address, "GET", "/metrics")  # what an engine has counted is known as it was last asked
        pair[1].cut()
        until(lambda: pair[1].opens == 2)
        pair[0].steps.release(10_000)
        assert [reply.result().status for reply in replies] == [200] * 4
        assert ask(address, "a").status == 200
        lines = call(address, "GET", "/metrics").body.decode()
        assert 'slipstream_model_bytes{model="a"} 120\n' in lines
        assert [f'replica_ready{{model="a",replica="{index}"}} {1 - index}\n' in lines for index in range(2)] == [True, True]
        pair[1].allowed.set()
        assert ask(address, "b").status == 200
        until(lambda: states(address) == {"a": "unloaded", "b": "loaded"})
        lines = call(address, "GET", "/metrics").body.decode()
        assert f'slipstream_generated_tokens_total{{model="a"}} {4 * 40 + 3}\n' in lines


def test_a_load_that_fails_is_its_own_matter(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = (Source(name) for name in "abc")
    b.error = "max_context is 5000, but the model has only 512 positions; lower it"
    with served(a, b, c) as address:
        assert ask(address, "a").status == 200
        replies = [pool.submit(ask, address, "b") for _ in range(2)]
        for reply in (*(one.result() for one in replies), ask(address, "b")):
            assert (reply.status, reply.headers["retry-after"], reply.error["code"]) == (503, "30", "model_load_failed")
            assert reply.error["message"] == f"the model 'b' cannot be loaded: {b.error}"
        assert b.opens == 1, "those that come soon after get the same answer"
        until(lambda: listed(address)["b"]["status"] == {"value": "unloaded", "error": b.error})
        assert json.loads(call(address, "GET", "/health").body)["status"] == "ok" and ask(address, "a").status == 200
        monkeypatch.setattr(loading, "RETRY", 0.0)
        c.error = "no memory"
        assert ask(address, "c").status == 503
        c.error = ""
        assert ask(address, "c").status == 200
        assert listed(address)["c"]["status"] == {"value": "loaded"}


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's script needs node")
def test_several_models_are_one_in_the_panel_of_the_page(pool: ThreadPoolExecutor) -> None:
    """Counts are added, the fraction of the KV cache that is used is not."""
    a, b = Source("a", slow=True), Source("b", slow=True)
    with served(a, b) as address:
        script = re.search(r"function parse\(text\) \{.*?\n\}", call(address, "GET", "/").body.decode(), re.DOTALL)
        assert script is not None

        def parsed() -> dict[str, float]:
            code = f"{script[0]}; console.log(JSON.stringify(parse(require('fs').readFileSync(0, 'utf8'))))"
            metrics = call(address, "GET", "/metrics").body
            return json.loads(subprocess.run(["node", "-e", code], input=metrics, capture_output=True, check=True).stdout)

        replies = [pool.submit(ask, address, name, prompt="x" * 150, max_tokens=40) for name in "ab"]
        for source in (a, b):
            source.steps.release(11)
        until(lambda: states(address) == {"a": "loaded", "b": "loaded"} and parsed()["slipstream_requests_running"] == 2)
        until(lambda: parsed()["slipstream_kv_usage_ratio"] > 0.5)
        assert parsed()["slipstream_kv_usage_ratio"] <= 1
        for source in (a, b):
            source.steps.release(1000)
        assert [reply.result().status for reply in replies] == [200, 200]


def test_a_killed_engine_is_waited_for(pool: ThreadPoolExecutor) -> None:
    a = Source("a")
    with served(a) as address:
        assert ask(address, "a").status == 200
        a.allowed.clear()
        a.cut()
        until(lambda: a.opens == 2)
        reply = pool.submit(ask, address, "a")
        until_waiting(address, "a", 1)
        a.allowed.set()
        assert reply.result().status == 200


def test_who_waits_has_the_time_limit_and_may_leave(pool: ThreadPoolExecutor) -> None:
    a, b = Source("a", slow=True), Source("b")
    with served(a, b, max_loaded=1, request_timeout_s=1.0) as address:
        first = pool.submit(ask, address, "a", max_tokens=40)
        a.steps.release(1)
        until(lambda: states(address)["a"] == "loaded")
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as client:
            body = b'{"model": "b", "prompt": "x"}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until_waiting(address, "b", 1)
        until_waiting(address, "b", 0)
        late = ask(address, "b")
        assert late.status == 504
        assert late.error["message"] == "the model 'b' was not loaded within 1 s" or a.opens == 1
        a.steps.release(100)
        assert first.result().status in (200, 504) and b.opens <= 1


def test_the_server_ends_while_a_model_loads(pool: ThreadPoolExecutor) -> None:
    a = Source("a")
    a.allowed.clear()
    with served(a) as address:
        reply = pool.submit(ask, address, "a")
        until_waiting(address, "a", 1)
    assert reply.exception() is not None or reply.result().status >= 500


def test_what_the_command_line_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "tokenizer.json").touch()
    own = "--dtype int8 --lora-modules s=t --replicas 2 --engines h:1,[::1]:2"
    words = ["serve", str(tmp_path / "a b"), f"x='{tmp_path}/a b' {own}", "smollm2", "--max-loaded", "2"]
    plain, named, known = build_parser().parse_args(words).models
    assert (plain.name, plain.model, plain.dtype) == (None, str(tmp_path / "a b"), None)
    assert (named.name, named.model, named.dtype, named.lora_modules) == ("x", str(tmp_path / "a b"), "int8", [("s", "t")])
    assert (named.replicas, named.engines, plain.replicas, plain.engines) == (2, ["h:1", "[::1]:2"], None, None)
    assert (known.name, known.model) == (None, "smollm2")
    folder = str(tmp_path / "a b")
    for models, options, message in (
        ([folder, folder], "", "two models or adapters have the name 'a b'; give one another name: NAME=MODEL"),
        ([folder, f"x='{folder}' --hosts y"], "", "unknown option --hosts; see slipstream serve"),
        ([folder, "y=nowhere"], "", "nowhere is not a path"),
        ([folder, "'"], "", "No closing quotation"),
        (
            [folder, f"x='{folder}' --tp 2"],
            "",
            "x: --tp cuts the one model of a server over processes; leave it out, or serve x alone",
        ),
        ([folder], "--max-loaded 1 --weights-socket s", "--weights-socket is of one model, and here models are loaded on demand"),
        (
            [folder],
            "--max-loaded 1 --model-name s",
            "--model-name is of one model, and here models are loaded on demand; write NAME=",
        ),
        ([f"y='{folder}'"], "--model-name z", "--model-name z and y= both name the model; leave one of them out"),
        ([folder], "--max-loaded-bytes 1G --lora-modules s=t", "write them into the quotes of the model that they are of"),
    ):
        with pytest.raises(SystemExit) as ended:
            sys.exit(main(["serve", *models, "--port", "0", *options.split()]))
        assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_real_processes(tmp_path: Path) -> None:
    """Two models with room for one: chats, tokens and vectors are routed, memory returns, kill -9 is mended, Ctrl-C ends all."""
    folder = tiny_chat.write(tmp_path / "small")
    other = shutil.copytree(folder, tmp_path / "other")
    modules = [f"model.layers.{index}.self_attn.q_proj" for index in range(2)]
    write_adapter(tmp_path / "red", transformers.AutoModelForCausalLM.from_pretrained(folder), modules)
    encoder = folder_of(tmp_path / "vectors")
    options = ("--threads", "1", "--max-loaded", "1", "--access-log")
    with_red = f"other={other} --replicas 2 --max-context 64 --lora-modules red={tmp_path / 'red'}"
    with server(folder, with_red, str(encoder), *options) as (process, address):
        assert states(address) == {"small": "unloaded", "other": "unloaded", "vectors": "unloaded"}
        assert listed(address)["red"]["parent"] == "other"

        def engines() -> list[int]:
            return descendants(process.pid)

        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        for name, context in (("small", 512), ("other", 64), ("red", 64), ("small", 512)):
            assert call(address, "POST", "/v1/chat/completions", json.dumps({"model": name, **chat})).status == 200
            until(lambda: len(engines()) == (3 if context == 512 else 4))  # with the zygote and the spare
            assert listed(address)[name]["max_model_len"] == context
        loaded = max(engines(), key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))
        body = {"model": "vectors", "input": [5, 6, 7]}
        vectors = json.loads(call(address, "POST", "/v1/embeddings", json.dumps(body)).body)
        assert len(vectors["data"][0]["embedding"]) == 64
        assert ask(address, "vectors").status == 400 and gone(loaded)
        until(lambda: len(engines()) == 3)
        for pid in engines():
            os.kill(pid, signal.SIGKILL)
        until(lambda: call(address, "POST", "/v1/embeddings", json.dumps(body)).status == 200)
        last = engines()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        until(lambda: all(map(gone, last)))
        assert process.stderr is not None
        log = process.stderr.read()
        assert "other: unloading, to make room for small" in log and "200 " in log and "key - model other" in log
