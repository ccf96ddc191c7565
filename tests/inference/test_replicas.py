"""Several engines behind one server: what the wire carries, which engine gets a request, what becomes of it when one ends."""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import slipstream
from slipstream.inference import wire
from slipstream.inference.core import Batch, Finish, QueueFullError, SamplingParams
from slipstream.inference.embedding import EmbeddingEngine, Pooling
from slipstream.inference.engine import Engine
from slipstream.inference.replica import Session, facts_of
from slipstream.inference.sequence import Output
from slipstream.inference.server import ReplicaError, Router
from slipstream.inference.server.remote import ReplicaState
from slipstream.inference.server.router import Backlog, backlog, prefix_keys, ranked
from slipstream.inference.server.sources import ATTEMPTS, Connected, EngineProcess, Spare
from slipstream.inference.stats import settled, total
from slipstream.launch.cli import main
from tests import tiny_chat
from tests.inference.blocks import check_engine
from tests.inference.test_server import COMPLETIONS, call, serving, until
from tests.unit.test_inference_engine import GREEDY, Answer, HashRunner, ask, byte_tokenizer, running, wait

SAMPLED = SamplingParams(max_tokens=12, seed=3, logprobs=2, prompt_logprobs=1, stop=("qq",), logit_bias={97: 1.5})
SCHEMA = '{"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"], "additionalProperties": false}'
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


class Local:
    """A source whose engine runs in this process. `cut` is what kill -9 is to a process."""

    address, attempts, max_pause = "", ATTEMPTS, 10.0
    says = ""  # each answer

    def __init__(self, name: str, before: Callable[[Batch], None] = lambda batch: None, **options: Any) -> None:
        self.name, self.before, self.options, self.opens = name, before, options, 0
        self.allowed = threading.Event()  # to start
        self.allowed.set()
        self.ends: list[socket.socket] = []

    def open(self) -> Connected:
        self.opens += 1
        if not self.allowed.wait(30):
            raise ReplicaError("it was not allowed to start")
        runner = HashRunner(says=self.says)
        runner.before = self.before
        self.engine = self.engine_of(runner)
        self.engine.start()
        ours, theirs = socket.socketpair()
        self.ends.append(theirs)
        facts = json.loads(json.dumps(facts_of(self.engine, "hashes")))
        self.link = wire.Link(theirs)
        self.session = threading.Thread(target=Session(self.engine, self.link).run)
        self.session.start()
        return Connected(wire.Link(ours), facts)

    def engine_of(self, runner: HashRunner) -> Any:
        return Engine(runner, byte_tokenizer(), **{"token_budget": 16, "max_running": 16, **self.options})

    def cut(self) -> None:
        self.ends[-1].shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self.allowed.set()

    def end(self) -> str:
        self.session.join()
        self.link.close()
        self.engine.close()
        if isinstance(self.engine, Engine):
            check_engine(self.engine)
        return "was cut"


@contextmanager
def routed(*sources: Any) -> Iterator[Router]:
    with closing(Router(sources, byte_tokenizer()).open()) as router:
        router.prepare()
        yield router


def submit(router: Any, prompt: str, params: SamplingParams = GREEDY, **more: Any) -> Answer:
    answer = Answer(more.get("n", 1))
    router.submit(list(prompt.encode()), params, sink=answer, **more)
    return answer


def test_messages_arrive_as_they_were_sent() -> None:
    left, right = (wire.Link(one) for one in socket.socketpair())
    assert SamplingParams(**json.loads(json.dumps(wire.packed_params(SAMPLED)))) == SAMPLED
    with running() as engine:
        answer = wait(ask(engine, "a prompt", SAMPLED, n=2))
        stats = engine.stats()
    for outputs in answer.outputs:
        for output in outputs:
            left.send("output", 1, output)
            assert wire.output_of(next(right.messages)[2]) == output
    left.send("done", 1, wire.packed_stats(stats))
    assert wire.stats_of(next(right.messages)[2]) == stats
    left.close()
    assert list(right.messages) == []
    right.close()


def test_a_link_is_full_until_the_other_end_takes_what_was_sent() -> None:
    left, right = (wire.Link(one) for one in socket.socketpair())
    sent, room = 0, threading.Event()
    while not left.full:
        left.send("output", sent, Output(0, "x" * 1000, (1,)))
        sent += 1
    left.when_room(room.set)
    assert not room.wait(0.1) and sent * 1400 > wire.MAX_AHEAD
    for number in range(sent):
        assert next(right.messages)[1] == number
    assert room.wait(30) and not left.full
    room.clear()
    left.when_room(room.set)
    assert room.is_set(), "there is room"
    right.close()
    for number in range(2 * sent):  # nothing is kept for an end that is gone
        left.send("output", number, Output(0, "x" * 1000, (1,)))
    until(lambda: not left._unsent)
    left.close()


def test_an_end_that_lives_and_takes_nothing_is_lost() -> None:
    left, right = (wire.Link(one) for one in socket.socketpair())
    left.live(0.1)
    right.live(0.1)
    start = time.monotonic()
    while not left.full:
        left.send("output", 1, Output(0, "x" * 1000, (1,)))
    assert list(left.messages) == [] and not left._unsent
    assert 0.4 < time.monotonic() - start < 10
    left.close()
    right.close()


class Shared:
    """A source whose engine other servers have, too, with little room on the way."""

    name, address, attempts, max_pause = "shared", "", ATTEMPTS, 10.0

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def open(self) -> Connected:
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.link = wire.Link(theirs)
        self.session = threading.Thread(target=Session(self.engine, self.link).run)
        self.session.start()
        return Connected(wire.Link(ours), facts_of(self.engine, "hashes"))

    def stop(self) -> None:
        pass

    def end(self) -> str:
        self.session.join()
        self.link.close()
        return "was cut"


class Slow(Answer):
    """Takes an output only after `go`."""

    def __init__(self, go: threading.Event) -> None:
        super().__init__(n=2)
        self.go = go

    def __call__(self, output: Output) -> None:
        self.go.wait(30)
        super().__call__(output)


