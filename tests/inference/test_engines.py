"""Engines on other hosts: who is let in, who is refused, what becomes of requests when one is lost, and how it is taken back."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from slipstream.inference import Listener, tls, wire
from slipstream.inference.core import Finish
from slipstream.inference.embedding import EmbeddingEngine, Pooling
from slipstream.inference.engine import Engine
from slipstream.inference.handshake import GREETING, SIZE
from slipstream.inference.replica import facts_of
from slipstream.inference.server import EngineAddress, Router
from slipstream.inference.source import weights_digest
from slipstream.launch.cli import main
from tests import tiny_chat
from tests.inference.test_embedding import Rows
from tests.inference.test_replicas import LONG, SAMPLED, Local, server, submit
from tests.inference.test_server import CERTIFICATE, COMPLETIONS, RENEWED, call, serving, until
from tests.unit.test_inference_engine import HashRunner, byte_tokenizer, running, wait

SECRET = b"of all of them, and nobody else"


class Host:
    """An engine that listens in this process, at the same port each time. `steps`: as many forwards as it may compute."""

    def __init__(self, slow: bool = False, tls: tls.Certificate | None = None, **options: Any) -> None:
        self.tls = tls
        self.options = {"token_budget": 16, "max_running": 16, **options}
        self.steps = threading.Semaphore(0)
        self.slow = slow
        self.port = 0
        self.start()

    def start(self, **facts: Any) -> None:
        self.listening = socket.socket()
        self.listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listening.bind(("127.0.0.1", self.port))
        self.port = self.listening.getsockname()[1]
        self.listening.listen()  # before its thread does: the next line of a test may connect
        runner = HashRunner()
        if self.slow:
            runner.before = lambda batch: self.steps.acquire(timeout=30)  # type: ignore[assignment, return-value]
        self.engine = Engine(runner, byte_tokenizer(), **self.options)
        self.engine.start()
        self.listener = Listener(self.engine, {**facts_of(self.engine, "hashes"), **facts}, SECRET, self.tls)
        self.thread = threading.Thread(target=self.listener.run, args=([self.listening], 30.0))
        self.thread.start()

    def end(self) -> None:
        self.steps.release(1000)
        self.listener.stop()
        self.thread.join()
        self.engine.close()

    def address(self, secret: bytes = SECRET, beat: float = wire.BEAT, tls: ssl.SSLContext | None = None) -> EngineAddress:
        return EngineAddress(address=f"127.0.0.1:{self.port}", secret=secret, tls=tls, beat=beat)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """A quick one and a slow one."""
    both = [Host(), Host(slow=True)]
    yield both
    for host in both:
        host.end()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Of 127.0.0.1, signed by itself, and its key."""
    file = tmp_path / "both.pem"
    file.write_text(CERTIFICATE)
    return file


@pytest.fixture
def encrypted(certificate: Path) -> Iterator[Host]:
    host = Host(tls=tls.Certificate(tls.engine_context(certificate, None), certificate, None))

    def listens() -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", host.port)) == 0

    until(listens)
    yield host
    host.end()


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineAddress, "max_pause", 0.05)


@contextmanager
def routed(*sources: Any) -> Iterator[Router]:
    with closing(Router(sources, byte_tokenizer()).open()) as router:
        yield router


def states(router: Router) -> list[str]:
    return [engine.state.value for engine in router.engines]


