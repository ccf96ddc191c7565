"""Calls in what a model writes freely: the same ones, and the same text, however it is cut into pieces."""

from __future__ import annotations

import json
import random

import pytest

from slipstream.inference.server.calls import CallFinder

ADD = {"name": "add", "arguments": {"a": 1, "b": "</x>"}}
SAY = {"name": "say", "parameters": {}}
FUNCTIONS = {"add": None, "say": None}
CALLED = [("add", json.dumps(ADD["arguments"])), ("say", "{}")]


def parse(text: str, most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    expected = CallFinder(FUNCTIONS, most).push(text, last=True)
    for seed in range(20):
        sizes = random.Random(seed)
        finder, content, calls, unread = CallFinder(FUNCTIONS, most), "", [], text
        while unread:
            size = sizes.randint(0, 12) if seed else 1
            new = finder.push(unread[:size], last=False)
            content, calls, unread = content + new[0], calls + new[1], unread[size:]
        new = finder.push("", last=True)
        assert (content + new[0], calls + new[1]) == expected, seed
    return expected


def tag(call: object) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"I shall add.\n{tag(ADD)}\n{tag(SAY)}\n", "I shall add.", CALLED),
        (tag([ADD, SAY]), "", CALLED),
        (tag(ADD)[:-12], "", CALLED[:1]),  # not closed
        (f"{tag(ADD)} Done. ", " Done.", CALLED[:1]),
        (f" {json.dumps(ADD)}", "", CALLED[:1]),
        (f"[{json.dumps(ADD)}, {json.dumps(SAY)}] ", "", CALLED),
        *((text, text, []) for text in ("", " ", "plain \n text \n", "[1] is a note", "a < b <tool_ <tool_call", "<")),
        *((text, text, []) for text in ('{"a": [1', "{}", "[]", f" {tag({'name': 'other'})} ", tag("x"), tag([ADD, 1]))),
        ("<tool_call>" + "[" * 5_000, "<tool_call>" + "[" * 5_000, []),
    ],
)
def test_found(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(text) == (content, calls)


def test_at_most() -> None:
    assert parse(f"{tag(ADD)}{tag(SAY)}", most=1) == ("", CALLED[:1])
    assert parse(json.dumps([ADD, SAY]), most=1) == ("", CALLED[:1])


def test_text_is_not_held_back_for_long() -> None:
    finder = CallFinder(FUNCTIONS)
    pieces = "Hello", " there", ",\n", "a <", "b"
    assert [finder.push(piece, last=False)[0] for piece in pieces] == ["Hello", " there", ",", "\na", " <b"]


def test_references_inside_one_of_several_tools_hold() -> None:
    """pydantic writes them from the document's root, which moves when several schemas become one."""
    from slipstream.inference.server.chat import _moved

    place = {"items": [{"$ref": "other#/x"}]}
    schema = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": place}}
    moved = _moved(schema, "#/anyOf/1/properties/arguments")
    assert moved["properties"]["at"] == {"$ref": "#/anyOf/1/properties/arguments/$defs/Place"}
    assert moved["$defs"] == schema["$defs"]
