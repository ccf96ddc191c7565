"""Convert an engine's outputs to OpenAI's two response formats, streaming and non-streaming.

A format receives the outputs of every choice in order. `pieces` makes the chunks of a stream from new outputs; `choice` makes the
entry of a non-streaming response from all outputs of a choice, concatenated by `join`.
"""

from __future__ import annotations

import codecs
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.inference.core import Finish
from slipstream.inference.engine import Logprob, Output, Usage
from slipstream.inference.server.backend import ServedTokenizer
from slipstream.inference.server.calls import CallFinder
from slipstream.inference.server.protocol import ChatChoice, ChatLogprobs, CompletionChoice, CompletionLogprobs, UsageBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Consecutive outputs of one choice, concatenated."""

    index: int  # of the choice
    text: str
    logprobs: Sequence[Logprob]
    finish: Finish | None


def join(index: int, outputs: Sequence[Output]) -> Joined:
    return Joined(
        index=index,
        text="".join(output.text for output in outputs),
        logprobs=[logprob for output in outputs for logprob in output.logprobs],
        finish=outputs[-1].finish,
    )


def usage_body(usages: Iterable[tuple[bool, Usage]]) -> UsageBody:
    """Sum usage over choices. A prompt is counted once: for the choice that is marked as its first."""
    prompt = cached = completion = 0
    for first, usage in usages:
        completion += usage.completion_tokens
        if first:
            prompt += usage.prompt_tokens
            cached += usage.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Format(ABC):
    """The response format of one request; it keeps state per choice, so requests never share one."""

    prefix: str  # of response ids
    response_object: str  # the `object` field of a non-streaming response
    chunk_object: str  # the `object` field of a stream's chunks

    def __init__(self, model: str, tokenizer: ServedTokenizer, *, logprobs: bool) -> None:
        self.tokenizer = tokenizer
        self.logprobs = logprobs
        self.head: dict[str, Any] = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    @abstractmethod
    def pieces(self, part: Joined) -> list[dict[str, Any]]:
        """Return the `choices` entries of the next chunks; none while the text is held back."""

    @abstractmethod
    def choice(self, joined: Joined) -> CompletionChoice | ChatChoice:
        """Return the `choices` entry of a non-streaming response."""


class CompletionFormat(Format):
    prefix, response_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: ServedTokenizer, *, logprobs: bool) -> None:
        super().__init__(model, tokenizer, logprobs=logprobs)
        self._offsets: dict[int, int] = {}  # choice -> offset of its next token in its text
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}  # choice -> decoder; counts a character once it is complete

    def pieces(self, part: Joined) -> list[dict[str, Any]]:
        if not (part.text or part.finish or (self.logprobs and part.logprobs)):
            return []
        return [dict(self.choice(part))]

    def choice(self, joined: Joined) -> CompletionChoice:
        return {
            "index": joined.index,
            "text": joined.text,
            "logprobs": self._logprobs(joined) if self.logprobs else None,
            "finish_reason": _reason(joined.finish),
        }

    def _logprobs(self, part: Joined) -> CompletionLogprobs:
        """Tokens are keyed by their text: of several with the same text, top_logprobs has only the most likely."""
        offset = self._offsets.get(part.index, 0)
        decoder = self._decoders.setdefault(part.index, codecs.getincrementaldecoder("utf-8")("replace"))
        body: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in part.logprobs:
            top: dict[str, float] = {}
            for token_id, value in (*entry.top, (entry.token_id, entry.logprob)):  # OpenAI always includes the sampled token
                top.setdefault(self._name(token_id), _finite(value))
            body["tokens"].append(self._name(entry.token_id))
            body["token_logprobs"].append(_finite(entry.logprob))
            body["top_logprobs"].append(top)
            body["text_offset"].append(offset)
            offset += len(decoder.decode(self.tokenizer.token_bytes(entry.token_id)))
        self._offsets[part.index] = offset
        return body

    def _name(self, token_id: int) -> str:
        """The token's text, or OpenAI's notation for an incomplete UTF-8 sequence, bytes:\\xe2\\x80."""
        raw = self.tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatFormat(Format):
    """The chat format. With `forced` functions the output is one function's arguments, or {"name", "arguments"} if there are
    several. With `allowed` functions the output is free text, in which `CallFinder` finds at most `max_calls` calls."""

    prefix, response_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        tokenizer: ServedTokenizer,
        *,
        logprobs: bool,
        forced: Sequence[str],
        named: bool,
        allowed: Sequence[str] = (),
        max_calls: int | None = None,
    ) -> None:
        super().__init__(model, tokenizer, logprobs=logprobs)
        self.forced = forced
        self.named = named  # tool_choice names the function
        self.allowed = allowed
        self.max_calls = max_calls
        self._finders: dict[int, CallFinder] = {}
        self._started: set[int] = set()
        self._texts: dict[int, str] = {}  # choice -> text of a call whose function is known only at its end
        self._cut: set[int] = set()  # choices whose forced call is truncated

    def pieces(self, part: Joined) -> list[dict[str, Any]]:
        logprobs = self._logprobs(part) if self.logprobs and part.logprobs else None
        deltas: list[dict[str, Any]] = []
        if part.index not in self._started:
            self._started.add(part.index)
            deltas.append({"role": "assistant", "content": None if self.forced else ""})
            if len(self.forced) == 1:
                deltas.append({"tool_calls": [{"index": 0, **self._call(self.forced[0], "")}]})
        if len(self.forced) > 1:
            self._texts[part.index] = self._texts.get(part.index, "") + part.text
            if part.finish is not None:
                text, calls = self._split(part.index, self._texts.pop(part.index))
                deltas += [{"tool_calls": [{"index": 0, **self._call(*call)}]} for call in calls]
                deltas += [{"content": text}] if text else []
        elif part.text and self.forced:
            deltas.append({"tool_calls": [{"index": 0, "function": {"arguments": part.text}}]})
        elif self.allowed:
            text, calls = self._parse(part)
            first = self._finders[part.index].num_calls - len(calls)
            deltas += [{"content": text}] if text else []
            deltas += [{"tool_calls": [{"index": first + num, **self._call(*call)}]} for num, call in enumerate(calls)]
        elif part.text:
            deltas.append({"content": part.text})
        if logprobs and not deltas:
            deltas.append({"content": ""})
        choices: list[dict[str, Any]] = [
            {"index": part.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if choices:
            choices[-1]["logprobs"] = logprobs
        if part.finish is not None:
            choices.append({"index": part.index, "delta": {}, "logprobs": None, "finish_reason": self._reason(part)})
        return choices

    def choice(self, joined: Joined) -> ChatChoice:
        if len(self.forced) == 1:
            text, calls = "", [(self.forced[0], joined.text)]
        elif self.forced:
            text, calls = self._split(joined.index, joined.text)
        else:
            text, calls = self._parse(joined) if self.allowed else (joined.text, [])
        answer: ChatChoice = {
            "index": joined.index,
            "message": {"role": "assistant", "content": None if calls and not text else text, "refusal": None},
            "logprobs": self._logprobs(joined) if self.logprobs else None,
            "finish_reason": self._reason(joined) or "stop",
        }
        if calls:
            answer["message"]["tool_calls"] = [self._call(*call) for call in calls]  # type: ignore[misc]
        return answer

    def _parse(self, part: Joined) -> tuple[str, list[tuple[str, str]]]:
        finder = self._finders.setdefault(part.index, CallFinder(self.allowed, self.max_calls))
        return finder.push(part.text, last=part.finish is not None)

    def _split(self, index: int, text: str) -> tuple[str, list[tuple[str, str]]]:
        """Parse {"name", "arguments"}. A truncated call is returned as text, since it may not name its function yet."""
        try:
            call = json.loads(text)
            return "", [(call["name"], json.dumps(call["arguments"]))]
        except (ValueError, KeyError, TypeError):
            self._cut.add(index)
            return text, []

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": arguments}}

    def _reason(self, part: Joined) -> Any:
        """A call of the function that the client named ends with "stop", any other call with "tool_calls" (OpenAI's guide)."""
        reason = _reason(part.finish)
        forced = self.forced and not self.named and part.index not in self._cut
        called = self._finders[part.index].num_calls if self.allowed else forced
        return "tool_calls" if reason == "stop" and called else reason

    def _logprobs(self, part: Joined) -> ChatLogprobs:
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
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _reason(finish: Finish | None) -> Any:
    return None if finish is None else finish.value


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token of probability 0."""
    return max(logprob, -9999.0)
