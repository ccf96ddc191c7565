"""The tool-call parser for tool_choice "auto": finds calls in a model's output while it streams.

A `CallForm` describes how a family of models writes calls; the chat template shows which one it is (`form_of`). Output that
begins with JSON, {"name": ..., "arguments": {...}} or a list of these, is a call in every form; what follows is dropped. Anything
else stays text. A push takes time linear in the text that it has, because it holds up the server's other requests.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from slipstream.inference.text import DEEPSEEK, overlap

Call = tuple[str, str]  # function, arguments as JSON
Functions = Mapping[str, Any]  # the functions that may be called: name -> JSON schema of the arguments

MAX_LITERAL = 10_000  # characters of a value that is read as Python's, which takes almost a kilobyte a character


class CallForm(NamedTuple):
    """`open` begins calls, `close` ends them ("": the end of the output), `read` returns the calls between them, or none. `begin`
    (with {} for the function's name) and `end` surround the arguments of one call in a grammar ("": it has none). `inner` are the
    marks around a call within `open` and `close`, which models forget; the first has {} for the name, and a mark follows it."""

    open: str
    close: str
    read: Callable[[str, Functions], list[Call]]
    begin: str = ""
    end: str = ""
    inner: tuple[str, str] = ("", "")


class CallFinder:
    """The parser of one choice. Calls beyond `max_calls` are dropped."""

    def __init__(self, functions: Functions, max_calls: int | None = None, form: CallForm | None = None) -> None:
        self.functions = functions
        self.max_calls = max_calls
        self.form = form or FORMS[-1][1]
        opening, closing, inner_closing = map(re.escape, (self.form.open, self.form.close, self.form.inner[1]))
        inner = [self.form.inner[0].format(name) for name in functions] if self.form.inner[0] else []
        self._marks = (self.form.open, *inner)
        named = "|".join(map(re.escape, inner)) or "(?!)"  # no more than a mention, unless an argument or the call's end follows
        follows = "|".join(_begins(mark) for mark in ("<parameter=", self.form.inner[1]))
        self._opening = re.compile(rf"{opening}|(?P<inner>{named})(?=\s*(?:{follows}))")
        self._closing = re.compile(closing or "(?!)")
        self._inner_closing = re.compile(rf"{inner_closing}(?:\s*{closing})?|{closing}")
        self.num_calls = 0
        self._text = ""  # received, not yet returned
        self._searched = 0  # characters of it in which the incomplete call does not end
        self._is_text = False  # the output does not begin with JSON

    def push(self, text: str, *, last: bool) -> list[str | Call]:
        """Add `text`. Return the parts that are certain to be text, and the calls, in the order of the output."""
        self._text += text
        if not self._is_text and re.fullmatch(r"\s*(\[\s*)?(\{.*)?", self._text, re.DOTALL):
            if not last:
                return []
            if self.form.open not in self._text and (parsed := read_json(self._text, self.functions)):
                return [*self._count(parsed)]
        self._is_text = True
        found, done = list[str | Call](), 0  # characters of the text that have been read
        while (opening := self._opening.search(self._text, done)) and (taken := self._take(done, opening, last)):
            parts, done = taken
            found += parts
        self._text = self._text[done:]
        # Hold back an incomplete call, a suffix that may begin one, and the white space before a call or after the last.
        end = opening.start() - done if opening else len(self._text)
        if not (opening or last):
            before, first, rest = self._text.rpartition(self.form.open[0])  # marks have it only at their beginning
            if first and any(mark.startswith(first + rest) for mark in self._marks):
                end = len(before)
        if not last or self.num_calls:
            end = len(self._text[:end].rstrip())
        found.append(self._text[:end])
        self._text, self._searched = self._text[end:], self._searched - done - end
        return [part for part in found if part]

    def _take(self, begin: int, opening: re.Match[str], last: bool) -> tuple[list[str | Call], int] | None:
        """The parts of the text from `begin` to the end of the call that `opening` begins, and that end; None if the call is
        incomplete."""
        text, inner = self._text, opening["inner"] is not None
        closing = (self._inner_closing if inner else self._closing).search(text, max(opening.end(), self._searched))
        if not (closing or last):  # models forget to close the last one
            self._searched = len(text) - max(len(self.form.close), len(self.form.inner[1]))
            return None
        body_end, end = closing.span() if closing else (len(text), len(text))
        if not last and inner and closing and closing[0] == self.form.inner[1]:
            rest = end, len(text) - overlap(text, self.form.close)
            if re.compile(r"\s*").fullmatch(text, *rest):  # `close` may follow
                return None
        calls = self.form.read(text[opening.start() if inner else opening.end() : body_end], self.functions)
        before = text[begin : opening.start()].rstrip() if calls else text[begin:end]
        return [before, *self._count(calls)], end

    def _count(self, calls: list[Call]) -> list[Call]:
        if self.max_calls is not None:
            calls = calls[: self.max_calls - self.num_calls]
        self.num_calls += len(calls)
        return calls


def _begins(mark: str) -> str:
    """A pattern of `mark`, or of a beginning of it at the end of the text."""
    return "".join(f"(?:$|{re.escape(character)}" for character in mark) + ")" * len(mark)


class Thoughts:
    """Splits a choice's output into the reasoning between two marks and the rest. `begun`: the prompt ends with the first mark,
    which the model may repeat. `call`: the mark of a call, which begins the rest if the second mark is forgotten ("": none)."""

    def __init__(self, marks: tuple[str, str], begun: bool, call: str = "") -> None:
        self.marks, self._call = marks, call
        self._begun = begun
        self._mark = marks[0]  # the mark that comes next; "" after the second
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
                self._mark, self._fresh = (self.marks[1], True) if self._begun else ("", False)
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


def read_json(text: str, functions: Functions) -> list[Call]:
    """{"name": ..., "arguments": {...}} (Llama writes "parameters"), a list of these, or several in a row."""
    try:
        parsed = list(_values(text))
    except (ValueError, RecursionError):
        return []
    found = []
    for call in parsed[0] if len(parsed) == 1 and isinstance(parsed[0], list) else parsed:
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if isinstance(arguments, str):  # Granite 4 writes JSON in JSON
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        name = call.get("name") if isinstance(arguments, dict) else None
        if not isinstance(name, str) or name not in functions:
            return []
        found.append((name, arguments))
    return _written(found)


def _values(text: str) -> Iterator[Any]:
    """The JSON values with which the text begins; other text may follow. Raises ValueError if it does not begin with JSON."""
    begin = place = len(text) - len(text.lstrip())
    while place < len(text):
        try:
            value, place = json.JSONDecoder().raw_decode(text, place)
        except ValueError:
            if place == begin:
                raise
            return
        yield value
        while place < len(text) and text[place] in "; \t\r\n":
            place += 1


def _read_mistral(text: str, functions: Functions) -> list[Call]:
    """[{"name": ..., "arguments": {...}}], or NAME[ARGS]{...}[TOOL_CALLS]NAME[ARGS]{...}, also without [ARGS]."""
    named = re.compile(r"\s*([\w-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\]|(?=\{))(.*)", re.DOTALL)
    parts = [named.fullmatch(part) for part in text.split("[TOOL_CALLS]")]
    return _checked([(part[1], part[2]) for part in parts if part], functions) if all(parts) else read_json(text, functions)


_CALLS, _END_CALLS, _CALL, _SEP, _END_CALL = DEEPSEEK  # its marks, of all calls and of one
_DEEPSEEK = re.compile(rf"(?:function{_SEP})?([\w-]+)(?:{_SEP}|\s*```json\s)(.*?)(?:{_END_CALL}|$)", re.DOTALL)


def _read_deepseek(text: str, functions: Functions) -> list[Call]:
    parts = [_DEEPSEEK.match(part) for part in text.split(_CALL)[1:]]  # models forget the mark at the end of a call
    return _checked([(part[1], part[2].rstrip().removesuffix("```")) for part in parts if part], functions) if all(parts) else []


def _read_qwen_coder(text: str, functions: Functions) -> list[Call]:
    """<function=NAME><parameter=KEY>VALUE</parameter></function>. A value is JSON, or Python's as models also write it, unless its
    schema says that it is text."""
    calls = []
    for call in re.finditer(r"<function=([^<>\n]{1,128})>(.*?)(?:</function>|$)", text, re.DOTALL):
        properties = (functions.get(call[1]) or {}).get("properties")
        schemas = properties if isinstance(properties, dict) else {}
        arguments = {name: _value(value, schemas.get(name)) for name, value in _parameters(call[2], schemas)}
        calls.append((call[1], json.dumps(arguments)))
    return calls if all(name in functions for name, _ in calls) else []


_PARAMETER = re.compile(r"\n?(?:</parameter>|(?P<indent>^[ \t]*)?<parameter=(?P<name>[^<>\n]{1,128})>\n?)", re.MULTILINE)


def _parameters(text: str, schemas: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values. Models forget </parameter>: the next parameter is one that begins a line or has a schema."""
    name, begin = "", 0
    for mark in _PARAMETER.finditer(text):
        if name and (not mark["name"] or mark["indent"] is not None or mark["name"] in schemas):
            yield name, text[begin : mark.start()]
            name = ""
        if mark["name"] and not name:
            name, begin = mark["name"], mark.end()
    if name:
        yield name, text[begin:].removesuffix("\n")


def _value(text: str, schema: Any) -> Any:
    kinds = _kinds(schema)
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    for read in (json.loads, ast.literal_eval)[: 1 + (len(text) <= MAX_LITERAL)]:
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return json.loads(json.dumps(read(text), allow_nan=False))
    return text  # though its schema does not say so


def _kinds(schema: Any) -> list[Any]:
    """The types of values that a JSON schema states."""
    match schema:
        case {"type": list(kinds)}:
            return kinds
        case {"type": kind}:
            return [kind]
        case {"anyOf": list(options)} | {"oneOf": list(options)}:
            return [kind for option in options for kind in _kinds(option)]
    return []


def _checked(calls: list[Call], functions: Functions) -> list[Call]:
    """Return the calls if all are calls of `functions` with an object as arguments, else none."""
    try:
        parsed = [(name, json.loads(arguments)) for name, arguments in calls]
    except (ValueError, RecursionError):
        return []
    valid = all(name in functions and isinstance(arguments, dict) for name, arguments in parsed)
    return _written(parsed) if valid else []


def _written(calls: list[tuple[str, Any]]) -> list[Call]:
    """The calls with their arguments as JSON; none if one has NaN or infinity, which models write and only Python reads."""
    try:
        return [(name, json.dumps(arguments, allow_nan=False)) for name, arguments in calls]
    except (ValueError, RecursionError):
        return []


_HERMES = '<tool_call>\n{"name": "{}", "arguments": '
# (text in a chat template, the form of its calls); the first match decides. The last is Hermes', Qwen's and SmolLM2's.
FORMS: tuple[tuple[str, CallForm], ...] = (
    ("<function=", CallForm("<tool_call>", "</tool_call>", _read_qwen_coder, inner=("<function={}>", "</function>"))),
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
