"""From an engine's outputs to OpenAI's two answer formats, each streamed and whole.

A format is told of every output of every choice, in the order of their making. `pieces` is what a stream says of one output;
`choice` is what a whole answer says of all outputs of a choice together, joined by `join`.
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
from slipstream.inference.server.backend import Logprob, Output, Tokenizer, Usage
from slipstream.inference.server.calls import CallFinder
from slipstream.inference.server.protocol import ChatChoice, ChatLogprobs, CompletionChoice, CompletionLogprobs, UsageBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Outputs of one choice, one after another."""

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
    """Sum over choices; of those of one prompt, only the one marked first counts it."""
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
    """One answer's. Not shared between requests."""

    prefix: str  # of ids
    whole: str  # OpenAI's name of the object
    chunk: str

    def __init__(self, model: str, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self.tokenizer = tokenizer
        self.logprobs = logprobs
        self.head: dict[str, Any] = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    @abstractmethod
    def pieces(self, part: Joined) -> list[dict[str, Any]]:
        """The choices of the chunks that say what is new; none if nothing can be said yet."""

    @abstractmethod
    def choice(self, whole: Joined) -> CompletionChoice | ChatChoice:
        """All of it."""


class CompletionFormat(Format):
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        super().__init__(model, tokenizer, logprobs=logprobs)
        self._offsets: dict[int, int] = {}  # of the next token in its choice's text
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}  # of a choice: a character is counted where it is complete

    def pieces(self, part: Joined) -> list[dict[str, Any]]:
        if not (part.text or part.finish or (self.logprobs and part.logprobs)):
            return []
        return [dict(self.choice(part))]

    def choice(self, whole: Joined) -> CompletionChoice:
        return {
            "index": whole.index,
            "text": whole.text,
            "logprobs": self._logprobs(whole) if self.logprobs else None,
            "finish_reason": _reason(whole.finish),
        }

    def _logprobs(self, part: Joined) -> CompletionLogprobs:
        """Tokens are known by their text, so of several with the same text only the likeliest is among the top ones."""
        offset = self._offsets.get(part.index, 0)
        decoder = self._decoders.setdefault(part.index, codecs.getincrementaldecoder("utf-8")("replace"))
        body: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in part.logprobs:
            top: dict[str, float] = {}
            for token_id, value in (*entry.top, (entry.token_id, entry.logprob)):  # as OpenAI has it, the chosen one is there
                top.setdefault(self._name(token_id), _finite(value))
            body["tokens"].append(self._name(entry.token_id))
            body["token_logprobs"].append(_finite(entry.logprob))
            body["top_logprobs"].append(top)
            body["text_offset"].append(offset)
            offset += len(decoder.decode(self.tokenizer.token_bytes(entry.token_id)))
        self._offsets[part.index] = offset
        return body

    def _name(self, token_id: int) -> str:
        """Its text; a part of a character as OpenAI writes it, bytes:\\xe2\\x80."""
        raw = self.tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatFormat(Format):
    """`functions`: those of which one is called by force; the text is then its arguments, or {"name", "arguments"} of several.
    `free`: those that the model may call, `most` times at most; the text is then what it likes."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        logprobs: bool,
        functions: Sequence[str],
        named: bool,
        free: Sequence[str] = (),
        most: int | None = None,
    ) -> None:
        super().__init__(model, tokenizer, logprobs=logprobs)
        self.functions = functions
        self.named = named  # the client named the function
        self.free = free
        self.most = most
        self._finders: dict[int, CallFinder] = {}
        self._started: set[int] = set()
        self._held: dict[int, str] = {}  # text of a call whose function is not known before its end
        self._cut: set[int] = set()  # choices whose forced call has no end

    def pieces(self, part: Joined) -> list[dict[str, Any]]:
        logprobs = self._logprobs(part) if self.logprobs and part.logprobs else None
        deltas: list[dict[str, Any]] = []
        if part.index not in self._started:
            self._started.add(part.index)
            deltas.append({"role": "assistant", "content": None if self.functions else ""})
            if len(self.functions) == 1:
                deltas.append({"tool_calls": [{"index": 0, **self._call(self.functions[0], "")}]})
        if len(self.functions) > 1:
            self._held[part.index] = self._held.get(part.index, "") + part.text
            if part.finish is not None:
                text, calls = self._split(part.index, self._held.pop(part.index))
                deltas += [{"tool_calls": [{"index": 0, **self._call(*call)}]} for call in calls]
                deltas += [{"content": text}] if text else []
        elif part.text and self.functions:
            deltas.append({"tool_calls": [{"index": 0, "function": {"arguments": part.text}}]})
        elif self.free:
            text, calls = self._found(part)
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

    def choice(self, whole: Joined) -> ChatChoice:
        if len(self.functions) == 1:
            text, calls = "", [(self.functions[0], whole.text)]
        elif self.functions:
            text, calls = self._split(whole.index, whole.text)
        else:
            text, calls = self._found(whole) if self.free else (whole.text, [])
        answer: ChatChoice = {
            "index": whole.index,
            "message": {"role": "assistant", "content": None if calls and not text else text, "refusal": None},
            "logprobs": self._logprobs(whole) if self.logprobs else None,
            "finish_reason": self._reason(whole) or "stop",
        }
        if calls:
            answer["message"]["tool_calls"] = [self._call(*call) for call in calls]  # type: ignore[misc]
        return answer

    def _found(self, part: Joined) -> tuple[str, list[tuple[str, str]]]:
        finder = self._finders.setdefault(part.index, CallFinder(self.free, self.most))
        return finder.push(part.text, last=part.finish is not None)

    def _split(self, index: int, text: str) -> tuple[str, list[tuple[str, str]]]:
        """The call in {"name", "arguments"}. What was cut off before its end is text: of which function, it may not say."""
        try:
            call = json.loads(text)
            return "", [(call["name"], json.dumps(call["arguments"]))]
        except (ValueError, KeyError, TypeError):
            self._cut.add(index)
            return text, []

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": arguments}}

    def _reason(self, part: Joined) -> Any:
        """A function that the client chose itself ends with "stop", one that the model chose with "tool_calls" (OpenAI's guide)."""
        reason = _reason(part.finish)
        forced = self.functions and not self.named and part.index not in self._cut
        called = self._finders[part.index].num_calls if self.free else forced
        return "tool_calls" if reason == "stop" and called else reason

    def _logprobs(self, part: Joined) -> ChatLogprobs:
        return {
            "content": [
                {
                    **self._one(entry.token_id, entry.logprob),  # type: ignore[typeddict-item]
                    "top_logprobs": [self._one(other, value) for other, value in entry.top],
                }
                for entry in part.logprobs
            ]
        }

    def _one(self, token_id: int, logprob: float) -> Any:
        raw = self.tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _reason(finish: Finish | None) -> Any:
    return None if finish is None else finish.value


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI says -9999 of what cannot be."""
    return max(logprob, -9999.0)