def test_answers_are_those_of_one_engine(hosts: list[Host]) -> None:
    """Of remote engines and a local one together; /health and /metrics tell them apart."""
    hosts[1].steps.release(10_000)
    prompts = [f"{'shared ' * (number % 3)}number {number}" for number in range(12)]
    with running() as engine, routed(Local("a"), *(host.address() for host in hosts)) as router:
        expected = [wait(submit(engine, prompt, SAMPLED, n=2)) for prompt in prompts]
        found = [submit(router, prompt, SAMPLED, n=2) for prompt in prompts]
        for one, other in zip(expected, map(wait, found), strict=True):
            assert [one.text(index) for index in range(2)] == [other.text(index) for index in range(2)]
            assert one.outputs[0][0].prompt_logprobs == other.outputs[0][0].prompt_logprobs
        assert all(stats and stats.generated_tokens for stats in router.each()), "all have worked"
        assert router.stats().generated_tokens == engine.stats().generated_tokens
        with serving(router) as address:  # type: ignore[arg-type]
            remote = {host.address().address: "ready" for host in hosts}
            health = json.loads(call(address, "GET", "/health").body)
            assert health == {"status": "ok", "replicas": ["ready"], "engines": remote}
            metrics = call(address, "GET", "/metrics").body.decode()
            for name in ("0", *remote):
                assert f'slipstream_replica_ready{{replica="{name}"}} 1\n' in metrics


def test_who_has_another_secret_is_refused(hosts: list[Host], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=rf"engine 127.0.0.1:{hosts[0].port}: the engine has another secret; give both the same"):
        Router([hosts[0].address(b"of somebody else altogether")], byte_tokenizer()).open()
    until(lambda: "a server on 127.0.0.1 has another secret" in caplog.text)
    with socket.create_server(("127.0.0.1", 0)) as impostor:  # it learns nothing that it could use, and gets no prompt

        def answer() -> None:
            connection = impostor.accept()[0]
            with connection:
                connection.sendall(GREETING + bytes(SIZE))
                connection.recv(2 * SIZE, socket.MSG_WAITALL)
                connection.sendall(b"x" * SIZE)
                assert connection.recv(1) == b""

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ValueError, match="the engine has another secret"):
            EngineAddress(address=f"127.0.0.1:{impostor.getsockname()[1]}", secret=SECRET).open()
        thread.join()


def test_an_engine_of_another_model_is_refused(hosts: list[Host], caplog: pytest.LogCaptureFixture) -> None:
    """At the start it ends the server; later it is tried again, and the others go on."""
    hosts[1].end()
    hosts[1].start(dtype="int8")
    with pytest.raises(ValueError, match=r"has dtype '(int8)?', and engine [0-9.:]+ has '(int8)?'; give both the same --dtype"):
        Router([host.address() for host in hosts], byte_tokenizer()).open()
    with pytest.raises(ValueError, match="has model_name 'model', and this server has 'other'; serve the same model"):
        Router([hosts[0].address()], byte_tokenizer(), {"model_name": "other"}).open()
    hosts[1].end()
    with routed(*(host.address() for host in hosts)) as router, serving(router) as address:  # type: ignore[arg-type]
        until(lambda: states(router) == ["ready", "down"])
        metrics = call(address, "GET", "/metrics").body.decode()
        assert f'slipstream_replica_ready{{replica="{hosts[1].address().address}"}} 0\n' in metrics, "it was never there"
        hosts[1].start(version="0.0.1")
        until(lambda: states(router) == ["ready", "refused"])
        assert wait(submit(router, "goes on")).last().finish is not Finish.ERROR
        assert f"has version '0.0.1', and engine 127.0.0.1:{hosts[0].port} has '{wire.VERSION}'; install" in caplog.text
        hosts[1].end()
        hosts[1].start()
        until(lambda: states(router) == ["ready", "ready"])


