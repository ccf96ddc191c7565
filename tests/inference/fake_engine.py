"""An engine without a model: a thread that says a known text, a token a tick. `python -m tests.inference.fake_engine` serves it."""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from slipstream.inference.core import Finish, QueueFullError, SamplingParams
from slipstream.inference.engine import ClosedError
from slipstream.inference.stats import Histogram, Stats
from slipstream.inference.text import DENSE, SLICE, TooLongError

VOCAB = 256  # a token is a byte


class Usage(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Logprob(NamedTuple):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int = 30


class Output(NamedTuple):
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None
    error: str | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    stopped_by: str | int | None = None


class FakeTokenizer:
    supports_tools = True
    template = "<tool_call> <think></think>"
    variables = frozenset({"messages", "tools", "enable_thinking", "trim"})
    marks: Mapping[str, int] = {}
    hidden: frozenset[int] = frozenset()
    vocab_size = 256
    thought_marks = (1, 2)

    def encode(self, text: str, *, special: bool = True, max_tokens: int | None = None) -> list[int]:
        if max_tokens is not None and len(text) > max(SLICE, DENSE * max_tokens):  # the real one also counts
            raise TooLongError(max_tokens)
        return list(text.encode())

    def cut(self, text: str, most: int, side: str, *, special: bool) -> list[int]:
        return list(text.encode())[-most:] if side == "left" else list(text.encode())[:most]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool = True,
        trim: bool = False,
    ) -> str:
        if messages[0]["role"] == "tool":
            raise ValueError("the template refuses")
        names = [tool["function"]["name"] for tool in tools or ()]
        text = "".join(f"<{message['role']}>{_text(message['content'], trim)}" for message in messages)
        end = "" if add_generation_prompt else "<end>"
        return f"{names}" * bool(names) + text + "<think>" * text.endswith("ponder") + end

    def token_bytes(self, token: int, /) -> bytes:
        return bytes([token])


def _text(content: Any, trim: bool) -> str:
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    return text.strip() if trim else text


class Handle:
    def __init__(self, prompt: Sequence[int], params: SamplingParams, n: int, sink: Callable[[Any], None]) -> None:
        self.sink = sink
        self.endless = False
        self.params = params
        self.prompt = bytes(prompt).decode(errors="replace")
        self.prompt_ids = prompt
        self.left = {index: self.says(index) for index in range(n)}
        self.num_sent = Counter[int]()

    def says(self, index: int) -> list[str]:
        """Its tokens, which depend on nothing but the request."""
        if self.params.json_schema is not None:
            return list(json.dumps(example(json.loads(self.params.json_schema))).replace("Infinity", "1e999"))
        wants_call = "use a tool" in self.prompt and "<tool>" not in self.prompt
        if self.params.grammar is not None and self.prompt.endswith("<think>"):
            return ["I ", "wonder", ".</th", "ink>\n\n", '{"a": ', "7}"]
        if self.params.grammar is not None and not wants_call:
            return ["by ", "grammar"]
        if "think" in self.prompt:
            return ["<th", "ink>\nI ", "wonder", ".\n</th", "ink>\n\n", "So ", "be it"]
        if wants_call:
            after = " Done." if "then talk" in self.prompt else ""
            return ["Sure", ".\n<tool", '_call>{"name": "add", ', '"arguments": {"a": 7}}', f"</tool_call>{after}", ""]
        if "unicode" in self.prompt:
            return ["", "naïve ", "\u2028", "🦜", "\r\n", "\u0085end"]
        words = [f"{word} " for word in self.prompt[-40:].split()] or ["nothing "]
        return [*(words[i % len(words)] for i in range(6)), f"{index}", f" seed {self.params.seed}"]


def example(schema: Any) -> Any:
    """Something that has the schema, as far as the tests' schemas go."""
    if "anyOf" in schema:
        return example(schema["anyOf"][-1])
    if "const" in schema:
        return schema["const"]
    if schema.get("type") == "object":
        return {name: example(value) for name, value in schema.get("properties", {}).items()}
    return {"integer": 7, "string": "said", "number": math.inf}[schema["type"]]


