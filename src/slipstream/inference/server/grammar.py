"""Grammars (llguidance's Lark) for answers that are more than one JSON value: reasoning, then free text or a response format with
calls that follow their schemas; a regular expression; a choice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.inference.constrain import WHITESPACE, as_lark, check_schema
from slipstream.inference.server.calls import CallForm
from slipstream.inference.server.errors import RequestError

FREE = r"/(.|\n)*/"
_WRITTEN = {"/": r"\/", "\n": r"\n", r"\d": "[0-9]", r"\D": "[^0-9]"}  # in a regular expression; \d has digits of all scripts


Constraint = dict[str, Any]  # `json_schema` or `grammar` of `SamplingParams`, or neither


def structured(fields: Mapping[str, tuple[str, Any]]) -> Constraint:
    """The constraint of `SampledFields.structured`, which has at most one entry. Raises RequestError."""
    for name, (kind, value) in fields.items():
        match kind:
            case "json":
                return {"json_schema": value if isinstance(value, str) else dumps(value, name)}
            case "regex":
                escaped = re.sub(r"\\.|/|\n", lambda found: _WRITTEN.get(found[0], found[0]), value, flags=re.DOTALL)
                return {"grammar": f"start: /{escaped}/"}
            case "choice":
                return {"grammar": "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in value)}
            case _ if value.lstrip().startswith("{"):
                raise RequestError(f"{name}: a grammar is Lark or GBNF, not JSON", param=name)
            case _ if "%json" in value and ("multipleOf" in value or "\\u" in value):  # "multiple\u004ff" is multipleOf as well
                message = f"{name}: %json with multipleOf or with \\u escapes is not served; use a JSON schema"
                raise RequestError(message, param=name)
            case _:
                return {"grammar": value}
    return {}


def dumps(schema: Any, name: str) -> str:
    """A JSON schema as text. Raises RequestError."""
    try:
        return json.dumps(schema, allow_nan=False)
    except ValueError:
        raise RequestError(f"{name}: the JSON schema contains a non-finite number", param=name) from None


class Lark:
    """Writes grammars for one tokenizer. `tokens`: its special tokens, by their text."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._rules: list[str] = []

    def answer(
        self,
        *,
        schema: Any = None,
        tools: Sequence[tuple[str, Any]] = (),
        form: CallForm | None = None,
        thoughts: tuple[str, str] | None = None,
        begun: bool = False,
        grammar: str | None = None,
    ) -> str:
        """A grammar for an answer: first reasoning between the marks `thoughts`, if given (`begun`: the prompt has the first mark);
        then a value of `schema` or calls of `tools`. Without a schema: free text with calls, or a text of `grammar`. Raises
        ValueError for an unsupported schema or grammar."""
        before = ""
        if thoughts is not None:
            thought = f"{self._until(thoughts[1], 'thought')} SPACE"
            before = f"{thought} " if begun else f"({self._text(thoughts[0])} {thought})? "
        calls, free = self._calls(tools, form, alone=schema is not None) if form is not None and tools else ("", "")
        if grammar is not None:
            body = f"%lark {{\n{as_lark(grammar)}\n}}"
        else:
            body = f"({calls} SPACE)+ | {self._json(schema)}" if calls and schema is not None else free or self._json(schema)
        return "\n".join([f"start: {before}body", f"body: {body}", f"FREE: {FREE}", r"SPACE: /\s*/", *self._rules])

    def _calls(self, tools: Sequence[tuple[str, Any]], form: CallForm, *, alone: bool) -> tuple[str, str]:
        """A rule for one call, and a rule for text with calls."""
        marked = form.begin.startswith(form.open)
        trigger = "" if not marked else self._text(form.open) if alone else self._until(form.open, "free")
        for number, (name, parameters) in enumerate(tools):
            begin = form.begin.replace("{}", name)[len(form.open) if marked else 0 :]
            self._rules.append(f"call_{number}: {trigger} {self._text(begin)} {self._json(parameters)} {self._text(form.end)}")
        calls = "(" + " | ".join(f"call_{number}" for number in range(len(tools))) + ")"
        # Without a mark, a call is the whole answer, and text that begins like a call is one.
        return calls, f"{calls}* FREE" if marked else rf"{calls} | /([^{{](.|\n)*)?/"

    def _json(self, schema: Any) -> str:
        check_schema(schema)
        return "%json " + json.dumps(schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}}, allow_nan=False)

    def _until(self, mark: str, name: str) -> str:
        """A rule for text up to and including the first `mark`."""
        if mark in self._tokens:
            return f"FREE <[{self._tokens[mark]}]>"
        self._rules.append(f"{name}[lazy]: {FREE} {json.dumps(mark)}")
        return name

    def _text(self, text: str) -> str:
        """A rule for a text. A grammar names special tokens by their numbers."""
        marks = [mark for mark in self._tokens if mark in text]
        parts = re.split("(" + "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) + ")", text) if marks else [text]
        return " ".join(
            f"<[{self._tokens[part]}]>" if part in self._tokens else json.dumps(part, ensure_ascii=False) for part in parts if part
        )
