"""Convert an engine's outputs to response formats, streaming and non-streaming.

A format receives the outputs of every choice in order; their `index` is the choice. In OpenAI's two formats with `choices`,
`pieces` makes the chunks of a stream from new outputs, and `choice` makes the entry of a non-streaming response from all outputs of
a choice, concatenated by `join`. Other APIs' formats have the blocks of one message, which they make of a chat's deltas.
"""

from __future__ import annotations

import codecs
import itertools
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, NamedTuple

from slipstream.inference.core import Finish
from slipstream.inference.sequence import Logprob, Output, Usage
from slipstream.inference.server.bodies import (
    ChatChoice,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    UsageBody,
)
from slipstream.inference.server.calls import CallFinder, CallForm, Functions, Thoughts
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.gate import JSON
from slipstream.inference.server.requests import SampledFields, StreamOptions
from slipstream.inference.text import Tokenizer


def join(index: int, outputs: Sequence[Output]) -> Output:
    """Merge consecutive outputs of one sequence, which is choice `index`."""
    last = outputs[-1]
    return Output(
        index,
        "".join(output.text for output in outputs),
        tuple(token for output in outputs for token in output.token_ids),
        tuple(logprob for output in outputs for logprob in output.logprobs),
        last.finish,
        last.usage,
        last.error,
        outputs[0].prompt_logprobs,
        last.stopped_by,
    )


def joined(batch: Iterable[tuple[int, Output]]) -> list[Output]:
    """Merge the outputs of each choice, in the order of the choices' first outputs."""
    outputs: dict[int, list[Output]] = {}
    for choice, output in batch:
        outputs.setdefault(choice, []).append(output)
    return [join(choice, parts) for choice, parts in outputs.items()]


def event(body: Any, name: str = "") -> bytes:
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + JSON(body).body + b"\n\n"


class Format(ABC):
    """The response format of one request; it keeps state per choice, so requests never share one."""

    @abstractmethod
    def begin(self) -> bytes:
        """The first bytes of a stream."""

    @abstractmethod
    def events(self, part: Output) -> bytes:
        """The events of new outputs; none while the text is held back."""

    @abstractmethod
    def end(self, usages: Mapping[int, Usage]) -> bytes:
        """The last bytes of a stream. `usages`: by choice."""

    @abstractmethod
    def error(self, error: RequestError) -> bytes:
        """The event of an error, which ends the stream."""

    @abstractmethod
    def body(self, choices: Sequence[Output], usages: Mapping[int, Usage]) -> Any:
        """A non-streaming response."""


