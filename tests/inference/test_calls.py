"""Calls in what a model writes freely: the same ones, and the same text, however it is cut into pieces."""

from __future__ import annotations

import json
import random
import time
from itertools import groupby
from typing import Any

import pytest

from slipstream.inference.server.calls import FORMS, Call, CallFinder, Thoughts, form_of

ADD = {"name": "add", "arguments": {"a": 1, "b": "</x>"}}
SAY = {"name": "say", "parameters": {}}
FUNCTIONS = {"add": None, "say": None}
CALLED = [("add", json.dumps(ADD["arguments"])), ("say", "{}")]


def joined(parts: list[str | Call]) -> list[str | Call]:
    """With neighboring texts as one."""
    groups = groupby(parts, key=lambda part: isinstance(part, str))
    return [part for is_text, group in groups for part in (["".join(map(str, group))] if is_text else group)]


def split(parts: list[str | Call]) -> tuple[str, list[Call]]:
    return "".join(part for part in parts if isinstance(part, str)), [part for part in parts if not isinstance(part, str)]


def parse(text: str, most: int | None = None) -> list[str | Call]:
    expected = joined(CallFinder(FUNCTIONS, most).push(text, last=True))
    for seed in range(20):
        sizes = random.Random(seed)
        finder, found, unread = CallFinder(FUNCTIONS, most), list[str | Call](), text
        while unread:
            size = sizes.randint(0, 12) if seed else 1
            found, unread = found + finder.push(unread[:size], last=False), unread[size:]
        assert joined(found + finder.push("", last=True)) == expected, seed
    return expected


