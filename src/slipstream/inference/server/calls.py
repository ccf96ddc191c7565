"""The tool-call parser for tool_choice "auto": finds calls in a model's output while it streams.

A `CallForm` describes how a family of models writes calls; the chat template shows which one it is (`form_of`). Output that
consists only of JSON, {"name": ..., "arguments": {...}} or a list of these, is a call in every form. Anything else stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

Call = tuple[str, str]  # function, arguments as JSON
Functions = Mapping[str, Any]  # the functions that may be called: name -> JSON schema of the arguments


class CallForm(NamedTuple):
    """`open` begins calls, `close` ends them ("": the end of the output), `read` returns the calls between them, or none. `begin`
    (with {} for the function's name) and `end` surround the arguments of one call in a grammar ("": it has none)."""

    open: str
    close: str
    read: Callable[[str, Functions], list[Call]]
    begin: str = ""
    end: str = ""


class CallFinder:
    """The parser of one choice. Calls beyond `max_calls` are dropped."""

    def __init__(self, functions: Functions, max_calls: int | None = None, form: CallForm | None = None) -> None:
        self.functions = functions
        self.max_calls = max_calls
        self.form = form or FORMS[-1][1]
        self.num_calls = 0
        self._text = ""  # received, not yet returned
        self._is_text = False  # the output does not begin with JSON

    def push(self, text: str, *, last: bool) -> list[str | Call]:
        """Add `text`. Return the parts that are certain to be text, and the calls, in the order of the output."""
        self._text += text
        if not self._is_text and re.fullmatch(r"\s*(\[\s*)?(\{.*)?", self._text, re.DOTALL):
            if not last:
                return []
            if parsed := read_json(self._text, self.functions):
                return [*self._count(parsed)]
        self._is_text = True
        opening, close = self.form.open, self.form.close
        found: list[str | Call] = []
        while opening in self._text:
            before, _, after = self._text.partition(opening)
            body, closing, after = after.partition(close) if close else (after, "", "")
            if not (closing or last):
                break
            parsed = self.form.read(body, self.functions)  # models forget to close the last one
            found += [before.rstrip() if parsed else before + opening + body + closing, *self._count(parsed)]
            self._text = after
        # Hold back an incomplete call, a suffix that may begin one, and the white space before a call or after the last.
        end = len(self._text) if last else self._text.find(opening)
        if end < 0:
            end = len(self._text) - overlap(self._text, opening)
        if not last or self.num_calls:
            end = len(self._text[:end].rstrip())
        found.append(self._text[:end])
        self._text = self._text[end:]
        return [part for part in found if part]

    def _count(self, calls: list[Call]) -> list[Call]:
        if self.max_calls is not None:
            calls = calls[: self.max_calls - self.num_calls]
        self.num_calls += len(calls)
        return calls


class Thoughts:
    """Splits a choice's output into the reasoning between two marks and the rest. `begun`: the prompt ends with the first mark.
    `call`: the mark of a call, which begins the rest if the second mark is forgotten ("": none)."""

    def __init__(self, marks: tuple[str, str], begun: bool, call: str = "") -> None:
        self.marks, self._call = marks, call
        self._mark = marks[1] if begun else marks[0]  # the mark that comes next; "" after the second
        self._text = ""
        self._fresh = True  # only white space since the last mark, which is dropped

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """Add `text`; return the part that is certain to be reasoning, and the part that is certain not to be."""
        self._text += text
        thoughts = rest = ""
        if self._mark == self.marks[0]:  # reasoning comes first or not at all
            start = self._text.lstrip()
            if start.startswith(self._mark):
                self._text, self._mark = start[len(self._mark) :], self.marks[1]
            elif last or not self._mark.startswith(start):
                self._mark, self._fresh = "", False
            else:
                return "", ""
        if self._mark:
            before, found, after = self._text.partition(self._mark)
            if self._call and self._call in before:
                before, found, _ = before.partition(self._call)
                after = self._text[len(before) :]
            end = len(before) if found or last else len(before) - max(overlap(before, mark) for mark in (self._mark, self._call))
            end = len(before[:end].rstrip())  # white space before the mark is dropped
            thoughts, self._text = self._new(before[:end]), before[end:]
            if not found:
                return thoughts, ""
            self._text, self._mark, self._fresh = after, "", True
        rest, self._text = self._new(self._text), ""
        return thoughts, rest

    def _new(self, text: str) -> str:
        text = text.lstrip() if self._fresh else text
        self._fresh = self._fresh and not text
        return text


def overlap(text: str, mark: str) -> int:
    """The length of the longest prefix of `mark` that `text` ends with."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def read_json(text: str, functions: Functions) -> list[Call]:
    """{"name": ..., "arguments": {...}} (Llama writes "parameters"), a list of these, or several in a row."""
    try:
        parsed = list(_values(text))
    except (ValueError, RecursionError):
        return []
    calls = []
    for call in parsed[0] if len(parsed) == 1 and isinstance(parsed[0], list) else parsed:
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or call.get("name") not in functions:
            return []
        calls.append((call["name"], json.dumps(arguments)))
    return calls


def _values(text: str) -> Iterator[Any]:
    place = len(text) - len(text.lstrip())
    while place < len(text):
        value, place = json.JSONDecoder().raw_decode(text, place)
        yield value
        place += len(text[place:]) - len(text[place:].lstrip("; \t\r\n"))


def _read_mistral(text: str, functions: Functions) -> list[Call]:
    """[{"name": ..., "arguments": {...}}], or NAME[ARGS]{...}[TOOL_CALLS]NAME[ARGS]{...}."""
    named = re.compile(r"\s*([\w-]+)(?:\[CALL_ID\]\w+)?\[ARGS\](.*)", re.DOTALL)
    parts = [named.fullmatch(part) for part in text.split("[TOOL_CALLS]")]
    return _checked([(part[1], part[2]) for part in parts if part], functions) if all(parts) else read_json(text, functions)


# DeepSeek's marks, of all calls and of one.
_CALLS, _END_CALLS, _CALL, _SEP, _END_CALL = (
    f"<\uff5ctool▁{name}\uff5c>" for name in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")
)
_DEEPSEEK = re.compile(rf"{_CALL}(?:function{_SEP})?([\w-]+)(?:{_SEP}|\s*```json\s)(.*?)(?:\s*```)?\s*{_END_CALL}", re.DOTALL)


def _read_deepseek(text: str, functions: Functions) -> list[Call]:
    return _checked([(call[1], call[2]) for call in _DEEPSEEK.finditer(text)], functions)


def _read_qwen_coder(text: str, functions: Functions) -> list[Call]:
    """<function=NAME><parameter=KEY>VALUE</parameter></function>. A value is JSON unless its schema says that it is text."""
    calls = []
    for call in re.finditer(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", text, re.DOTALL):
        arguments: dict[str, Any] = {}
        properties = ((functions.get(call[1]) or {}).get("properties")) or {}
        for name, value in re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", call[2], re.DOTALL):
            arguments[name] = value
            if not isinstance(schema := properties.get(name), dict) or schema.get("type") != "string":
                with suppress(ValueError, RecursionError):  # text, though its schema does not say so
                    arguments[name] = json.loads(value)
        calls.append((call[1], json.dumps(arguments)))
    return calls if all(name in functions for name, _ in calls) else []


def _checked(calls: list[Call], functions: Functions) -> list[Call]:
    """Return the calls if all are calls of `functions` with an object as arguments, else none."""
    try:
        parsed = [(name, json.loads(arguments)) for name, arguments in calls]
    except (ValueError, RecursionError):
        return []
    valid = all(name in functions and isinstance(arguments, dict) for name, arguments in parsed)
    return [(name, json.dumps(arguments)) for name, arguments in parsed] if valid else []


_HERMES = '<tool_call>\n{"name": "{}", "arguments": '
# (text in a chat template, the form of its calls); the first match decides. The last is Hermes', Qwen's and SmolLM2's.
FORMS: tuple[tuple[str, CallForm], ...] = (
    ("<function=", CallForm("<tool_call>", "</tool_call>", _read_qwen_coder)),
    (
        f"{_SEP}' + tool['function']['name'] + '\\n' + '```json",
        CallForm(
            _CALLS, _END_CALLS, _read_deepseek, f"{_CALLS}{_CALL}function{_SEP}{{}}\n```json\n", f"\n```{_END_CALL}{_END_CALLS}"
        ),
    ),
    (_SEP, CallForm(_CALLS, _END_CALLS, _read_deepseek, f"{_CALLS}{_CALL}{{}}{_SEP}", _END_CALL + _END_CALLS)),
    ("[ARGS]", CallForm("[TOOL_CALLS]", "", _read_mistral, "[TOOL_CALLS]{}[ARGS]")),
    ("[TOOL_CALLS]", CallForm("[TOOL_CALLS]", "", _read_mistral, '[TOOL_CALLS][{"name": "{}", "arguments": ', "}]")),
    ("<tool_call>", HERMES := CallForm("<tool_call>", "</tool_call>", read_json, _HERMES, "}\n</tool_call>")),
    ('"parameters"', LLAMA := CallForm("<|python_tag|>", "", read_json, '{"name": "{}", "parameters": ', "}")),
    ("<|python_tag|>", LLAMA),
    ("", HERMES),
)


def form_of(template: str) -> CallForm:
    """The form in which a model with this chat template writes calls."""
    return next(form for mark, form in FORMS if mark in template)