def test_garbage_harms_nobody(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("127.0.0.1", hosts[0].port)
    with routed(hosts[0].address()) as router, ExitStack() as stack:
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 16), bytes(2 * SIZE), b"\xff\xff\xff\x7f" + b"[" * 100):
            with socket.create_connection(place) as client:
                client.sendall(garbage)
        for _ in range(100):  # that say nothing: no more of them are kept than there is room for
            stack.enter_context(socket.create_connection(place))
        until(lambda: threading.active_count() >= 64)
        assert wait(submit(router, "a request")).last().finish is not Finish.ERROR
        assert sum("_meet" in thread.name for thread in threading.enumerate()) <= 65
        with pytest.raises(OSError, match=f"engine 127.0.0.1:{hosts[0].port}: the other end has closed the connection"):
            hosts[0].address().open()
    until(lambda: hosts[0].listener._proving._value == 64)  # each place is given back
    with routed(hosts[0].address()) as router:
        assert wait(submit(router, "a request")).last().finish is not Finish.ERROR
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="timed out"):
        monkeypatch.setattr("slipstream.inference.handshake.TIME", 0.1)
        EngineAddress(address=f"127.0.0.1:{other.getsockname()[1]}", secret=SECRET).open()


def test_an_engine_that_is_lost(hosts: list[Host]) -> None:
    """A stream that has begun ends with an error, what has not goes to another, and the engine is taken back with its figures."""
    quick, slow = hosts
    with running() as engine:
        expected = wait(submit(engine, "waits")).text()
    with routed(slow.address(), quick.address()) as router:
        until(lambda: states(router) == ["ready", "ready"])  # one is enough for the router to open
        quick.end()
        until(lambda: states(router) == ["ready", "down"])
        begun = submit(router, "begins", LONG)
        slow.steps.release(3)
        assert begun.started.wait(30)
        until(lambda: slow.steps._value == 0)  # no forward is left for the next one
        waiting = submit(router, "waits")
        for session in list(slow.listener._sessions):
            session.link.connection.shutdown(socket.SHUT_RDWR)  # the link only: the engine lives on
        assert wait(begun).last().finish is Finish.ERROR
        assert f"cannot be reached any more (engine 127.0.0.1:{slow.port})" in str(begun.last().error)
        slow.steps.release(10_000)
        assert wait(waiting).text() == expected, "it has waited for an engine"
        until(lambda: slow.engine.stats().running == 0)  # what nobody waits for is cancelled
        assert router.stats().generated_tokens == slow.engine.stats().generated_tokens, "they count once"
        quick.start()
        until(lambda: states(router) == ["ready", "ready"])
        assert [one.starts for one in router.engines] == [2, 2]