def tag(call: object) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"I shall add.\n{tag(ADD)}\n{tag(SAY)}\n", "I shall add.", CALLED),
        (tag([ADD, SAY]), "", CALLED),
        (tag(ADD)[:-12], "", CALLED[:1]),  # not closed
        (tag({"name": "add", "arguments": CALLED[0][1]}), "", CALLED[:1]),  # JSON in JSON
        (f"{json.dumps(ADD)} I used add.", "", CALLED[:1]),
        (f"{json.dumps(ADD)}; {json.dumps(SAY)[:-5]}", "", CALLED[:1]),  # cut off
        (f"{tag(ADD)} Done. ", " Done.", CALLED[:1]),
        (f" {json.dumps(ADD)}", "", CALLED[:1]),
        (f"[{json.dumps(ADD)}, {json.dumps(SAY)}] ", "", CALLED),
        *((text, text, []) for text in ("", " ", "plain \n text \n", "[1] is a note", "a < b <tool_ <tool_call", "<")),
        *((text, text, []) for text in ('{"a": [1', "{}", "[]", f" {tag({'name': 'other'})} ", tag("x"), tag([ADD, 1]))),
        *((text, text, []) for text in (tag({"name": name, "arguments": {}}) for name in ({}, [], None))),
        *((text, text, []) for text in (tag({"name": "add", "arguments": {"a": number}}) for number in (float("nan"), 1e999))),
        ("<tool_call>" + "[" * 5_000, "<tool_call>" + "[" * 5_000, []),
    ],
)
def test_found(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert split(parse(text)) == (content, calls)


def test_in_the_order_of_the_output() -> None:
    assert parse(f"One. {tag(ADD)} Two. {tag('no call')}{tag(SAY)}\n") == ["One.", CALLED[0], f" Two. {tag('no call')}", CALLED[1]]


def test_at_most() -> None:
    assert parse(f"{tag(ADD)}{tag(SAY)}", most=1) == CALLED[:1]
    assert parse(json.dumps([ADD, SAY]), most=1) == CALLED[:1]


def test_text_is_not_held_back_for_long() -> None:
    finder = CallFinder(FUNCTIONS)
    pieces = "Hello", " there", ",\n", "a <", "b"
    assert [split(finder.push(piece, last=False))[0] for piece in pieces] == ["Hello", " there", ",", "\na", " <b"]
    finder = CallFinder(FUNCTIONS, None, form_of("<function="))
    pieces = "The mark <function=", "add", ">", " begins", " a call of <function=sub>."
    expected = ["The mark", "", "", " <function=add> begins", " a call of <function=sub>."]
    assert [split(finder.push(piece, last=False))[0] for piece in pieces] == expected


def test_references_inside_one_of_several_tools_hold() -> None:
    """pydantic writes them from the document's root, which moves when several schemas become one."""
    from slipstream.inference.server.chat import _moved

    place = {"items": [{"$ref": "other#/x"}]}
    schema = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": place}}
    moved = _moved(schema, "#/anyOf/1/properties/arguments")
    assert moved["properties"]["at"] == {"$ref": "#/anyOf/1/properties/arguments/$defs/Place"}
    assert moved["$defs"] == schema["$defs"]


BAR, UNDER = "\uff5c", "\u2581"


def mark(name: str) -> str:
    return f"<{BAR}tool{UNDER}{name}{BAR}>".replace(" ", UNDER)


LISTED = json.dumps([ADD, {"name": "say", "arguments": {}}])
V3 = mark("calls begin") + "".join(
    f"{mark('call begin')}function{mark('sep')}{name}\n```json\n{arguments}\n```{mark('call end')}" for name, arguments in CALLED
)
V31 = mark("calls begin") + "".join(
    f"{mark('call begin')}{name}{mark('sep')}{arguments}{mark('call end')}" for name, arguments in CALLED
)
CODER = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n</x>\n</parameter>\n</function>\n</tool_call>"
SAID = "<tool_call>\n<function=say>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("[TOOL_CALLS]", f"[TOOL_CALLS]{LISTED}"),
        ("[TOOL_CALLS]", f"[TOOL_CALLS]{LISTED}\nThat is it."),
        *(
            ("[TOOL_CALLS] [ARGS]", "".join(f"[TOOL_CALLS]{name}{between}{arguments}" for name, arguments in CALLED))
            for between in ("[ARGS]", "[CALL_ID]aB3[ARGS]", "")
        ),
        ("<|python_tag|>", f"<|python_tag|>{json.dumps(ADD)}; {json.dumps(SAY)}"),
        ('"parameters"', f"{json.dumps(ADD)}\n{json.dumps(SAY)}"),
        (mark("sep"), V31 + mark("calls end")),
        (f"{mark('sep')}' + tool['function']['name'] + '\\n' + '```json", V3 + mark("calls end")),
        (mark("sep"), V3),  # not closed
        (mark("sep"), V31.replace(mark("call end"), "")),
        (mark("sep"), V3.replace(mark("call end"), "") + mark("calls end")),
        ("<tool_call> <function=", f"{CODER}\n{SAID}"),
        ("<tool_call> <function=", (CODER + SAID).replace("<tool_call>", "")),  # models forget these
        ("<tool_call> <function=", CODER.replace("</parameter>\n", "") + SAID),
    ],
)
def test_forms_of_templates(template: str, text: str) -> None:
    functions = {"add": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}, "say": {}}
    form = form_of(template)
    for before in ("", "Well:\n") if form.open in text else ("",):
        for size in (1, 3, 1000):
            finder, found = CallFinder(functions, None, form), list[str | Call]()
            pieces = [(before + text)[start : start + size] for start in range(0, len(before + text), size)]
            for piece, last in [*((piece, False) for piece in pieces), ("", True)]:
                found += finder.push(piece, last=last)
            assert split(found) == (before.rstrip(), CALLED), size
    other = text.replace("add", "sub")
    assert split(CallFinder(functions, None, form).push(other, last=True))[1] in ([], [CALLED[1]]), "no function of that name"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "object"}, "{'a': [None, 1]}", {"a": [None, 1]}),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "12", 12),
        ({"anyOf": 5, "type": 5}, "{1, 2}", "{1, 2}"),
        ({"type": "number"}, "NaN", "NaN"),  # not JSON
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "string"}, "use <parameter=c> like <b>", "use <parameter=c> like <b>"),
    ],
)
def test_values_of_qwen_coder_have_the_types_of_their_schemas(schema: Any, text: str, value: Any) -> None:
    finder = CallFinder({"add": {"properties": {"a": schema}}}, None, form_of("<function="))
    [(_, arguments)] = finder.push(f"<tool_call><function=add><parameter=a>{text}</parameter></function></tool_call>", last=True)
    assert json.loads(arguments) == {"a": value}


@pytest.mark.parametrize("between", ["</parameter>", "", "\n", "\n  \t"])
def test_parameters_that_qwen_coder_does_not_close(between: str) -> None:
    finder = CallFinder({"add": {"properties": {"a": {"type": "string"}, "b": {}}}}, None, form_of("<function="))
    [(_, arguments)] = finder.push(f"<function=add><parameter=a>1{between}<parameter=b>\n[2]\n</function>", last=True)
    assert json.loads(arguments) == {"a": "1", "b": [2]}


