"""The tool-call parser for tool_choice "auto": finds calls in a model's output while it streams.

It knows two forms: <tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes, Qwen, SmolLM2; also with a list of calls), and
output that consists of such JSON only (Llama, which may write "parameters"). Anything else stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class CallFinder:
    """The parser of one choice. `functions` are the names that may be called; calls beyond `max_calls` are dropped."""

    def __init__(self, functions: Sequence[str], max_calls: int | None = None) -> None:
        self.functions = functions
        self.max_calls = max_calls
        self.num_calls = 0
        self._text = ""  # received, not yet returned
        self._is_text = False  # the output does not begin with JSON

    def push(self, text: str, *, last: bool) -> tuple[str, list[tuple[str, str]]]:
        """Add `text`; return the text that is certain to be text, and the calls after it as (function, arguments as JSON)."""
        self._text += text
        if not self._is_text and re.fullmatch(r"\s*(\[\s*)?(\{.*)?", self._text, re.DOTALL):
            if not last:
                return "", []
            if parsed := self._calls(self._text):
                return "", self._count(parsed)
        self._is_text = True
        plain = ""
        calls: list[tuple[str, str]] = []
        while OPEN in self._text:
            before, _, after = self._text.partition(OPEN)
            body, closing, after = after.partition(CLOSE)
            if not (closing or last):
                break
            parsed = self._calls(body)  # models forget to close the last one
            plain += before.rstrip() if parsed else before + OPEN + body + closing
            calls += self._count(parsed)
            self._text = after
        # Hold back an incomplete call, a suffix that may begin one, and the white space before a call or after the last.
        end = len(self._text) if last else self._text.find(OPEN)
        if end < 0:
            end = len(self._text) - next((n for n in range(len(OPEN) - 1, 0, -1) if self._text.endswith(OPEN[:n])), 0)
        if not last or self.num_calls:
            end = len(self._text[:end].rstrip())
        plain, self._text = plain + self._text[:end], self._text[end:]
        return plain, calls

    def _count(self, calls: list[tuple[str, str]]) -> list[tuple[str, str]]:
        if self.max_calls is not None:
            calls = calls[: self.max_calls - self.num_calls]
        self.num_calls += len(calls)
        return calls

    def _calls(self, text: str) -> list[tuple[str, str]]:
        """Parse `text` as a call or a list of calls; return none if any part of it is not a valid call."""
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            return []
        calls = []
        for call in parsed if isinstance(parsed, list) else [parsed]:
            arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
            if not isinstance(arguments, dict) or call.get("name") not in self.functions:
                return []
            calls.append((call["name"], json.dumps(arguments)))
        return calls
