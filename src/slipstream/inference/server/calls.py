"""Calls of functions in what a model writes of its own accord (tool_choice "auto"), found as the text comes.

Two forms are known: <tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes, Qwen, SmolLM2; also with a list of them), and
an answer that is nothing but such JSON (Llama, where it may say "parameters"). What only looks like a call stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class CallFinder:
    """Of one choice."""

    def __init__(self, functions: Sequence[str], most: int | None = None) -> None:
        """`functions`: what may be called, any other name is text; `most`: calls beyond so many are dropped."""
        self.functions = functions
        self.most = most
        self.num_calls = 0
        self._text = ""  # what was not yet said
        self._is_text = False  # the answer began with something else than JSON

    def push(self, text: str, *, last: bool) -> tuple[str, list[tuple[str, str]]]:
        """What can be said now: text, and calls (function, arguments as JSON), which come after it."""
        self._text += text
        if not self._is_text and re.fullmatch(r"\s*(\[\s*)?(\{.*)?", self._text, re.DOTALL):
            if not last:
                return "", []
            if found := self._calls(self._text):
                return "", self._counted(found)
        self._is_text = True
        said = ""
        calls: list[tuple[str, str]] = []
        while OPEN in self._text:
            before, _, after = self._text.partition(OPEN)
            body, closed, rest = after.partition(CLOSE)
            if not (closed or last):
                break
            found = self._calls(body)  # models forget to close the last one
            said += before.rstrip() if found else before + OPEN + body + closed
            calls += self._counted(found)
            self._text = rest
        # Held back: a call that is not complete, what may become one, and the white space before it or after the last.
        end = len(self._text) if last else self._text.find(OPEN)
        if end < 0:
            end = len(self._text) - next((n for n in range(len(OPEN) - 1, 0, -1) if self._text.endswith(OPEN[:n])), 0)
        if not last or self.num_calls:
            end = len(self._text[:end].rstrip())
        said, self._text = said + self._text[:end], self._text[end:]
        return said, calls

    def _counted(self, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
        if self.most is not None:
            found = found[: self.most - self.num_calls]
        self.num_calls += len(found)
        return found

    def _calls(self, text: str) -> list[tuple[str, str]]:
        """All of them; none, if any of it is no call."""
        try:
            made = json.loads(text)
        except (ValueError, RecursionError):
            return []
        calls = []
        for call in made if isinstance(made, list) else [made]:
            arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
            if not isinstance(arguments, dict) or call.get("name") not in self.functions:
                return []
            calls.append((call["name"], json.dumps(arguments)))
        return calls