@dataclass(eq=False)
class ChoicesFormat(Format):
    """OpenAI's formats with `choices`."""

    prefix: ClassVar[str]  # of response ids
    response_object: ClassVar[str]  # the `object` field of a non-streaming response
    chunk_object: ClassVar[str]  # the `object` field of a stream's chunks

    request: SampledFields
    model: str
    tokenizer: Tokenizer
    _: KW_ONLY
    logprobs: bool
    prompts: Sequence[Sequence[int]]  # their tokens
    width: int = 1  # choices per prompt
    silent: bool = False  # leave out the token that the engine generates

    def __post_init__(self) -> None:
        options = self.request.stream_options or StreamOptions()
        self.include_usage = bool(options.include_usage)
        self._generated = (
            Counter[int]() if options.continuous_usage_stats else None
        )  # choice -> tokens, if each chunk has its usage
        self._started: set[int] = set()  # choices of which something was returned
        self.head: dict[str, Any] = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}

    @abstractmethod
    def pieces(self, part: Output) -> list[dict[str, Any]]:
        """Return the `choices` entries of the next chunks; none while the text is held back."""

    @abstractmethod
    def choice(self, joined: Output) -> CompletionChoice | ChatChoice:
        """Return the `choices` entry of a non-streaming response."""

    def begin(self) -> bytes:
        return b""

    def events(self, part: Output) -> bytes:
        usage = self._usage_so_far(part)
        return b"".join(self._chunk([choice], usage) for choice in self.pieces(part))

    def end(self, usages: Mapping[int, Usage]) -> bytes:
        return (self._chunk([], self._usage(usages)) if self.include_usage else b"") + b"data: [DONE]\n\n"

    def error(self, error: RequestError) -> bytes:
        return event(error.body())

    def body(self, choices: Sequence[Output], usages: Mapping[int, Usage]) -> Any:
        entries = [self.choice(joined) for joined in choices]
        return {**self.head, "object": self.response_object, "choices": entries, "usage": self._usage(usages)}

    def _chunk(self, choices: list[dict[str, Any]], usage: Any = None, **more: Any) -> bytes:
        body = {**self.head, "object": self.chunk_object, "choices": choices, **more}
        if self.include_usage:
            body["usage"] = usage
        return event(body)

    def _usage_so_far(self, part: Output) -> UsageBody | None:
        if self._generated is None:
            return None
        self._generated[part.index] += len(part.token_ids)
        prompt, completion = len(self.prompts[part.index // self.width]), 0 if self.silent else self._generated[part.index]
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _usage(self, usages: Mapping[int, Usage]) -> UsageBody:
        """Sum usage over choices. A prompt is counted once."""
        firsts = [usage for choice, usage in usages.items() if choice % self.width == 0]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        completion = 0 if self.silent else sum(usage.completion_tokens for usage in usages.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
        }

    def _scores(self, part: Output, prompt: Sequence[int]) -> dict[str, Any]:
        """What the response says about a prompt: its tokens, and their log-probabilities."""
        scores: dict[str, Any] = {"prompt_token_ids": [*prompt]} if self.request.return_token_ids else {}
        if self.request.prompt_logprobs is not None:
            scores["prompt_logprobs"] = [None if entry is None else self._ranked(entry) for entry in part.prompt_logprobs or ()]
        return scores

    def _ranked(self, entry: Logprob) -> dict[str, PromptLogprob]:
        """Token id -> log-probability, for the likeliest tokens and the prompt's own."""
        ranks = {token: (value, rank) for rank, (token, value) in enumerate(entry.top, 1)}
        ranks.setdefault(entry.token_id, (entry.logprob, entry.rank))
        return {
            str(token): PromptLogprob(
                logprob=_finite(value), rank=rank, decoded_token=self.tokenizer.token_bytes(token).decode("utf-8", "replace")
            )
            for token, (value, rank) in ranks.items()
        }

    def _written(self, token: int) -> bytes:
        """The bytes that a token adds to an answer's text."""
        hides = self.request.skip_special_tokens is not False and token in self.tokenizer.hidden
        return b"" if hides else self.tokenizer.token_bytes(token)


@dataclass(eq=False, kw_only=True)
class CompletionFormat(ChoicesFormat):
    prefix, response_object, chunk_object = "cmpl", "text_completion", "text_completion"

    echo: Sequence[str | Sequence[int]] = ()  # the prompts as they came, text or token ids, if the response repeats them
    kept: int = 0  # choices of each prompt in a response, the likeliest; 0: all

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept = self.kept or self.width
        self._offsets: dict[int, int] = {}  # choice -> offset of its next token in its text
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}  # choice -> decoder; counts a character once it is complete

    def body(self, choices: Sequence[Output], usages: Mapping[int, Usage]) -> Any:
        kept: list[Output] = []
        for first in range(0, len(choices) if self.kept < self.width else 0, self.width):
            best = sorted(choices[first : first + self.width], key=_likeliness, reverse=True)[: self.kept]
            kept += [replace(joined, index=len(kept) + place) for place, joined in enumerate(best)]
        return super().body(kept or choices, usages)

    def pieces(self, part: Output) -> list[dict[str, Any]]:
        ids = self.request.return_token_ids and part.token_ids
        if not (part.text or part.finish or part.prompt_logprobs or part.logprobs or ids):
            return []
        return [dict(self.choice(part))]

    def choice(self, joined: Output) -> CompletionChoice:
        part = joined
        if self.silent:
            part = replace(joined, text="", token_ids=(), logprobs=(), finish=joined.finish and Finish.LENGTH)
        scores = {} if part.index in self._started else self._scores(part, self.prompts[part.index // self.kept])
        choice: CompletionChoice = {
            "index": part.index,
            "text": self._repeated(part.index) + part.text if self.echo and part.index not in self._started else part.text,
            "logprobs": self._logprobs(part) if self.logprobs else None,
            "finish_reason": _reason(part.finish),
        }
        if part.finish is not None:
            choice["stop_reason"] = part.stopped_by
        if self.request.return_token_ids:
            choice["token_ids"] = [*part.token_ids]
        self._started.add(part.index)
        return {**choice, **scores}  # type: ignore[typeddict-item]

    def _repeated(self, index: int) -> str:
        prompt = self.echo[index // self.kept]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special=False)

    def _logprobs(self, part: Output) -> CompletionLogprobs:
        """Tokens are keyed by their text: of several with the same text, top_logprobs has only the most likely."""
        offset = self._offsets.get(part.index, 0)
        decoder = self._decoders.setdefault(part.index, codecs.getincrementaldecoder("utf-8")("replace"))
        body: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        scored: list[tuple[int, Logprob | None]] = [(entry.token_id, entry) for entry in part.logprobs]
        prompt: Sequence[int] = ()
        if self.echo and part.prompt_logprobs is not None:
            prompt = self.prompts[part.index // self.kept]
            scored = [*zip(prompt, part.prompt_logprobs, strict=True), *scored]
            written = decoder.decode(b"".join(map(self.tokenizer.token_bytes, prompt)), True)
            offset = len(self._repeated(part.index)) - len(written)  # negative if encoding puts a token or a space before the text
        for place, (token, entry) in enumerate(scored):
            body["tokens"].append(self._name(token))
            body["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            body["top_logprobs"].append(None if entry is None else self._top(entry))
            body["text_offset"].append(max(offset, 0))
            offset += len(decoder.decode(self.tokenizer.token_bytes(token) if place < len(prompt) else self._written(token)))
        self._offsets[part.index] = offset
        return body

    def _top(self, entry: Logprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, value in (*entry.top, (entry.token_id, entry.logprob)):  # OpenAI always includes the sampled token
            top.setdefault(self._name(token_id), _finite(value))
        return top

    def _name(self, token_id: int) -> str:
        """The token's text, or OpenAI's notation for an incomplete UTF-8 sequence, bytes:\\xe2\\x80."""
        raw = self.tokenizer.token_bytes(token_id)
        try:
            return f"token_id:{token_id}" if self.request.return_tokens_as_token_ids else raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Thinking(NamedTuple):
    """A model that reasons before it answers: the marks around its reasoning, and whether the prompt ends with the first mark."""

    marks: tuple[str, str]
    begun: bool


@dataclass(eq=False, kw_only=True)
class ChatFormat(ChoicesFormat):
    """The chat format. With `forced` functions the output is one function's arguments, or {"name", "arguments"} if there are
    several. With `allowed` functions the output is free text, in which `CallFinder` finds at most `max_calls` calls."""

    prefix, response_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    forced: Sequence[str]
    named: bool  # tool_choice names the function
    allowed: Functions
    max_calls: int | None = None
    calls: CallForm | None = None
    thinking: Thinking | None = None
    shows_thoughts: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_reasoned = 0  # tokens between the marks of reasoning, of all choices, if each mark is one token
        thinking, marks = self.thinking, self.tokenizer.marks
        self._counts = thinking is not None and all(mark in marks for mark in thinking.marks[thinking.begun :])
        self._call_mark = self.calls.open if self.allowed and self.calls is not None else ""  # it ends reasoning too
        self._reasons: dict[int, bool | None] = {}  # choice -> whether its next token is one of them; None: no text yet
        self._thoughts: dict[int, Thoughts] = {}
        self._finders: dict[int, CallFinder] = {}
        self._texts: dict[int, str] = {}  # choice -> text of a call whose function is known only at its end
        self._called: set[int] = set()  # choices whose only forced call has begun; it begins after the reasoning
        self._cut: set[int] = set()  # choices whose forced call is truncated

    def body(self, choices: Sequence[Output], usages: Mapping[int, Usage]) -> Any:
        return {**super().body(choices, usages), **self._scores(choices[0], self.prompts[0])}

    def events(self, part: Output) -> bytes:
        scores = {} if part.index in self._started else self._scores(part, self.prompts[0])
        usage = self._usage_so_far(part)
        return b"".join(self._chunk([piece], usage, **({} if number else scores)) for number, piece in enumerate(self.pieces(part)))

    def pieces(self, part: Output) -> list[dict[str, Any]]:
        logprobs = self._logprobs(part) if self.logprobs and part.logprobs else None
        deltas = [*self._deltas(part)]
        ids = {"token_ids": [*part.token_ids]} if self.request.return_token_ids and part.token_ids else {}
        if (logprobs or ids) and not deltas:
            deltas.append({"content": ""})
        choices: list[dict[str, Any]] = [
            {"index": part.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if choices:
            choices[-1] |= {"logprobs": logprobs, **ids}
        if part.finish is not None:
            ended = {"finish_reason": self._reason(part), "stop_reason": part.stopped_by}
            choices.append({"index": part.index, "delta": {}, "logprobs": None, **ended})
        return choices

    def written(self, part: Output) -> Iterator[tuple[str, tuple[str, str] | None, str]]:
        """What a part adds to its message, for other APIs: ("reasoning", "message" or "function_call"; id and name of a new call;
        text)."""
        for delta in (piece["delta"] for piece in self.pieces(part)):
            yield "reasoning", None, delta.get("reasoning_content", "")
            yield "message", None, delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                yield "function_call", (call["id"], function["name"]) if "id" in call else None, function["arguments"]

    def choice(self, joined: Output) -> ChatChoice:
        deltas = [*self._deltas(joined)]
        text = "".join(delta.get("content") or "" for delta in deltas)
        calls: list[Any] = []
        for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
            if call.pop("index") == len(calls):
                calls.append(call)
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        answer: ChatChoice = {
            "index": joined.index,
            "message": {"role": "assistant", "content": None if calls and not text else text, "refusal": None},
            "logprobs": self._logprobs(joined) if self.logprobs else None,
            "finish_reason": self._reason(joined) or "stop",
            "stop_reason": joined.stopped_by,
        }
        for delta in deltas:
            if "reasoning" in delta:
                answer["message"] |= delta  # type: ignore[typeddict-item]
        if self.request.return_token_ids:
            answer["token_ids"] = [*joined.token_ids]
        if calls:
            answer["message"]["tool_calls"] = calls
        return answer

    def _deltas(self, part: Output) -> Iterator[dict[str, Any]]:
        """What a part adds to its message: role, reasoning, text, calls."""
        if part.index not in self._started:
            self._started.add(part.index)
            yield {"role": "assistant", "content": None if self.forced else ""}
        thought, part = self._think(part)
        if thought:
            yield {"reasoning_content": thought, "reasoning": thought}
        for one in self._found(part):
            yield {"content": one} if isinstance(one, str) else {"tool_calls": [one]}

    def _found(self, part: Output) -> Iterator[str | dict[str, Any]]:
        """The text in a part that is certain, and the calls."""
        index = part.index
        if len(self.forced) > 1:
            text = self._texts[index] = self._texts.get(index, "") + part.text
            if part.finish is not None:
                try:
                    call = json.loads(text)
                    yield self._call(0, call["name"], json.dumps(call["arguments"], allow_nan=False))
                except (ValueError, KeyError, TypeError, RecursionError):  # truncated; it may not name its function yet
                    self._cut.add(index)
                    if text:
                        yield text
        elif self.allowed:
            finder = self._finders.setdefault(index, CallFinder(self.allowed, self.max_calls, self.calls))
            numbers = itertools.count(finder.num_calls)
            for one in finder.push(part.text, last=part.finish is not None):
                yield one if isinstance(one, str) else self._call(next(numbers), *one)
        elif part.text and self.forced:  # none if the reasoning before the call is cut off
            if index not in self._called:
                self._called.add(index)
                yield self._call(0, self.forced[0], "")
            yield {"index": 0, "function": {"arguments": part.text}}
        elif part.text:
            yield part.text

    def _think(self, part: Output) -> tuple[str, Output]:
        if self.thinking is None:
            return "", part
        if self._counts:
            self._count(part, self.thinking)
        thoughts = self._thoughts.setdefault(part.index, Thoughts(*self.thinking, self._call_mark))
        thought, text = thoughts.push(part.text, last=part.finish is not None)
        return thought if self.shows_thoughts else "", replace(part, text=text)

    def _count(self, part: Output, thinking: Thinking) -> None:
        """Count tokens of reasoning, which is where `Thoughts` finds it: at the beginning, once."""
        opening, *ends = map(self.tokenizer.marks.get, (*thinking.marks, self._call_mark))
        reasons = self._reasons.get(part.index, thinking.begun or None)
        for token in part.token_ids:
            if reasons:
                reasons = token not in ends
                self.num_reasoned += reasons
            elif reasons is None and (token == opening or self._written(token).strip()):
                reasons = token == opening
        self._reasons[part.index] = reasons

    def _usage(self, usages: Mapping[int, Usage]) -> UsageBody:
        usage = super()._usage(usages)
        if self._counts:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoned}
        return usage

    def _call(self, number: int, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"index": number, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}

    def _reason(self, part: Output) -> Any:
        """A call of the function that the client named ends with "stop", any other call with "tool_calls" (OpenAI's guide)."""
        reason = _reason(part.finish)
        forced = self.forced and not self.named and part.index not in self._cut
        called = self._finders[part.index].num_calls if self.allowed else forced
        return "tool_calls" if reason == "stop" and called else reason

    def _logprobs(self, part: Output) -> ChatLogprobs:
        return {
            "content": [
                {
                    **self._logprob(entry.token_id, entry.logprob),  # type: ignore[typeddict-item]
                    "top_logprobs": [self._logprob(token_id, value) for token_id, value in entry.top],
                }
                for entry in part.logprobs
            ]
        }

    def _logprob(self, token_id: int, logprob: float) -> Any:
        raw = self.tokenizer.token_bytes(token_id)
        name = f"token_id:{token_id}" if self.request.return_tokens_as_token_ids else raw.decode("utf-8", "replace")
        return {"token": name, "logprob": _finite(logprob), "bytes": list(raw)}


class BlocksFormat(Format):
    """A format of one message, which is a list of blocks of reasoning, text and calls, in the order in which the model writes them.
    Kinds are those of `ChatFormat.written`."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self.finish: Finish | None = None
        self.stopped_by: str | int | None = None
        self.blocks: list[dict[str, Any]] = []
        self._kind = ""  # of the last block; "": it is complete

    @abstractmethod
    def begin_block(self, kind: str, call: tuple[str, str] | None) -> bytes:
        """Append a block. `call`: the id and the name of a call."""

    @abstractmethod
    def add(self, kind: str, text: str) -> bytes:
        """Append to the last block."""

    @abstractmethod
    def end_block(self, cut: bool) -> bytes:
        """Complete the last block. `cut`: max_tokens has cut it off."""

    @abstractmethod
    def message(self, usage: Usage) -> dict[str, Any]:
        """The message so far."""

    def events(self, part: Output) -> bytes:
        self.finish, self.stopped_by, events = part.finish, part.stopped_by, b""
        for kind, call, text in self.chat.written(part):
            if call or (text and kind != self._kind):
                events += self.complete() + self.begin_block(kind, call)
                self._kind = kind
            if text:
                events += self.add(kind, text)
        return events

    def complete(self, cut: bool = False) -> bytes:
        is_open, self._kind = self._kind, ""
        return self.end_block(cut) if is_open else b""

    def body(self, choices: Sequence[Output], usages: Mapping[int, Usage]) -> Any:
        for joined in choices:
            self.events(joined)
        self.complete(self.finish is Finish.LENGTH)
        return self.message(usages[0])


def _reason(finish: Finish | None) -> Any:
    return None if finish is None else finish.value


def _likeliness(joined: Output) -> float:
    """The mean log-probability of a token."""
    return sum(entry.logprob for entry in joined.logprobs) / max(1, len(joined.logprobs))


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token of probability 0."""
    return max(logprob, -9999.0)