def test_a_silent_engine_is_lost(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is dead sends nothing, not even the end of the connection. One that has nothing to say lives."""
    monkeypatch.setattr(wire, "BEAT", 0.2)
    with routed(*(host.address(beat=0.2) for host in hosts)) as router:
        waiting = [submit(router, f"waits {number}") for number in range(4)]
        assert not all(one.over.wait(1.5) for one in waiting), "a forward lasts"
        assert states(router) == ["ready", "ready"] and [one.starts for one in router.engines] == [1, 1]
        for session in list(hosts[1].listener._sessions):
            with session.link._changed:
                session.link._closed = True  # its writer ends, and the connection stays
                session.link._changed.notify()
        until(lambda: router.engines[1].starts == 2)
        hosts[1].steps.release(10_000)
        assert all(wait(one).last().finish is not Finish.ERROR for one in waiting)


def test_an_engine_that_leaves(hosts: list[Host]) -> None:
    """It answers what it has, and what comes later goes to others."""
    quick, slow = hosts
    with routed(slow.address(), quick.address()) as router:
        until(lambda: states(router) == ["ready", "ready"])  # one is enough for the router to open
        begun = submit(router, "begins", LONG)
        slow.steps.release(3)
        assert begun.started.wait(30)
        slow.listener.drain()
        until(lambda: states(router) == ["draining", "ready"])
        assert wait(submit(router, "later")).last().finish is not Finish.ERROR
        slow.steps.release(10_000)
        assert wait(begun).last().finish is not Finish.ERROR
        slow.thread.join(30)
        until(lambda: states(router) == ["down", "ready"])


def test_an_engine_that_leaves_answers_calls() -> None:
    rows, listening = Rows(), socket.create_server(("127.0.0.1", 0))
    engine = EmbeddingEngine(rows, byte_tokenizer(), Pooling(), vocab_size=259, model_name="rows")
    listener = Listener(engine, facts_of(engine, "rows"), SECRET, None)
    thread = threading.Thread(target=listener.run, args=([listening], 30.0))
    thread.start()
    port = listening.getsockname()[1]
    with (
        routed(EngineAddress(address=f"127.0.0.1:{port}", secret=SECRET, tls=None, beat=wire.BEAT)) as router,
        ThreadPoolExecutor(1) as pool,
    ):
        embedded = pool.submit(router.embed, ["x"])
        assert rows.begun.wait(30)
        listener.drain()
        until(lambda: states(router) == ["draining"])
        time.sleep(0.3)  # it looks for the end of its requests every 0.1 s
        rows.go.set()
        assert embedded.result(30).vectors.tolist() == [[float(ord("x"))]]
        thread.join(30)
        assert not thread.is_alive()


class Tap:
    """Hears what passes between a server and an engine."""

    def __init__(self, port: int) -> None:
        self.heard = b""
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self._pass, args=(port,), daemon=True).start()

    def _pass(self, port: int) -> None:
        with self.listening, self.listening.accept()[0] as one, socket.create_connection(("127.0.0.1", port)) as other:
            while True:
                for side in select.select([one, other], [], [])[0]:
                    if not (part := side.recv(1 << 16)):
                        return
                    self.heard += part
                    (other if side is one else one).sendall(part)


@pytest.mark.parametrize("secure", [True, False])
def test_who_listens_between_hosts(hosts: list[Host], encrypted: Host, certificate: Path, secure: bool) -> None:
    """hears prompts and answers only without TLS."""
    tap = Tap((encrypted if secure else hosts[0]).port)
    trusted = tls.server_context(certificate) if secure else None
    with routed(EngineAddress(address=tap.address, secret=SECRET, tls=trusted)) as router:
        wait(submit(router, "nobody else knows"))
    assert (str(list(b"nobody"))[1:-1].replace(" ", "").encode() in tap.heard) is not secure
    assert (b'["output",' in tap.heard) is not secure


def test_answers_over_tls(encrypted: Host, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways at the same time, in messages of many records."""
    monkeypatch.setattr(tls, "FLUSH", 1 << 14)
    prompts = ["p" * (1 + 60 * (number % 3)) + str(number) for number in range(40)]
    with running() as engine, routed(encrypted.address(tls=tls.server_context(certificate))) as router:
        expected = [wait(submit(engine, prompt, SAMPLED)).text() for prompt in prompts]
        found = [submit(router, prompt, SAMPLED) for prompt in prompts]
        assert [wait(one).text() for one in found] == expected
        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(router.engines[0].call, "unload_adapter", str(i) * 300_000) for i in range(8)]
            assert all(isinstance(one.exception(30), ValueError) for one in calls)


