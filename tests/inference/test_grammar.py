"""What a grammar of calls allows is what the finder of calls reads, in every form; and whatever the logits are, calls of strict
functions follow their schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
import torch

from slipstream.inference.core import Request, SamplingParams
from slipstream.inference.sampler import LogitsRow, Sampler
from slipstream.inference.server.calls import FORMS, CallFinder, CallForm, Thoughts
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.grammar import Lark, structured
from slipstream.inference.text import BYTE_OF, SHOWN, Tokenizer

pytest.importorskip("llguidance")

from slipstream.inference.constrain import Grammars

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SAY = {"type": "object", "properties": {"kind": {"enum": ["x", "y"]}}, "required": ["kind"], "additionalProperties": False}
TOOLS = [("add", ADD), ("say", SAY)]
WRITTEN = list({form.begin: form for _, form in FORMS if form.begin}.values())
THINK = ("<think>", "</think>")


def tokenizer(*, tokens: bool) -> Tokenizer:
    """A byte is a token; `tokens`: so are the marks of calls and reasoning, special ones."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={text: number for number, text in enumerate(BYTE_OF)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>", *(sorted(SHOWN) if tokens else ())])
    return Tokenizer(backend, end_ids=[256])


SORTS = {tokens: tokenizer(tokens=tokens) for tokens in (False, True)}
GRAMMARS = {tokens: Grammars(one, one.vocab_size) for tokens, one in SORTS.items()}


def allows(tokens: bool, grammar: str, text: str) -> bool:
    constraint = GRAMMARS[tokens].constraint(None, grammar)
    for token in SORTS[tokens].encode(text):
        try:
            constraint.accept(token)
        except ValueError:
            return False
    return bool(constraint.mask()[8] & 1)  # it may end: token 256


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("form", WRITTEN, ids=map(str, range(len(WRITTEN))))
def test_what_is_allowed_is_read(form: CallForm, tokens: bool) -> None:
    def call(arguments: str, name: str = "add") -> str:
        return form.begin.replace("{}", name) + arguments + form.end

    functions, writer = dict(TOOLS), SORTS[tokens].marks
    marked = form.begin.startswith(form.open)
    free = Lark(writer).answer(tools=TOOLS, form=form)
    beside = Lark(writer).answer(tools=TOOLS, form=form, schema={"type": "array"})
    thoughtful = Lark(writer).answer(tools=TOOLS, form=form, thoughts=THINK, begun=True)
    good = call('{"a": 7}')
    for grammar, text in (
        (free, good),
        (beside, good),
        (free, "Hello."),
        (beside, "[1, 2]"),
        (thoughtful, "hm</think>\n\n" + good),
    ):
        assert allows(tokens, grammar, text), text
    if marked:
        assert allows(tokens, free, "Well: " + good)
    for bad in (call('{"a": "7"}'), call("{}"), call('{"a": 7}', "sub")):
        assert not allows(tokens, free, bad) and not allows(tokens, beside, bad), bad
    assert not allows(tokens, beside, "Hello.") and not allows(tokens, thoughtful, good)
    found = CallFinder(functions, None, form).push("Well: " * marked + good, last=True)
    assert [part for part in found if part] == ["Well:"] * marked + [("add", '{"a": 7}')]
    assert SORTS[tokens].decode(SORTS[tokens].encode(good), skip_special=False) == good


@pytest.mark.parametrize("tokens", [False, True])
def test_any_logits_give_calls_of_the_schemas(tokens: bool) -> None:
    form, one = FORMS[-1][1], SORTS[tokens]
    grammar = Lark(one.marks).answer(tools=TOOLS, form=form, schema={"const": 5}, thoughts=THINK)
    num_calls = 0
    for seed in range(20):
        constraint, generator = GRAMMARS[tokens].constraint(None, grammar), torch.Generator().manual_seed(seed)
        request = Request(id="r", tokens=[5], params=SamplingParams(), end_ids=frozenset({256}), seed=seed)
        while request.num_generated < 400 and request.tokens[-1] != 256:
            logits = torch.randn(1, one.vocab_size, generator=generator) * 3
            logits[0, 256] += 5
            logits[0, ord("<")] += 3  # calls are wanted
            token = Sampler(one.vocab_size).sample(logits, [LogitsRow(request, mask=constraint.mask())])[0].token
            request.tokens.append(token)
            constraint.accept(token)
        if request.tokens[-1] == 256:
            _, text = Thoughts(THINK, False).push(one.decode(request.tokens[1:-1], skip_special=False), last=True)
            found = CallFinder(dict(TOOLS), None, form).push(text, last=True)
            calls = [part for part in found if not isinstance(part, str)]
            num_calls += len(calls)
            assert calls or json.loads("".join(part for part in found if isinstance(part, str))) == 5, text
            for name, arguments in calls:
                value: Any = json.loads(arguments)
                assert type(value["a"]) is int if name == "add" else value["kind"] in ("x", "y")
    assert num_calls >= 3


def test_texts_of_structured_fields() -> None:
    rows: list[tuple[str, Any, str, str]] = [
        ("regex", "a/b[0-9]+", "a/b77", "a/b"),
        ("regex", "(a|[}])b{2}", "}bb", "}b"),
        ("regex", r"\d[\d.]\D\\\\d", "1.a\\\\d", "1.1\\\\d"),
        *(("regex", digits, "12", "1\u0661") for digits in (r"\d{2}", r"[\d]+", r"[^\D]+")),
        ("choice", ["yes", "no way"], "no way", "no"),
        ("grammar", 'root ::= "yes" | "no"', "no", "maybe"),
        ("grammar", "start: /[xy]+/", "xyx", "z"),
    ]
    for kind, value, good, bad in rows:
        grammar = structured({kind: (kind, value)})["grammar"]
        assert grammar is not None and allows(False, grammar, good) and not allows(False, grammar, bad), kind
        for tokens in (False, True):
            after = Lark(SORTS[tokens].marks).answer(grammar=grammar, thoughts=THINK, begun=True)
            assert allows(tokens, after, "hm</think>\n\n" + good), kind
            assert not any(allows(tokens, after, text) for text in (good, "hm</think>" + bad)), kind
    hidden = r'start: %json {"type": "integer", "multiple\u004ff": 1000000007}'  # llguidance would take all memory for it
    for text in (hidden, hidden.replace(r"\u004f", "O"), json.dumps({"grammars": [{"lark_grammar": hidden}]})):
        with pytest.raises(RequestError, match=r"multipleOf or|not JSON"):
            structured({"guided_grammar": ("grammar", text)})
    for wrong in ("start: x", 'root ::= "a', "nonsense"):
        with pytest.raises(ValueError, match="grammar cannot be served"):
            GRAMMARS[False].constraint(None, wrong)