ADDED = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
ENDED = ADDED.replace("</function>", "</tool_call>")


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (f"{ADDED} Done.", " Done.", 1),
        (f"{ADDED}\n{ADDED}\n</tool_call>\nDone.", "\nDone.", 2),
        (f"I use `<function=example>`.\n<tool_call>{ADDED}</tool_call> Done.", "I use `<function=example>`. Done.", 1),
        (f"{ENDED} Done.", " Done.", 1),
        (f"{ENDED}\n{ENDED}", "", 2),
        (f"x {ENDED} y {ADDED} z", "x y z", 2),
        (ADDED.replace("add", "other") + " Done.", ADDED.replace("add", "other") + " Done.", 0),
        (f"I call `<function=add>` by\n{ADDED}", "I call `<function=add>` by", 1),
        (ADDED.replace("1\n", '"<tool_call>"\n') + " x", " x", ["<tool_call>"]),
    ],
)
def test_qwen_coder_without_the_outer_marks(text: str, content: str, num_calls: int | list[str]) -> None:
    for size in (1, 3, 1000):
        finder, found = CallFinder({"add": None}, None, form_of("<function=")), list[str | Call]()
        for start in range(0, len(text), size):
            found += finder.push(text[start : start + size], last=False)
        values = [1] * num_calls if isinstance(num_calls, int) else num_calls
        assert split(found + finder.push("", last=True)) == (content, [("add", json.dumps({"a": value})) for value in values]), size


@pytest.mark.parametrize(
    ("template", "text"),
    [
        *(("<function=", part * 20_000) for part in ("<function=", "<function=add>", "<function=</function>")),
        *(("<function=", part * 20_000) for part in ("<function=<tool_call>", "<function=add></function>")),
        ("<function=", "<function=add><tool_call>" * 20_000),
        ("<function=", "<tool_call></tool_call>" * 20_000),
        ("<function=", "<tool_call><function=add>" + "<parameter=" * 20_000),
        ("<function=", f"<tool_call><function=add><parameter=a>[{'[], ' * 200_000}None]"),
        (mark("sep"), mark("calls begin") + f"{mark('call begin')}add{mark('sep')}" * 4_000),
        (mark("sep"), f"{mark('calls begin')}{mark('call begin')}add{mark('sep')}{' ' * 40_000}x"),
        ("<tool_call>", "<tool_call>" + "1 " * 100_000),
    ],
)
def test_reading_takes_linear_time(template: str, text: str) -> None:
    """The server reads on its event loop. Quadratic time takes seconds here."""
    for piece in (len(text), 100):
        began, finder = time.process_time(), CallFinder({"add": None}, None, form_of(template))
        for start in range(0, len(text), piece):
            finder.push(text[start : start + piece], last=False)
        finder.push("", last=True)
        assert time.process_time() - began < 0.7, piece


@pytest.mark.parametrize(
    ("begun", "text", "expected"),
    [
        (False, "<think>\nI see.\n</think>\n\nYes. </think>", ("I see.", "Yes. </think>")),
        (True, "I see\n</think> Yes", ("I see", "Yes")),
        (True, " never done ", ("never done", "")),
        (False, "No <think>thought</think>", ("", "No <think>thought</think>")),
        (False, " <thin", ("", " <thin")),
        (False, "<think></think>\n{}", ("", "{}")),
        (True, "<think>I see\n</think> Yes", ("I see", "Yes")),  # the model repeats the mark of the prompt
        (True, "I see\n<tool_call>{}</tool_call>", ("I see", "<tool_call>{}</tool_call>")),  # the second mark is forgotten
        (False, "<think>I see <tool</think> <tool_call>", ("I see <tool", "<tool_call>")),
    ],
)
def test_thoughts(begun: bool, text: str, expected: tuple[str, str]) -> None:
    for size in (1, 2, 5, 100):
        thoughts, parts = Thoughts(("<think>", "</think>"), begun, "<tool_call>"), ["", ""]
        for piece, last in [*((text[start : start + size], False) for start in range(0, len(text), size)), ("", True)]:
            parts = [old + new for old, new in zip(parts, thoughts.push(piece, last=last), strict=True)]
        assert tuple(parts) == expected, size


@pytest.mark.parametrize("size", [1, 3, 200])
def test_a_mention_before_a_call_is_text(size: int) -> None:
    functions = {"get": {"type": "object"}, "b": {"type": "object", "properties": {"y": {"type": "string"}}}}
    form = next(form for mark, form in FORMS if mark == "<function=")
    for mention in ("I will use <function=get>", "Code: <function=get><br>"):
        text = f"{mention}\n\n<tool_call>\n<function=b>\n<parameter=y>1</parameter>\n</function>\n</tool_call>"
        finder, found = CallFinder(functions, form=form), list[Any]()
        for start in range(0, len(text), size):
            found += finder.push(text[start : start + size], last=start + size >= len(text))
        assert "".join(part for part in found if isinstance(part, str)) == mention
        assert [part for part in found if not isinstance(part, str)] == [("b", '{"y": "1"}')]