def test_an_engines_certificate_is_renewed(encrypted: Host, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that trusts the new one only reaches it, while the one before is still served."""
    monkeypatch.setattr(tls, "LOOK", 0.05)
    with routed(encrypted.address(tls=tls.server_context(certificate))) as before:
        certificate.write_text(RENEWED)
        trusted = tls.server_context(certificate)

        def reached() -> bool:
            try:
                encrypted.address(tls=trusted).open().link.close()
            except ValueError:
                return False
            return True

        until(reached)
        assert wait(submit(before, "a request")).last().finish is not Finish.ERROR


def test_a_file_that_may_be_read_has_changed(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that could not be read may be readable now."""
    monkeypatch.setattr(tls, "LOOK", 0.0)
    looking = tls.Certificate(tls.engine_context(certificate, None), certificate, None)
    time.sleep(0.02)  # a tick of the file system's clock
    certificate.chmod(0o640)
    for _ in range(2):
        looking.look()
    assert "is shown to new connections" in caplog.text


def test_a_connection_keeps_its_descriptor_until_its_reader_ends(encrypted: Host, certificate: Path) -> None:
    link = encrypted.address(tls=tls.server_context(certificate)).open().link
    files = os.listdir("/proc/self/fd")
    link.connection.close()
    assert os.listdir("/proc/self/fd") == files
    link.close()
    until(lambda: len(os.listdir("/proc/self/fd")) == len(files) - 2)  # the engine's end, too


def test_certificates_that_are_not_accepted(hosts: list[Host], encrypted: Host, certificate: Path) -> None:
    trusted = tls.server_context(certificate)
    address = encrypted.address().address
    with pytest.raises(ValueError, match=rf"engine {address}: its certificate is not accepted .--engine-tls-ca.: self.signed"):
        Router([encrypted.address(tls=ssl.create_default_context())], byte_tokenizer()).open()
    other = f"localhost:{encrypted.port}"
    with pytest.raises(ValueError, match=rf"engine {other}: its certificate is not accepted .*'localhost'"):
        EngineAddress(address=other, secret=SECRET, tls=trusted).open()
    with pytest.raises(ValueError, match="the engine has another secret"):
        encrypted.address(b"of somebody else altogether", tls=trusted).open()
    with pytest.raises(OSError, match="start the engine with --tls-cert, or leave --engine-tls-ca out"):
        hosts[0].address(tls=trusted).open()


def test_a_plain_server_is_told_what_an_engine_with_tls_needs(encrypted: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.inference.handshake.TIME", 0.2)
    with pytest.raises(OSError, match=r"it says nothing .timed out.; an engine with --tls-cert needs --engine-tls-ca here"):
        encrypted.address().open()


def test_hostile_handshakes(encrypted: Host, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent, slow, and wrong ones end in time; meanwhile those who are connected are served."""
    monkeypatch.setattr(tls, "TIME", 1.0)
    trusted, place = tls.server_context(certificate), ("127.0.0.1", encrypted.port)
    received, unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        trusted.wrap_bio(received, unsent, server_hostname="127.0.0.1").do_handshake()
    hello = unsent.read()
    with routed(encrypted.address(tls=trusted)) as router, ExitStack() as stack:
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 16), b"\x16\x03\x01\xff\xff" + b"x" * 70_000, hello[:-1]):
            with socket.create_connection(place) as client, suppress(OSError):
                client.sendall(garbage)
        slow = [stack.enter_context(socket.create_connection(place)) for _ in range(80)]
        began = time.monotonic()
        while time.monotonic() < began + 1.5:  # a byte now and then does not prolong it
            for number, client in enumerate(slow[:40]):
                with suppress(OSError):
                    client.sendall(hello[number : number + 1])
            assert wait(submit(router, "a request")).last().finish is not Finish.ERROR
        until(lambda: encrypted.listener._proving._value == 64)
    with routed(encrypted.address(tls=trusted)) as router:
        assert wait(submit(router, "a request")).last().finish is not Finish.ERROR


def test_files_tell_models_apart(tmp_path: Path) -> None:
    one, copy, other = (tmp_path / name for name in ("one", "copy", "other"))
    for folder, value in ((one, 1), (copy, 1), (other, 2)):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"header" + bytes([value]) * 100_000)
    (copy / "README.md").write_text("where it is from")
    digests = [weights_digest(str(path)) for path in (one, copy, other, one / "model.safetensors")]
    assert digests[0] == digests[1] == digests[3] != digests[2]
    (one / "model.safetensors").write_bytes(b"header" + bytes([1]) * 100_001)
    assert weights_digest(str(one)) not in digests


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").touch()
    short = tmp_path / "secret"
    short.write_text("short\n")
    (tmp_path / "long").write_text("x" * 32)
    monkeypatch.delenv("SLIPSTREAM_ENGINE_SECRET", raising=False)
    for words, message in (
        ("engine {} --port 0", "need a common secret of at least 16 bytes, and there is none: openssl rand -hex 32 > FILE"),
        ("engine {} --port 0 --engine-secret-file {}/secret", "secret has 5 bytes: openssl"),
        ("engine {} --port 0 --engine-secret-file {}/no", "No such file or directory"),
        ("serve {} --port 0 --engines h:1", "need a common secret"),
        ("serve {} --port 0 --engines h:1,h", "argument --engines: 'h' is not HOST:PORT"),
        ("serve {} --port 0 --engines http://h:1", "argument --engines: 'http://h:1' is not HOST:PORT"),
        ("serve {} --port 0 --engines h:1,h:1", "argument --engines: 'h:1,h:1' has an address twice"),
        (
            "serve {} --port 0 --engines h:1 --dtype int8 --tp 2 --lora-modules a=b",
            "--dtype, --tp, --lora-modules: all engines are on other hosts (--engines); give it to slipstream engine there",
        ),
        ("engine {} --port 0 --engine-secret-file {}/long --tls-cert {}/no", "--tls-cert {}/no: No such file or directory"),
        ("serve {} --port 0 --engine-tls-ca {}/long", "--engine-tls-ca is for engines on other hosts; add --engines"),
        (
            "serve {} --port 0 --engines h:1 --engine-secret-file {}/long --engine-tls-ca {}/long",
            "long: [X509: NO_CERTIFICATE_OR_CRL_FOUND] no certificate or crl found (_ssl.c",
        ),
        ("serve {} x={} --port 0 --engines h:1", "--engines is of one model, and here models are loaded on demand; write it into"),
    ):
        with pytest.raises(SystemExit) as ended:
            sys.exit(main([word.format(tmp_path) for word in words.split()]))
        assert ended.value.code == 2 and message.format(tmp_path) in capsys.readouterr().err


@contextmanager
def engine_process(folder: Path, port: int, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "slipstream", "engine", str(folder), "--port", str(port), "--threads", "1", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.kill()


@pytest.mark.slow
def test_real_processes(tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TLS.

    kill -9 of one of two engines: requests go on; it is taken back when it runs again. Ctrl-C ends an engine, and the server."""
    folder = tiny_chat.write(tmp_path / "chat")
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    monkeypatch.setenv("SLIPSTREAM_ENGINE_SECRET", "0123456789abcdef")
    body = json.dumps({"model": "chat", "prompt": "x", "max_tokens": 4, "ignore_eos": True})
    options = ("--engine-secret-file", str(secret), "--tls-cert", str(certificate))
    with ExitStack() as stack:
        first, second = (stack.enter_context(engine_process(folder, 0, *options)) for _ in range(2))
        addresses = [first[1], second[1]]
        process, address = stack.enter_context(
            server(folder, "--engines", ",".join(addresses), "--engine-tls-ca", str(certificate))
        )

        def engines() -> list[str]:
            return [json.loads(call(address, "GET", "/health").body)["engines"][one] for one in addresses]

        assert "replicas" not in json.loads(call(address, "GET", "/health").body)
        until(lambda: engines() == ["ready", "ready"])
        assert call(address, "POST", COMPLETIONS, body).status == 200
        first[0].send_signal(signal.SIGKILL)
        until(lambda: engines() == ["down", "ready"])
        assert call(address, "POST", COMPLETIONS, body).status == 200
        again, _ = stack.enter_context(engine_process(folder, int(addresses[0].rpartition(":")[2]), *options[2:]))
        until(lambda: engines() == ["ready", "ready"])
        second[0].send_signal(signal.SIGINT)
        assert second[0].wait(30) == 0
        until(lambda: engines() == ["ready", "down"])
        assert call(address, "POST", COMPLETIONS, body).status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        again.send_signal(signal.SIGTERM)
        assert again.wait(30) == 0 and again.stderr is not None
        assert "the connection of a server on 127.0.0.1 has ended" in again.stderr.read()