class FakeEngine:
    """What the prompt has in it decides: "forever" ends only when cancelled ("loud": 50 kB a token), "later" when asked again,
    "explode" fails, "kill" ends the engine, "full" and "gone" are refused."""

    model_name = "fake/model"
    max_context = 4096
    adapters: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = {}
    tokenizer = FakeTokenizer()

    def __init__(self, tick: float = 0.0005) -> None:
        self.tick = tick
        self.compiled = threading.Event()  # a schema that has "slow" in it waits for this
        self.compiled.set()
        self.healthy = True
        self.submitted: list[tuple[SamplingParams, int, int]] = []
        self.targets: list[tuple[float | None, float | None]] = []
        self.waited: list[float] = []  # seconds from the arrival of each body
        self.cancelled: list[Handle] = []
        self.asked: set[str] = set()
        self.generated = 0
        self.lock = threading.Lock()
        self.running: list[Handle] = []
        self.held: set[Handle] = set()
        threading.Thread(target=self._run, daemon=True).start()

    def prepare(self) -> None:
        pass

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        n: int,
        priority: int,
        salt: str,
        tenant: str,
        adapter: str,
        first_within: float | None,
        wait_within: float | None,
        waited: float,
        sink: Callable[[Any], None],
    ) -> Handle:
        if wrong := [token for token in prompt if token >= VOCAB]:
            raise ValueError(f"the prompt has token {wrong[0]}; this model's tokens are 0 to {VOCAB - 1}")
        if "slow" in (params.json_schema or ""):
            self.compiled.wait()
        try:
            handle = Handle(prompt, params, n, sink)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"json_schema cannot be served: {error!r}") from None
        handle.endless = "forever" in handle.prompt or ("later" in handle.prompt and handle.prompt in self.asked)
        self.asked.add(handle.prompt)
        if "full" in handle.prompt:
            raise QueueFullError("the queue is full: 1024 wait")
        if "gone" in handle.prompt:
            raise ClosedError("the engine is closed")
        with self.lock:
            self.submitted.append((params, n, priority))
            self.targets.append((first_within, wait_within))
            self.waited.append(waited)
            self.running.append(handle)
        return handle

    def load_adapter(self, name: str, folder: Any, *, replace: bool) -> None:
        raise ValueError("this fake loads none")

    def unload_adapter(self, name: str) -> None:
        raise ValueError("this fake has none")

    def cancel(self, handle: Handle) -> None:
        with self.lock:
            self.cancelled.append(handle)
            if handle in self.running:
                self.running.remove(handle)
        for index in handle.left:
            handle.sink(Output(index, "", finish=Finish.CANCELLED, usage=Usage(0, 0, 0)))

    def hold(self, handle: Handle, held: bool) -> None:
        (self.held.add if held else self.held.discard)(handle)

    def stats(self) -> Stats:
        histogram = Histogram((0.1, 1.0), (2, 1, 1), 3.5)
        return Stats(
            healthy=self.healthy,
            running=len(self.running),
            blocks=100,
            blocks_used=25,
            block_size=16,
            prompt_tokens=10,
            cached_tokens=4,
            generated_tokens=self.generated,
            finished={Finish.STOP: 3},
            tokens_per_second=12.5,
            **dict.fromkeys((field.name for field in dataclasses.fields(Stats) if field.type == "Histogram"), histogram),
        )

    def _run(self) -> None:
        while True:
            with self.lock:
                running = [handle for handle in self.running if handle not in self.held]
            for handle in running:
                try:
                    for index in list(handle.left):
                        self._step(handle, index)
                except RuntimeError:  # of the sink: its loop was closed
                    handle.left.clear()
                if not handle.left:
                    with self.lock:
                        self.running = [other for other in self.running if other is not handle]
            time.sleep(self.tick)

    def _step(self, handle: Handle, index: int) -> None:
        handle.num_sent[index] += 1
        self.generated += 1
        token, tokens = handle.num_sent[index], handle.left[index]
        usage = Usage(len(handle.prompt_ids), 3, token)
        if "explode" in handle.prompt and token == 3:
            del handle.left[index]
            handle.sink(Output(index, "", finish=Finish.ERROR, usage=usage, error="the sampler met a NaN"))
            return
        if "kill" in handle.prompt:
            self.healthy = False
            for other in self.running:
                for one in list(other.left):
                    del other.left[one]
                    other.sink(Output(one, "", finish=Finish.ERROR, usage=usage, error="the device is lost"))
            return
        if handle.endless:
            handle.sink(Output(index, "more " * (10_000 if "loud" in handle.prompt else 1)))
            return
        text = tokens[token - 1]
        finish = Finish.STOP if token == len(tokens) else Finish.LENGTH if token == handle.params.max_tokens else None
        logprobs: tuple[Logprob, ...] = ()
        if handle.params.logprobs is not None:
            top = tuple((97 + i, -1.0 - i) for i in range(handle.params.logprobs))
            logprobs = (Logprob(65 + token, -0.5 if token > 1 else float("-inf"), top),)
        if finish is not None:
            del handle.left[index]
        scored: tuple[Logprob | None, ...] | None = None
        if token == 1 and (num := handle.params.prompt_logprobs) is not None:
            top = tuple((97 + i, -1.0 - i) for i in range(num))
            scored = (None, *(Logprob(one, -2.0, top) for one in handle.prompt_ids[1:]))
        handle.sink(Output(index, text, (token,), logprobs, finish, usage if finish else None, None, scored))


if __name__ == "__main__":
    from slipstream.inference.server import serve

    serve(FakeEngine(tick=0.2), sockets=[socket.create_server(("127.0.0.1", 0))])
