"""Whatever the logits are, a request with a JSON schema gives JSON of that schema."""

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend

from slipstream.inference import constrain
from slipstream.inference.core import Request, SamplingParams
from slipstream.inference.sampler import LogitsRow, Sampler
from slipstream.inference.text import Tokenizer
from tests.unit.test_inference_text import BACKEND

pytest.importorskip("llguidance")

from slipstream.inference.constrain import Constraint, Grammars

VOCAB = 450  # the model's; the tokenizer has 400
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dög", "你好", 7, None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "kind", "tags", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Tokenizer(BACKEND, end_ids=[2, 0]), VOCAB)


def check(value: Any) -> None:
    assert list(value) == ["name", "kind", "tags", "age"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 8
    assert value["kind"] in ("cat", "dög", "你好", 7, None)
    assert 1 <= len(value["tags"]) <= 3 and all(isinstance(tag, bool) for tag in value["tags"])
    assert type(value["age"]) is int and 0 <= value["age"] <= 120


def allowed(constraint: Constraint) -> set[int]:
    bits = constraint.mask().numpy().view("uint8")
    return {t for t in range(len(bits) * 8) if bits[t // 8] >> t % 8 & 1}


def generated(constraint: Constraint, seed: int, limit: int = 300) -> list[int]:
    request = Request(id="r", tokens=[5], params=SamplingParams(max_tokens=limit), end_ids=frozenset({0, 2}), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    while request.num_generated < limit:
        logits = torch.randn(1, VOCAB, generator=generator) * 3
        token = Sampler(VOCAB).sample(logits, [LogitsRow(request, mask=constraint.mask())])[0].token
        request.tokens.append(token)
        constraint.accept(token)
        if token in request.end_ids:
            break
    return request.tokens[1:]


def test_random_logits_give_valid_json(grammars: Grammars) -> None:
    for seed in range(25):
        constraint = grammars.constraint(json.dumps(SCHEMA))
        ids = generated(constraint, seed)
        assert ids[-1] in (0, 2) and constraint.done
        check(json.loads(grammars_text(ids)))


def grammars_text(ids: list[int]) -> str:
    return Tokenizer(BACKEND).decode(ids)


def test_a_constraint_is_its_requests_own_and_says_when_it_is_done(grammars: Grammars) -> None:
    one, two = (grammars.constraint('{"enum": ["ab", "cd"]}') for _ in range(2))
    assert len(grammars._compiled) >= 1
    before = allowed(two)
    for token in BACKEND.encode('"ab"').ids:
        assert not one.done and not {0, 2} & allowed(one)
        one.accept(token)
    assert one.done and allowed(one) == {0, 2} and allowed(two) == before
    one.accept(2)
    with pytest.raises(ValueError, match="is not allowed by the JSON schema"):
        two.accept(BACKEND.encode("x").ids[0])
    open_ended = grammars.constraint('{"type": "integer"}')
    open_ended.accept(BACKEND.encode("1").ids[0])
    assert not open_ended.done and {0, 2} < allowed(open_ended), "it may end, or go on"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "is not a valid JSON schema"),
        ("3", "it is not an object"),
        ('{"type": "banana"}', "banana"),
        ('{"type": "string", "pattern": "("}', "json_schema cannot be served"),
        ('{"$ref": "#/nowhere"}', "nowhere"),
        ('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "allows no output at all"),
        ('{"type": "integer", "multipleOf": 1000000007}', "multipleOf is above"),  # it would take hours, and all memory
        ('{"type": "number", "multipleOf": 20.03}', "multipleOf is above 2000 of their smallest digit"),  # 1 MB each, and 128 kept
        ('{"anyOf": [{"multipleOf": 997}, {"multipleOf": 0.991}]}', "multipleOf is above"),
    ],
)
def test_a_schema_that_cannot_be_served_is_refused(grammars: Grammars, schema: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        grammars.constraint(schema)


def test_a_grammar_is_not_taken_for_a_schema_of_the_same_text(grammars: Grammars) -> None:
    grammars.constraint('{"enum": ["ab", "cd"]}')
    with pytest.raises(ValueError, match="grammar cannot be served"):
        grammars.constraint(None, '{"enum": ["ab", "cd"]}')


def test_multiples_are_served(grammars: Grammars) -> None:
    for multiple, value in (("0.05", "1.15"), ("250", "-500"), ("1e3", "7000")):
        constraint = grammars.constraint(f'{{"type": "number", "multipleOf": {multiple}}}')
        for token in BACKEND.encode(value).ids:
            constraint.accept(token)
        assert 2 in allowed(constraint), multiple


def test_only_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constrain, "MAX_KEPT", 100)
    grammars = Grammars(Tokenizer(BACKEND, end_ids=[2]), VOCAB, keep=3)
    few = [f'{{"const": {number}}}' for number in range(4)]
    for schema in (*few, few[1]):
        grammars.constraint(schema)
    assert [*grammars._compiled] == [f"schema {each}" for each in (few[2], few[3], few[1])], "the latest used"
    grammars.constraint(long := json.dumps({"const": "x" * 80}))
    assert [*grammars._compiled] == [f"schema {long}"]
    assert grammars.constraint(json.dumps({"const": "x" * 100})).mask().any() and not grammars._compiled


def test_a_vocabulary_without_padding(grammars: Grammars) -> None:
    """The tokenizer has as many tokens as the model, and they fill whole words of the mask."""
    size = BACKEND.get_vocab_size()
    exact = Tokenizer(Backend.from_str(BACKEND.to_str()), end_ids=[2])
    exact.backend.add_tokens([f"<extra{i}>" for i in range(-size % 32)])
    exact = Tokenizer(exact.backend, end_ids=[2])
    assert exact.vocab_size % 32 == 0
    assert len(Grammars(exact, exact.vocab_size).constraint("{}").mask()) == exact.vocab_size // 32


def test_a_tokenizer_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="needs an end token"):
        Grammars(Tokenizer(BACKEND), VOCAB)