@pytest.mark.parametrize("num_blocks", [64, 1000])  # others need the blocks, or they do not
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_server_that_takes_no_outputs_stops_no_other(num_blocks: int, is_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests stand still and say later what they would have said; the others' have the forwards that they have alone."""
    monkeypatch.setattr(wire, "MAX_AHEAD", 10_000)
    params = replace(LONG, logprobs=20, temperature=1.0, seed=1)
    slow, quick = ["begins", "comes next"], ["a prompt of another server's", "one more"]  # no prefix is cached
    with running(HashRunner(num_blocks=1000)) as engine:
        expected = [wait(ask(engine, prompt, params, n=2)) for prompt in slow]
        begun = engine.stats().forwards
        alone = [wait(ask(engine, prompt, LONG)).ids() for prompt in quick]
        forwards = engine.stats().forwards - begun
    go, submitted, runner = threading.Event(), threading.Event(), HashRunner(num_blocks=num_blocks)
    runner.before = lambda batch: submitted.wait(30)  # type: ignore[assignment, return-value]
    with running(runner) as engine, routed(source := Shared(engine)) as behind, routed(Shared(engine)) as ahead:
        answers = [Slow(go) for _ in slow]
        for prompt, answer in zip(slow, answers, strict=True):
            behind.submit(list(prompt.encode()), params, sink=answer, n=2)
        submitted.set()

        def stands() -> bool:
            made = engine.stats().generated_tokens
            time.sleep(0.1)  # more than the socket takes in one go
            return (made, 0, 4) == (engine.stats().generated_tokens, engine.stats().running, engine.stats().waiting)

        until(stands)
        made = engine.stats().generated_tokens
        assert made < 300, "of 600"
        begun = engine.stats().forwards
        assert [wait(submit(ahead, prompt, LONG)).ids() for prompt in quick] == alone
        assert engine.stats().forwards - begun == forwards
        assert engine.stats().generated_tokens - made == sum(map(len, alone))
        if is_cut:
            source.link.connection.shutdown(socket.SHUT_RDWR)
            until(lambda: engine.stats().waiting == 0)
        go.set()
        for answer, one in zip(answers, expected, strict=True):
            wait(answer)
            for index in range(2):
                assert answer.ids(index) == one.ids(index)[: len(answer.ids(index))]
                assert is_cut or answer.outputs[index] == one.outputs[index]


def test_errors_keep_their_kind() -> None:
    for error in (ValueError("n is 0"), QueueFullError("full")):
        assert repr(wire.error_of(*wire.packed_error(error))) == repr(error)


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("embeds", [True, False])
def test_an_error_that_nobody_expected_is_the_requests(
    is_local: bool, embeds: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client is told not to repeat it, and gets no details, wherever the engine runs."""
    for kind, name in ((EmbeddingEngine, "embed"), (Engine, "submit")):
        monkeypatch.setattr(kind, name, lambda *arguments, **more: {}["a secret"])
    source = Vectors("a") if embeds else Local("a")
    with closing(source.engine_of(HashRunner())) if is_local else routed(source) as engine, serving(engine) as address:
        fields = {"model": engine.model_name, "input" if embeds else "prompt": "x"}
        reply = call(address, "POST", "/v1/embeddings" if embeds else COMPLETIONS, json.dumps(fields))
    assert (reply.status, reply.headers["x-should-retry"]) == (500, "false")
    assert b"secret" not in reply.body and "KeyError: 'a secret'" in caplog.text


def test_figures_of_several_engines_are_added() -> None:
    with running() as engine:
        wait(ask(engine, "some prompt"))
        stats = engine.stats()
    both = total([stats, settled(stats)])
    assert (both.generated_tokens, both.forwards, both.blocks) == (2 * stats.generated_tokens, 2 * stats.forwards, stats.blocks)
    assert both.finished == {finish: 2 * count for finish, count in stats.finished.items()}
    assert both.between_tokens.count == 2 * stats.between_tokens.count
    assert both.block_size == stats.block_size


@pytest.mark.parametrize(
    ("loads", "order"),
    [
        ([(0, 0), (0, 0)], [0, 1]),
        ([(10, 0), (0, 0)], [1, 0]),  # the fewest tokens
        ([(10, 0), (10, 16)], [1, 0]),  # the longest prefix
        ([(40, 32), (10, 0)], [0, 1]),  # its prefix is worth the wait
        ([(50, 32), (10, 0)], [1, 0]),  # it is not
        ([(32, 32), (0, 0)], [1, 0]),
        ([(5, 0), (9, 8), (3, 0)], [1, 2, 0]),
    ],
)
def test_the_engine_with_least_to_do_comes_first(loads: list[tuple[int, int]], order: list[int]) -> None:
    assert ranked([Backlog(*load) for load in loads]) == order


@pytest.mark.parametrize(
    ("outstanding", "seen"),
    [
        ({}, 10),
        ({"a": 5}, 15),
        ({"b": 1000}, 20),  # of another's many, as many as its own
        ({"b": 4, "c": 1000}, 24),
        ({"a": 90, "b": 4, "c": 1000}, 204),
    ],
)
def test_an_engine_shares_its_time_between_tenants(outstanding: dict[str, int], seen: int) -> None:
    assert backlog(Counter(outstanding), "a", 10, 3) == Backlog(seen, 3, sum(outstanding.values()))


def test_the_requests_of_each_tenant_are_spread(tokens: int = 150) -> None:
    """A key that floods all engines leaves others their shares on each, also if what they have in common is known to one."""
    steps = threading.Semaphore(0)
    sources = [Local(name, lambda batch: steps.acquire(timeout=30)) for name in "ab"]
    with routed(*sources) as router:
        many = [submit(router, f"flood {number}", LONG, tenant="many") for number in range(8)]
        few = [submit(router, f"shared {number}", LONG, tenant="few") for number in range(4)]
        for one in router.engines:
            assert [len(one._tickets), one.outstanding()["few"]] == [6, 2 * tokens + one.outstanding()["few"] % tokens]
        steps.release(10_000)
        assert all(wait(one).last().finish is Finish.LENGTH for one in (*many, *few))


def test_prefixes_are_equal_only_with_their_salt_and_adapter() -> None:
    keys = prefix_keys(range(20), 4, "", "")
    assert len(keys) == 4 == len(set(keys)), "the last token is never taken from the cache"
    assert prefix_keys([*range(8), 99, *range(9, 20)], 4, "", "")[:2] == keys[:2]
    others = [prefix_keys([7, *range(1, 20)], 4, "", ""), prefix_keys(range(20), 4, "s", ""), prefix_keys(range(20), 4, "", "a")]
    assert not set(keys) & {key for other in others for key in other}


def test_answers_are_those_of_one_engine() -> None:
    prompts = [f"{'shared ' * (number % 3)}number {number}" for number in range(12)]
    with running() as engine, routed(Local("a"), Local("b")) as router:
        for params in (GREEDY, SAMPLED, SamplingParams(max_tokens=20, seed=5, json_schema=SCHEMA)):
            expected = [wait(ask(engine, prompt, params, n=2)) for prompt in prompts]
            found = [submit(router, prompt, params, n=2) for prompt in prompts]
            for one, other in zip(expected, map(wait, found), strict=True):
                for index in range(2):
                    assert one.text(index) == other.text(index)
                    assert [out.logprobs for out in one.outputs[index] if out.logprobs] == [
                        out.logprobs for out in other.outputs[index] if out.logprobs
                    ]
                    assert one.outputs[index][0].prompt_logprobs == other.outputs[index][0].prompt_logprobs
                    assert one.last(index).finish is other.last(index).finish
        assert all(stats and stats.generated_tokens for stats in router.each()), "both have worked"
        assert router.stats().generated_tokens == engine.stats().generated_tokens
        with pytest.raises(ValueError, match="tokens are 0 to 256"):
            router.submit([999], GREEDY, sink=Answer())
        with pytest.raises(ValueError, match="json_schema"):
            submit(router, "x", SamplingParams(json_schema='{"type": 3}'))


def test_a_known_prefix_decides() -> None:
    steps = threading.Semaphore(0)
    with routed(Local("a", lambda batch: steps.acquire(timeout=30)), Local("b")) as router:
        busy = submit(router, "the long beginning of everything, one", LONG)
        wait(submit(router, "another one"))
        assert [bool(stats and stats.forwards) for stats in router.each()] == [False, True], "the second went to the idle engine"
        short = submit(router, "another two", SamplingParams(max_tokens=1))
        assert wait(short).last().usage == (11, 8, 1)
        steps.release(1000)
        wait(busy)
        for number in range(3):
            cached = wait(submit(router, f"the long beginning of everything, {number}")).last().usage
            assert cached is not None and cached.cached_tokens >= 32, "its engine is idle again, and has the prefix"


def test_an_engine_that_ends() -> None:
    """A stream that has begun ends with an error; what has not goes to the other; the engine comes back."""
    steps = threading.Semaphore(0)
    a, b = Local("a", lambda batch: steps.acquire(timeout=30), max_running=1), Local("b")
    with running() as engine:
        expected = wait(ask(engine, "waits")).text()
    with routed(a, b) as router:
        begun = submit(router, "x" * 8, LONG)
        steps.release(3)
        assert begun.started.wait(30)
        b.allowed.clear()
        b.cut()
        until(lambda: router.engines[1].state.value == "starting")
        waiting, cancelled = submit(router, "waits"), Answer()  # behind the one that runs
        router.cancel(router.submit(list(b"is cancelled"), LONG, sink=cancelled))
        b.allowed.set()
        until(lambda: router.engines[1].state.value == "ready")
        a.allowed.clear()
        a.cut()
        until(lambda: not router.engines[0].outstanding())
        steps.release(1000)
        assert wait(begun).last().finish is Finish.ERROR and "was cut (a)" in str(begun.last().error)
        assert wait(waiting).text() == expected
        assert wait(cancelled).last().finish is Finish.CANCELLED
        assert wait(submit(router, "again")).last().finish is not Finish.ERROR
        assert [one.state.value for one in router.engines] == ["starting", "ready"] and router.healthy
        a.allowed.set()
        until(lambda: router.engines[0].state.value == "ready")
        assert (a.opens, b.opens) == (2, 2)
        assert router.stats().finished[Finish.CANCELLED] <= 1, "figures of before its end are kept, as far as they were asked for"


class Streamed(NamedTuple):
    text: str
    error: str | None


def ask_over_http(address: str, prompt: str, **fields: Any) -> tuple[int, Any]:
    """The status and the body, or what a stream said."""
    reply = call(address, "POST", COMPLETIONS, json.dumps({"model": "model", "prompt": prompt, "temperature": 0, **fields}))
    if not fields.get("stream"):
        return reply.status, json.loads(reply.body)
    events = [json.loads(line[6:]) for line in reply.body.decode().split("\n\n") if line.startswith("data: {")]
    errors = [event["error"]["message"] for event in events if "error" in event]
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    return reply.status, Streamed(text, errors[0] if errors else None)


@pytest.mark.parametrize("fields", [{"n": 2, "seed": 7, "temperature": 1.0, "logprobs": 2}, {"max_tokens": 40, "echo": True}])
def test_a_whole_answer_begins_again_at_another_engine(fields: dict[str, Any]) -> None:
    """Its client has got nothing of it: the response is that of an engine that lives. A stream that has begun ends with an error,
    and one that has not goes to the other engine, too."""
    fields = {"max_tokens": 30, "ignore_eos": True, **fields}
    steps = threading.Semaphore(0)
    a, b = Local("a", lambda batch: steps.acquire(timeout=30)), Local("b")
    with running() as engine, serving(engine) as address:  # type: ignore[arg-type]
        expected = [ask_over_http(address, prompt, **fields)[1] for prompt in ("whole", "late")]
    with routed(a, b) as router, serving(router) as address, ThreadPoolExecutor(4) as clients:  # type: ignore[arg-type]
        router.engines[1].state = ReplicaState.DRAINING
        whole = clients.submit(ask_over_http, address, "whole", **fields)
        until(lambda: router.stats().running > 0)
        begun = clients.submit(ask_over_http, address, "begun", stream=True, max_tokens=30, ignore_eos=True)
        until(lambda: [ticket.accepted for ticket in router.engines[0]._tickets.values()] == [True, True])
        steps.release(6)
        until(lambda: all(ticket.generated > 2 for ticket in router.engines[0]._tickets.values()))
        late = clients.submit(ask_over_http, address, "late", stream=True, **{**fields, "logprobs": None})
        until(lambda: len(router.engines[0]._tickets) == 3)
        router.engines[1].state = ReplicaState.READY
        a.allowed.clear()
        a.cut()
        steps.release(1000)
        status, body = whole.result()
        assert status == 200, body
        assert [body["choices"], body["usage"]] == [expected[0]["choices"], expected[0]["usage"]]
        status, streamed = begun.result()
        assert status == 200 and streamed.text and "was cut (a)" in str(streamed.error)
        texts = [choice["text"] for choice in expected[1]["choices"]]
        status, streamed = late.result()
        assert (status, streamed.error, sorted(streamed.text)) == (200, None, sorted("".join(texts)))
        a.allowed.set()


def test_what_a_dead_engine_has_goes_to_another() -> None:
    """Its end is the engine's, not theirs."""
    go, prompts = threading.Event(), [f"number {number}" for number in range(5)]
    with running() as engine:
        expected = [wait(ask(engine, prompt)).text() for prompt in prompts]

    def device(batch: Batch) -> None:
        if go.wait(30):
            raise RuntimeError("the device is lost")

    a, b = Local("a", device, max_running=1), Local("b")
    with routed(a, b) as router:
        router.engines[1].state = ReplicaState.DRAINING
        answers = [submit(router, prompt) for prompt in prompts]
        router.engines[1].state = ReplicaState.READY
        a.allowed.clear()
        go.set()
        until(lambda: not a.engine.healthy)
        a.cut()
        assert [wait(answer).text() for answer in answers] == expected
        a.before = lambda batch: None
        a.allowed.set()


class Hasty:
    """A source whose engine answers a request before it has said that it takes it, and then ends."""

    address, attempts, max_pause = "", 1000, 0.01

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.facts, self.stats = name, json.loads(json.dumps(facts_of(engine, "hashes"))), engine.stats()

    def open(self) -> Connected:
        ours, theirs = socket.socketpair()
        threading.Thread(target=self.answer, args=(wire.Link(theirs),)).start()
        return Connected(wire.Link(ours), self.facts)

    def answer(self, link: wire.Link) -> None:
        for kind, number, *rest in link.messages:
            if kind == "submit":
                link.send("output", number, Output(0, "a", (97,)))
                break
            link.send("done", number, wire.packed_stats(self.stats) if rest[0] == "stats" else None)
        link.close()

    def stop(self) -> None: ...

    def end(self) -> str:
        return "has ended"


def test_a_stream_is_begun_by_its_first_output_and_not_by_the_reply() -> None:
    """It is not begun again elsewhere, where its client would get the beginning twice."""
    with running() as engine, routed(Hasty("a", engine), Hasty("b", engine)) as router:
        answer = wait(submit(router, "x"))
        ends = "the engine's process has ended (a); a part of the answer was sent, so send the request again"
        assert (answer.text(), answer.last().error) == ("a", ends)


@pytest.mark.parametrize(("after", "place"), [(0, None), (5, None), (0, 0), (0, 2)])  # tokens; among others, or alone
def test_a_request_that_ends_engines_ends(after: int, place: int | None) -> None:
    """Also a whole one that has begun. Alone, it ends one engine, beside others a second one, and they get answers."""
    go, sources = threading.Event(), [Local("a"), Local("b"), Local("c")]

    def die(batch: Batch) -> None:
        go.wait(30)
        if any(chunk.request.tokens[0] == ord("!") and chunk.request.num_generated >= after for chunk in batch.chunks):
            for source in sources:
                if threading.current_thread() is source.engine._thread:
                    source.cut()

    for source in sources:
        source.before = die
    with routed(*sources) as router:
        for engine in router.engines[1:]:
            engine.state = ReplicaState.DRAINING
        prompts = [] if place is None else [f"number {number}" for number in range(5)]
        answers = [submit(router, prompt, replace(GREEDY, max_tokens=1)) for prompt in prompts[:place]]
        fatal = submit(router, "! kills", replace(GREEDY, ignore_eos=True), whole=True)
        answers += [submit(router, prompt, replace(LONG, max_tokens=20), whole=True) for prompt in prompts[len(answers) :]]
        for engine in router.engines[1:]:
            engine.state = ReplicaState.READY
        go.set()
        assert "the request may be the cause, so it is not tried again" in str(wait(fatal).last().error)
        assert all(wait(answer).last().finish is Finish.LENGTH for answer in answers)
        until(lambda: len(router._ready()) == 3)
        assert sum(source.opens for source in sources) == (4 if place is None else 5)
        assert wait(submit(router, "good")).last().finish is not Finish.ERROR


class Vectors(Local):
    """Its engine embeds texts. One that begins with "!" ends the process, or loses the device."""

    waits = threading.Event()

    def __init__(self, name: str, is_lost: bool = False) -> None:
        super().__init__(name)
        self.is_lost, self.computing = is_lost, False

    def engine_of(self, runner: HashRunner) -> Any:
        return EmbeddingEngine(self, byte_tokenizer(), Pooling(), vocab_size=259, model_name="rows")  # type: ignore[arg-type]

    config: Any = None
    num_blocks = max_context = 64

    def hidden(self, texts: Any, types: Any = None) -> torch.Tensor:
        self.computing = True
        self.waits.wait(30)
        if any(text[0] == ord("!") for text in texts):
            if self.is_lost:
                self.engine.fail("the device is lost")
            self.cut()
            time.sleep(0.05)  # nothing is said any more
            raise RuntimeError("lost")
        return torch.tensor([[float(token)] for text in texts for token in text])


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("others", [0, 3])
def test_a_text_that_ends_engines_ends(others: int, is_lost: bool) -> None:
    """Alone it ends one engine, beside others a second one, and they get vectors. The client does not repeat it."""
    openai = pytest.importorskip("openai")
    sources = [Vectors(name, is_lost) for name in "abc"]
    Vectors.waits.clear()
    with (
        routed(*sources) as router,
        serving(router) as address,  # type: ignore[arg-type]
        openai.OpenAI(base_url=f"http://{address}/v1", api_key="none") as client,
        ThreadPoolExecutor(4) as callers,
    ):
        for engine in router.engines[1:]:
            engine.state = ReplicaState.DRAINING
        calls = [callers.submit(client.embeddings.create, model="rows", input="!")]
        until(lambda: sources[0].computing)
        calls += [callers.submit(client.embeddings.create, model="rows", input=text) for text in ["xyz", "ab", "c"][:others]]
        until(lambda: len(sources[0].engine._waiting) == others)  # if they were sent later, it would be alone
        for engine in router.engines[1:]:
            engine.state = ReplicaState.READY
        Vectors.waits.set()
        assert "the request may be the cause, so it is not tried again" in str(calls[0].exception())
        assert isinstance(calls[0].exception(), openai.InternalServerError)
        assert [call.result().data[0].embedding for call in calls[1:]] == [[121.0], [97.5], [99.0]][:others]
        until(lambda: len(router._ready()) == 3)
        assert sum(source.opens for source in sources) == 4 + bool(others)


def test_calls_of_a_lost_engine_wait_for_others_and_use_each() -> None:
    lost, *others = sources = [Vectors(name) for name in "abc"]
    lost.waits = threading.Event()
    Vectors.waits.clear()
    with routed(*sources) as router, ThreadPoolExecutor(4) as callers:
        for engine in router.engines[1:]:
            engine.state = ReplicaState.DRAINING
        calls = [callers.submit(router.embed, [text]) for text in "wxyz"]
        until(lambda: len(router.engines[0]._tickets) == 4)
        lost.allowed.clear()
        lost.cut()
        lost.waits.set()
        until(lambda: router.engines[0].state is ReplicaState.STARTING)
        time.sleep(0.1)
        assert not any(call.done() for call in calls), "no engine is ready, and the next gets them"
        for source in others:
            source.cut()  # it was draining, so that it starts again
        until(lambda: [len(engine._tickets) for engine in router.engines] == [0, 1, 1])
        Vectors.waits.set()
        assert [call.result().vectors.item() for call in calls] == [*map(float, b"wxyz")]
        lost.allowed.set()


def test_a_router_that_is_closed_ends_calls_that_wait() -> None:
    source = Vectors("a")
    source.waits = threading.Event()
    with ThreadPoolExecutor(2) as callers:
        with routed(source) as router:
            calls = [callers.submit(router.embed, [text]) for text in "xy"]
            until(lambda: len(router.engines[0]._tickets) == 2)
            source.allowed.clear()
            source.cut()
            source.waits.set()
            until(lambda: len(router._homeless) == 2)
        assert [str(call.exception(10)) for call in calls] == ["the engine is closed"] * 2


def test_an_adapter_is_not_loaded_while_no_engine_is_ready(tmp_path: Path) -> None:
    with routed(Local("a")) as router, serving(router, lora_root=str(tmp_path)) as address:  # type: ignore[arg-type]
        router.engines[0].state = ReplicaState.DRAINING
        reply = call(address, "POST", "/v1/load_lora_adapter", json.dumps({"lora_name": "x", "lora_path": "x"}))
        assert (reply.status, reply.error["code"]) == (503, "unavailable")


def test_a_client_does_not_repeat_what_ends_engines() -> None:
    openai = pytest.importorskip("openai")
    go, sources = threading.Event(), [Local(name) for name in "abc"]

    def die(batch: Batch) -> None:
        go.wait(30)
        for source in sources:
            if threading.current_thread() is source.engine._thread:
                source.cut()

    for source in sources:
        source.before = die
    with (
        routed(*sources) as router,
        serving(router) as address,  # type: ignore[arg-type]
        openai.OpenAI(base_url=f"http://{address}/v1", api_key="none") as client,
        ThreadPoolExecutor(1) as caller,
    ):
        answer = caller.submit(client.completions.create, model=router.model_name, prompt="x")
        until(lambda: any(ticket.accepted for ticket in router.engines[0]._tickets.values()))
        go.set()
        assert isinstance(answer.exception(), openai.InternalServerError)
        assert "the request may be the cause" in str(answer.exception())
        until(lambda: len(router._ready()) == 3)
        assert sum(source.opens for source in sources) == 4


def test_an_engine_that_never_starts_again_ends_the_server() -> None:
    class Broken(Local):
        def open(self) -> Connected:
            if self.opens == 0:
                return super().open()
            self.opens += 1
            raise ReplicaError("it ended at once; its last lines:\nno memory")

    source = Broken("a")
    with routed(source) as router, serving(router) as address:  # type: ignore[arg-type]
        assert json.loads(call(address, "GET", "/health").body) == {"status": "ok", "replicas": ["ready"]}
        source.cut()
        until(lambda: not router.healthy)
        assert source.opens == 1 + ATTEMPTS
        reply = call(address, "GET", "/health")
        assert (reply.status, json.loads(reply.body)["status"]) == (503, "failed")
        reply = call(address, "POST", COMPLETIONS, json.dumps({"model": router.model_name, "prompt": "x"}))
        assert reply.status == 503 and "no memory" in reply.error["message"]


def test_metrics_of_each_engine_and_of_all() -> None:
    with routed(Local("a"), Local("b")) as router, serving(router) as address:  # type: ignore[arg-type]
        body = {"model": router.model_name, "prompt": "x" * 20, "max_tokens": 6, "ignore_eos": True}
        for _ in range(2):
            assert call(address, "POST", COMPLETIONS, json.dumps(body)).status == 200
        lines = dict(line.rsplit(" ", 1) for line in call(address, "GET", "/metrics").body.decode().splitlines() if line[0] != "#")
        assert lines["slipstream_generated_tokens_total"] == "12"
        each = [lines[f'slipstream_replica_generated_tokens_total{{replica="{index}"}}'] for index in range(2)]
        assert each == ["12", "0"], "the second request went where the prefix was"
        assert [lines[f'slipstream_replica_starts_total{{replica="{index}"}}'] for index in range(2)] == ["1", "1"]
        assert lines["slipstream_kv_blocks"] == "128"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.write(tmp_path_factory.mktemp("chat"))


def parent(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def no_descriptor(pid: int) -> int:
    raise OSError("no descriptor is left")


@pytest.fixture
def many_files() -> Iterator[None]:
    """A process whose next file has a number that is too large for select(2)."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 4096), limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("many_files")
def test_replicas_share_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """They are forks of one process: their answers are one engine's, also with several threads, one that is killed is back from the
    same weights, and their lives do not depend on that process's. A failed fork leaves no open file, one that ends no zombie."""
    prompts = [f"prompt {index}" for index in range(4)]
    with slipstream.init_inference(folder, threads=2) as alone:
        expected = [wait(submit(alone.engine, prompt, SAMPLED)).ids() for prompt in prompts]
    with Spare() as spare, closing(Router.local(str(folder), {"threads": 2}, [[], []], spare).open()) as router:
        one, other = (source for source in router._sources if isinstance(source, EngineProcess))

        def back(starts: int) -> int:
            """The parent of the first replica, once it has started so often and both answer as one engine does."""
            until(lambda: router.engines[0].starts == starts and len(router._ready()) == 2)
            answers = [submit(router, prompt, SAMPLED) for prompt in prompts]
            assert [wait(answer).ids() for answer in answers] == expected
            return parent(one.pid)

        zygote = back(1)
        assert zygote == parent(other.pid) != os.getpid()
        files = os.listdir("/proc/self/fd")
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no descriptor is left"):
            patch.setattr(os, "pidfd_open", no_descriptor)
            one.zygote.fork("a fork", [])  # type: ignore[union-attr]
        assert os.listdir("/proc/self/fd") == files
        facts = [engine.facts for engine in router.engines]
        assert facts[0]["shared"] > 0 and router.nbytes < sum(each["nbytes"] + each["shared"] for each in facts)
        os.kill(one.pid or 0, signal.SIGKILL)
        assert back(2) == zygote
        os.kill(zygote, signal.SIGKILL)
        until(lambda: gone(zygote))
        back(2)
        os.kill(one.pid or 0, signal.SIGKILL)
        other_pid, third = other.pid, back(3)
        assert third not in (zygote, parent(other_pid)), "another one has loaded the model"
        private = int(re.findall(r"Private_Dirty:\s+(\d+)", Path(f"/proc/{one.pid}/smaps_rollup").read_text())[0])
        assert 1024 * private < router.engines[0].facts["shared"] / 2, "what it has for itself"
        os.kill(other_pid or 0, signal.SIGKILL)  # which the new one has not forked
        until(lambda: router.engines[1].starts == 2)
        assert "ended by SIGKILL (replica 1)" in caplog.text and not Path(f"/proc/{other_pid}").exists()
        assert back(3) == parent(other.pid) == third and not gone(third)
        pids = [parent(one.pid), one.pid or 0, other.pid or 0]
    until(lambda: all(map(gone, pids)))


def test_requests_of_a_lost_replica_do_not_wait_for_a_stopped_zygote(folder: Path) -> None:
    with Spare() as spare, closing(Router.local(str(folder), {"threads": 1}, [[], []], spare).open()) as router:
        pid = router._sources[0].pid  # type: ignore[attr-defined]
        os.kill(zygote := parent(pid), signal.SIGSTOP)
        try:
            answers = [submit(router, f"prompt {number}", replace(LONG, max_tokens=400), whole=True) for number in range(8)]
            os.kill(pid, signal.SIGKILL)
            assert all(wait(answer).last().finish is Finish.LENGTH for answer in answers)
        finally:
            os.kill(zygote, signal.SIGCONT)
        until(lambda: router.engines[0].starts == 2)


def test_what_is_not_forked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA does not work in a fork, and neither do files of weights."""
    for options, forks in (({}, True), ({"device": "cpu"}, True), ({"device": "cuda:1"}, False), ({"weights_bytes": 0}, False)):
        source = Router.local(str(folder), options, [[]], Spare())._sources[0]
        assert isinstance(source, EngineProcess) and (source.zygote is not None) == forks, options


def test_all_replicas_have_one_queue(folder: Path) -> None:
    """max_waiting is of all together, for each tenant: each engine has a part, and what one refuses goes to another."""
    sources = Router.local(str(folder), {"max_waiting": 5}, [[], []], Spare())._sources
    assert [source.options["max_waiting"] for source in sources if isinstance(source, EngineProcess)] == [2, 2]
    go = threading.Event()
    with routed(*(Local(name, lambda _: go.wait(30), max_running=1, max_waiting=2) for name in "ab")) as router:  # type: ignore[arg-type, return-value]
        first = [submit(router, f"{name} {number}", tenant="x") for number in range(2) for name in "ab"]
        until(lambda: all(len(engine._tickets) == 2 for engine in router.engines))
        until(lambda: router.stats().running == 2)
        more = [submit(router, "the same prompt", tenant="x") for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests wait, and max_waiting is 2"):
            submit(router, "the same prompt", tenant="x")
        more.append(submit(router, "the same prompt", tenant="y"))
        go.set()
        assert all(wait(one).last().finish is not Finish.ERROR for one in (*first, *more))


def test_an_end_that_is_silent_is_lost() -> None:
    """Two that live stay connected; one that has stopped ends the connection, and the writer that had nothing to say."""
    left, right = (wire.Link(one) for one in socket.socketpair())
    left.send("first", 0)
    assert next(right.messages) == ["first", 0]
    for link in (left, right):
        link.live(0.1)
    time.sleep(1.5)
    left.send("later", 1)
    assert next(right.messages) == ["later", 1]
    for link in (left, right):
        link.close()
    ours, theirs = socket.socketpair()
    with theirs:
        link = wire.Link(ours)
        link.live(0.1)
        began = time.monotonic()
        assert list(link.messages) == [] and 0.4 < time.monotonic() - began < 5
        link.close()


@pytest.mark.slow
def test_a_process_that_is_stopped_is_replaced(folder: Path) -> None:
    """It takes requests and does not end; those that it has not begun are answered by the other, which nobody waits for. No schema
    is to blame for its silence."""
    cores = [[], []]
    with Spare() as spare, closing(Router.local(str(folder), {"threads": 1}, cores, spare).open()) as router:
        stopped = router._sources[0].pid  # type: ignore[attr-defined]
        os.kill(stopped, signal.SIGSTOP)
        some = {"model": router.model_name, "max_tokens": 4, "guided_regex": "[ab]{2}"}
        asked = [json.dumps({"prompt": f"schema {number}", **some}) for number in range(3)]
        with serving(router) as address, ThreadPoolExecutor(15) as clients:  # type: ignore[arg-type]
            constrained = [clients.submit(call, address, "POST", COMPLETIONS, ask) for ask in asked]
            answers = list(clients.map(lambda number: submit(router, f"prompt {number}"), range(12)))
            assert [reply.result().status for reply in constrained] == [200] * 3
        assert all(wait(one).last().finish is not Finish.ERROR for one in answers)
        until(lambda: router.engines[0].starts == 2 and router.engines[0].state is ReplicaState.READY)
        assert router._sources[0].pid != stopped  # type: ignore[attr-defined]


def test_what_a_key_has_had_of_another_engine_counts() -> None:
    """Of two keys with requests at one engine, the next to run is of the key that all engines have given less."""
    go, order = threading.Event(), list[str]()
    with routed(Local("a"), Local("b", lambda _: go.wait(30), max_running=1)) as router:  # type: ignore[arg-type, return-value]

        def serves(engine: int) -> None:
            for number, one in enumerate(router.engines):
                one.state = ReplicaState.READY if number == engine else ReplicaState.DRAINING

        def end(name: str) -> Callable[[Output], None]:
            return lambda output: order.append(name) if output.finish is not None else None

        serves(1)
        submit(router, "x runs", tenant="x")
        serves(0)
        wait(submit(router, "y has 150 tokens of the other engine", LONG, tenant="y"))
        serves(1)
        for tenant in "yxx":
            router.submit(list(f"{tenant} waits {len(order)}".encode()), GREEDY, sink=end(tenant), tenant=tenant)
        go.set()
        until(lambda: len(order) == 3)
        assert order == ["x", "x", "y"]


def test_a_key_is_charged_for_what_is_computed() -> None:
    """Not for prompts that only waited."""
    go, later = threading.Event(), threading.Event()
    source = Local("a", lambda _: go.wait(30), max_running=1)  # type: ignore[arg-type, return-value]
    with routed(source, Local("b", lambda _: later.wait(30))) as router:  # type: ignore[arg-type, return-value]
        runs = submit(router, "z runs", tenant="z")
        submit(router, "w runs at the other", tenant="w")
        until(lambda: router.stats().running == 2)
        router.engines[1].state = ReplicaState.DRAINING
        waits = Answer()
        ticket = router.submit(list(b"x waits with a prompt that nobody computes"), LONG, sink=waits, tenant="x")
        router.cancel(ticket)
        until(lambda: bool(source.engine._cancelled))
        go.set()
        assert wait(waits).last().finish is Finish.CANCELLED
        assert router.engines[1].owed == {"z": len("z runs") + 2 * len(wait(runs).ids())}
        later.set()


def test_what_a_key_has_had_elsewhere_counts_once_and_where_others_wait() -> None:
    go = threading.Event()
    with routed(*(Local(name, lambda _: go.wait(30), max_running=1, max_waiting=1) for name in "ab")) as router:  # type: ignore[arg-type, return-value]
        a, b = router.engines
        b.owed["y"] = 1000

        def told(tenant: str) -> int:
            return router.submit(list(f"{tenant} waits".encode()), GREEDY, sink=Answer(), tenant=tenant).elsewhere

        a.state = ReplicaState.DRAINING
        assert told("y") == 0, "nobody else was there"
        until(lambda: b.stats().running == 1)
        assert told("x") == 0
        b.owed["y"] = 500
        assert told("y") == 500
        b.owed["y"] = 10
        with pytest.raises(QueueFullError):
            told("y")
        assert b.owed["y"] == 10, "what is refused has told nothing"
        go.set()
        until(lambda: not b._tickets)
        go.clear()
        assert told("x") == told("y") == 0, "nobody has been there"
        go.set()


def test_servers_that_share_an_engine_share_it_between_keys() -> None:
    """Requests end in the same order, whichever server each came by, and whatever each server's own part of them is."""

    def ends(by: str) -> list[str]:
        go, order, runner = threading.Event(), dict[str, None](), HashRunner()
        go.set()

        def compute(batch: Batch) -> None:
            (chunk,) = batch.chunks  # of max_running
            name = bytes(chunk.request.tokens[: chunk.request.num_prompt]).decode()
            order.pop(name, None)
            order[name] = None  # the last forward is the end
            go.wait(30)

        runner.before = compute
        with running(runner, max_running=1) as engine, routed(Shared(engine)) as first, routed(Shared(engine)) as second:
            servers = {"1": first, "2": second}

            for server, name in zip(by, ("a0", "b0", "a1", "b1"), strict=False):
                wait(submit(servers[server], name, LONG, tenant=name[0]))
            go.clear()
            rest = list[Answer]()
            for server, (number, key) in zip(by, enumerate("aaaaaabbab"), strict=True):
                rest.append(submit(servers[server], f"{key}, {number}", tenant=key))
                until(lambda: engine.stats().running == 1)  # the first, whatever comes later
            go.set()
            for answer in rest:
                wait(answer)
        return list(order)

    together = ends("1111111111")
    assert together == ends("1212111221") == ends("1121111222")
    assert [name[0] for name in together[4:9]] == list("ababa")


def test_a_key_has_one_queue_in_an_engine_of_several_servers() -> None:
    go, runner = threading.Event(), HashRunner()
    runner.before = lambda batch: go.wait(30)  # type: ignore[assignment, return-value]
    keys = {"api_keys": ["alice", "bob"]}
    with (
        running(runner, max_running=1, max_waiting=2) as engine,
        routed(Shared(engine)) as first,
        routed(Shared(engine)) as second,
        serving(first, **keys) as one,  # type: ignore[arg-type]
        serving(second, **keys) as other,  # type: ignore[arg-type]
        ThreadPoolExecutor(4) as clients,
    ):

        def post(address: str, key: str) -> Any:
            body = json.dumps({"model": "model", "prompt": "x", "max_tokens": 2})
            return call(address, "POST", COMPLETIONS, body, {"Content-Type": "application/json", "Authorization": f"Bearer {key}"})

        waiting = [clients.submit(post, one, "alice")]
        until(lambda: engine.stats().running == 1)
        waiting += [clients.submit(post, one, "alice") for _ in range(2)]
        until(lambda: (engine.stats().running, engine.stats().waiting) == (1, 2))
        for address in (one, other):
            refused = post(address, "alice")
            assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "queue_full", "1")
        waiting.append(clients.submit(post, other, "bob"))
        until(lambda: engine.stats().waiting == 3)
        go.set()
        assert [client.result().status for client in waiting] == [200] * 4


def test_targets_go_to_the_engine() -> None:
    with routed(Local("a"), Local("b")) as router:
        targets = ({"first_within": 1e-9}, {"wait_within": 1e-9}, {"first_within": 900.0, "wait_within": 900.0}, {})
        for target in targets:
            wait(submit(router, "a prompt", replace(GREEDY, ignore_eos=True), **target))
        stats = router.stats()
        assert (stats.targets_met, stats.targets_missed) == (1, 2)
        wait(submit(router, "a prompt", first_within=900.0, waited=901.0))  # before it was submitted
        assert router.stats().targets_missed == 3
        for wrong in (0, -1.0, float("nan"), float("inf"), 10**40, True, "1"):
            with pytest.raises(ValueError, match=f"first_within is {wrong!r}; it must be a number of seconds, above 0"):
                submit(router, "a prompt", first_within=wrong)


def test_the_collector_does_not_look_at_what_a_server_has_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection of a server stops all its requests: 0.3 s, if it looks at everything."""
    counts: list[int] = []
    note = lambda *_, **__: counts.extend((gc.get_freeze_count(), len(gc.get_objects())))  # noqa: E731
    monkeypatch.setattr("slipstream.inference.server.serve", note)
    gc.unfreeze()  # what this session has imported
    try:
        main(["serve", str(folder), "--port", "0"])
    finally:
        gc.unfreeze()  # what this test has made is collected
        gc.collect()
        gc.freeze()
    frozen, looked_at = counts
    assert frozen > 50_000 > 10 * looked_at


@pytest.mark.slow
def test_a_process(folder: Path) -> None:
    """It has the model's answers, also after a kill; what had not begun waits for its return."""
    with slipstream.init_inference(folder, threads=1) as alone:
        expected = wait(submit(alone.engine, "a prompt", SAMPLED)).ids()
    with Spare() as spare, closing(Router.local(str(folder), {"threads": 1, "max_running": 1}, [[]], spare).open()) as router:
        source = router._sources[0]
        assert isinstance(source, EngineProcess)
        assert wait(submit(router, "a prompt", SAMPLED)).ids() == expected
        first = source.pid
        long = replace(LONG, max_tokens=480)
        answers = [submit(router, "a prompt", params) for params in (long, long, long, SAMPLED)]  # one after the other
        assert first is not None and answers[0].started.wait(60)
        os.kill(first, signal.SIGKILL)
        assert all(answer.over.wait(100) for answer in answers)
        assert answers[0].last().finish in (Finish.LENGTH, Finish.ERROR)
        assert answers[-1].ids() == expected
        second = source.pid
        assert router.engines[0].starts == 2 and second not in (first, None)
    with pytest.raises(ProcessLookupError):
        os.kill(second or 0, 0)


@pytest.mark.slow
def test_a_process_refuses_as_an_engine_does(folder: Path) -> None:
    with Spare() as spare, pytest.raises(ValueError, match="max_context is 5000, but the model has only 512 positions; lower it"):
        Router.local(str(folder), {"max_context": 5000}, [[]], spare).open()


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    for options, message in (
        ("--replicas 0", "argument --replicas: '0' is not a number of 1 or more"),
        ("--replicas 2", "--replicas 2 is more than the 1 cores of this process: start fewer, or say --threads 1"),
        ("--replicas 2 --weights-socket x", "--weights-socket needs the engine in the server's process; leave --replicas and"),
    ):
        with pytest.raises(SystemExit) as ended:
            sys.exit(main(["serve", str(tmp_path), "--port", "0", *options.split()]))
        assert ended.value.code == 2 and message in capsys.readouterr().err


@contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "slipstream", "serve", str(folder), *options, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield process, line.split("http://")[1].split()[0]
        finally:
            process.kill()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def descendants(pid: int) -> list[int]:
    """Processes that it, or one that it started, has started."""
    with suppress(OSError):  # it ends
        files = Path(f"/proc/{pid}/task").glob("*/children")
        own = [int(child) for file in files for child in file.read_text().split()]
        return [one for child in own if not gone(child) for one in (child, *descendants(child))]
    return []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_server_is_the_end_of_all(folder: Path, number: signal.Signals) -> None:
    """Ctrl-C reaches the server's group, and running requests finish; kill -9 leaves nobody behind."""
    with server(folder, "--replicas", "2", "--threads", "1") as (process, address):
        started = json.loads(call(address, "GET", "/health").body)
        assert started == {"status": "ok", "replicas": ["ready", "ready"]}
        engines = descendants(process.pid)
        assert len(engines) == 4, "the zygote and the spare, too"
        replies: list[Any] = []
        body = json.dumps({"model": folder.name, "prompt": "x", "max_tokens": 400, "ignore_eos": True})
        asking = threading.Thread(target=lambda: replies.append(call(address, "POST", COMPLETIONS, body)))
        if number is signal.SIGINT:
            asking.start()
            until(lambda: b"requests_active 1" in call(address, "GET", "/metrics").body or bool(replies))
        process.send_signal(number)
        process.wait(30)
        if number is signal.SIGINT:
            asking.join()
            assert (process.returncode, replies[0].status) == (0, 200)
        until(lambda: all(gone(pid) for pid in engines))
