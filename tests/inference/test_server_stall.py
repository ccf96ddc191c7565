"""What a client sends stops nobody else, takes bounded memory, and tells nobody else what it was."""

from __future__ import annotations

import json
import socket
import threading
import time
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, normalizers

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from slipstream.inference.core import SamplingParams
from slipstream.inference.server import serve
from slipstream.inference.server.prepare import BODIES, SHORT
from slipstream.inference.server.requests import MAX_MESSAGES
from slipstream.inference.text import BYTE_OF, SLICE, Tokenizer, TooLongError
from tests.inference.fake_engine import FakeEngine
from tests.inference.test_server import CHAT, COMPLETIONS, USER, call, post, serving, until
from tests.inference.test_server_engine import served
from tests.unit.test_inference_engine import ask, byte_tokenizer, running, wait


class Counting:
    """A tokenizers.Tokenizer that counts the characters it is given."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        self.encoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def encode(self, text: str, **more: Any) -> Any:
        self.encoded += len(text)
        return self.backend.encode(text, **more)

    def encode_batch_fast(self, texts: list[str], **more: Any) -> Any:
        self.encoded += sum(map(len, texts))
        return self.backend.encode_batch_fast(texts, **more)


def counting(normalizer: Any = None, special: Any = None) -> tuple[Tokenizer, Counting]:
    """Bytes, and "aa" up to sixteen of them."""
    runs = ["a" * 2**n for n in range(5)]
    vocab = {token: number for number, token in enumerate([*BYTE_OF, *runs[1:]])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[(run, run) for run in runs[:-1]]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([special] if special is not None else [])
    counted = Counting(backend)
    return Tokenizer(counted), counted  # type: ignore[arg-type]


def test_a_text_that_is_far_too_long_is_not_encoded() -> None:
    tokenizer, counted = counting()
    with pytest.raises(TooLongError, match="more than 100 tokens"):
        tokenizer.encode("a" * 1_000_000, max_tokens=100)
    assert counted.encoded <= SLICE, "its beginning said it"
    counted.encoded = 0
    with pytest.raises(TooLongError):
        tokenizer.encode("b" * 10 * SLICE, max_tokens=SLICE - 1)
    assert counted.encoded <= 2 * SLICE


@pytest.mark.parametrize(
    ("normalizer", "special", "text"),
    [
        (None, None, "a" * 16 * 9000),  # as few tokens as there can be
        (None, None, "b" * 9000),
        (normalizers.NFC(), None, unicodedata.normalize("NFD", "\u1f82") * 3000),  # four characters become one of three bytes
        (normalizers.Strip(), None, " " * 900_000 + "b"),
        (None, AddedToken("<mask>", lstrip=True, special=True), " " * 9_000 + "<mask>"),
    ],
)
def test_a_text_that_fits_is_encoded(normalizer: Any, special: Any, text: str) -> None:
    tokenizer, counted = counting(normalizer, special)
    ids = tokenizer.encode(text)
    assert tokenizer.encode(text, max_tokens=len(ids)) == ids == list(counted.backend.encode(text).ids)


def test_encoding_lets_other_threads_run() -> None:
    tokenizer, text = byte_tokenizer(), "some words " * 60_000
    encoding = threading.Thread(target=tokenizer.encode, args=(text,))
    encoding.start()
    ticks = 0
    while encoding.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks >= 10, "with the interpreter's lock held it would be one or two"


@pytest.mark.parametrize("key", ["role", "\\u0072ole"])  # the second is found only where it is parsed
def test_a_chat_has_so_many_messages(key: str) -> None:
    def chat(number: int) -> Any:
        message = json.dumps(USER).replace("role", key)
        body = f'{{"model": "fake/model", "max_tokens": 2, "messages": [{", ".join([message] * number)}]}}'
        return call(address, "POST", CHAT, body)

    with serving(FakeEngine()) as address:
        assert chat(MAX_MESSAGES + 1).error["param"] == "messages"
        assert "context" in chat(MAX_MESSAGES).error["message"]


def test_long_prompts_are_refused_by_the_real_engine() -> None:
    with served() as (engine, address):
        for text in ("x" * 3_000_000, "x" * (engine.max_context + 1)):
            reply = call(address, "POST", COMPLETIONS, json.dumps({"model": "model", "prompt": text}))
            assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


def unfinished(address: str, size: int) -> socket.socket:
    host, port = address.split(":")
    raw = socket.create_connection((host, int(port)))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size + 1}\r\n\r\n"
    raw.sendall(head.encode() + b" " * size)
    return raw


def test_bodies_in_flight_take_bounded_memory() -> None:
    """Many that never end: others of more than 64 KiB are told to come back; short ones are served."""
    size = 4 * SHORT
    text = "x" * (size - 200)
    opened: list[socket.socket] = []
    with serving(FakeEngine(), max_body_bytes=size, body_timeout_s=60) as address, ExitStack() as stack:
        while (reply := post(address, COMPLETIONS, prompt=text)).status == 400:
            assert reply.error["code"] == "context_length_exceeded"
            opened.append(stack.enter_context(unfinished(address, size - 1)))
        assert len(opened) >= BODIES - 1
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "busy", "1")
        assert post(address, COMPLETIONS).status == 200
        for one in opened:
            one.close()
        until(lambda: post(address, COMPLETIONS, prompt=text).status == 400)


def test_the_vocabulary_of_schemas_is_made_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    llguidance = pytest.importorskip("llguidance")
    builds: list[Any] = []
    monkeypatch.setattr(
        llguidance, "LLTokenizer", lambda *args, plain=llguidance.LLTokenizer, **more: builds.append(0) or plain(*args, **more)
    )
    with running() as engine:
        engine.prepare()
        assert len(builds) == 1
        wait(ask(engine, "x", SamplingParams(max_tokens=3, json_schema='{"type": "integer"}')))
        assert len(builds) == 1


def test_a_server_prepares_its_engine_first() -> None:
    class Prepared(FakeEngine):
        def prepare(self) -> None:
            raise InterruptedError("prepared")

    with pytest.raises(InterruptedError, match="prepared"):
        serve(Prepared(), sockets=[])


PROMPT = "a prompt that somebody guesses " * 3


def cached(address: str, key: str = "", **fields: Any) -> int:
    body = json.dumps({"model": "model", "prompt": PROMPT, "max_tokens": 1, **fields})
    reply = call(address, "POST", COMPLETIONS, body, {"Content-Type": "application/json", "Authorization": f"Bearer {key}"})
    return json.loads(reply.body)["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def prefix() -> Iterator[int]:
    """Tokens of PROMPT that can be cached: its whole blocks of 4, but for the last token."""
    yield (len(PROMPT) - 1) // 4 * 4


def test_cached_prefixes_are_a_key_s_own(prefix: int) -> None:
    keys = ["alice", "bob"]
    with served(server={"api_keys": keys}) as (_, address):
        assert [cached(address, key) for key in ("alice", "alice", "bob", "bob", "alice")] == [0, prefix, 0, prefix, prefix]
        assert cached(address, "alice", cache_salt="hers") == cached(address, "bob", cache_salt="hers") == 0
        assert cached(address, "alice", cache_salt="hers") == prefix
    with served(server={"api_keys": keys, "share_prefixes": True}) as (_, address):
        assert [cached(address, key) for key in ("alice", "bob")] == [0, prefix]


def test_cached_prefixes_by_salt(prefix: int) -> None:
    with served() as (_, address):
        salts: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
        assert [cached(address, **salt) for salt in salts] == [0, 0, 0]
        assert [cached(address, **salt) for salt in salts] == [prefix] * 3
        for wrong in ("", "x" * 300, 7):
            reply = call(address, "POST", COMPLETIONS, json.dumps({"model": "model", "prompt": "x", "cache_salt": wrong}))
            assert (reply.status, reply.error["param"]) == (400, "cache_salt")
