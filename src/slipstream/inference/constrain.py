"""Structured output: llguidance computes which tokens a JSON schema or a grammar allows next (needed only for such requests).

Each schema or grammar is compiled once. A request's `Constraint` is a cheap copy of the compiled state.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from slipstream.inference.text import Tokenizer
from slipstream.world.extras import needs

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Between JSON tokens: nothing, a space, or a line break with indentation. Without a limit, models generate whitespace endlessly.
WHITESPACE = r"( |\n {0,16})?"

# llguidance limits the work for a schema, but not for multipleOf: it creates a state per remainder, 1 MB for 2,000 of them.
MAX_REMAINDERS = 2_000
MAX_KEPT = 1_000_000  # characters of all cached schemas; a compiled schema takes up to 120 bytes per character


class Grammars:
    """An LRU cache of the compiled schemas of one tokenizer. Raises MissingPackageError without llguidance."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, keep: int = 128) -> None:
        with needs("output of a JSON schema", extra="serve"):
            import llguidance
        if not tokenizer.end_ids:
            raise ValueError("json_schema needs an end token, and this model's files have none (eos_token_id)")
        self._matcher = llguidance.LLMatcher
        self._end_ids = sorted(tokenizer.end_ids)
        self._words = -(-max(vocab_size, tokenizer.vocab_size) // 32)  # int32 words of a mask
        self._tokens = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=self._end_ids[0])
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._keep = keep

    def constraint(self, schema: str | None, grammar: str | None = None) -> Constraint:
        """Start a constraint by a JSON schema (an object as text) or else a grammar. Raises ValueError with llguidance's reason."""
        key = f"grammar {grammar}" if schema is None else f"schema {schema}"
        compiled = self._compiled.pop(key, None)
        if compiled is None:
            compiled = self._parse(grammar or "") if schema is None else self._compile(schema)
        self._compiled[key] = compiled
        while len(self._compiled) > self._keep or sum(map(len, self._compiled)) > MAX_KEPT:
            self._compiled.popitem(last=False)
        return Constraint(compiled.deep_copy(), self._end_ids, self._words)

    def _compile(self, schema: str) -> LLMatcher:
        try:
            check_schema(json.loads(schema))
            grammar = self._matcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
            matcher = self._matcher(self._tokens, grammar, log_level=0)
        except (ValueError, RecursionError, OverflowError) as error:
            raise ValueError(f"json_schema is not a valid JSON schema: {error}") from error
        return self._checked("json_schema", matcher)

    def _parse(self, grammar: str) -> LLMatcher:
        return self._checked("grammar", self._matcher(self._tokens, as_lark(grammar), log_level=0))

    def _checked(self, name: str, matcher: LLMatcher) -> LLMatcher:
        if matcher.is_error():
            raise ValueError(f"{name} cannot be served: {matcher.get_error()}")
        # Compute the first mask here, not in the engine's loop: for a large schema it takes 0.1 s. Copies inherit it.
        if not Constraint(matcher, self._end_ids, self._words).mask().any():
            raise ValueError(f"{name} allows no output at all, not even an empty one")
        return matcher


class Constraint:
    """The state of one request's grammar."""

    def __init__(self, matcher: LLMatcher, end_ids: Sequence[int], num_words: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._num_words = num_words

    @property
    def done(self) -> bool:
        """Whether the JSON is complete and only an end token may follow."""
        return self._matcher.is_stopped()

    def mask(self) -> Tensor:
        """int32 [ceil(vocab / 32)]: bit t % 32 of word t // 32: token t may come next. End tokens are set if the JSON may end."""
        words = np.zeros(self._num_words, dtype=np.uint32)
        if not self.done:
            allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: self._num_words]  # may have one more
            words[: len(allowed)] = allowed
        for token in self._end_ids:
            bit = np.uint32(1 << token % 32)
            if self._matcher.is_accepting():
                words[token // 32] |= bit
            else:
                words[token // 32] &= ~bit
        return torch.from_numpy(words.view(np.int32))

    def accept(self, token: int) -> None:
        """Advance by a generated token; a no-op for end tokens."""
        if token not in self._end_ids and not self._matcher.consume_token(token):
            raise ValueError(f"token {token} is not allowed by the JSON schema or grammar: {self._matcher.get_error()}")


def as_lark(grammar: str) -> str:
    """Convert GBNF to Lark; Lark is returned unchanged. Raises ValueError."""
    if "::=" not in grammar:
        return grammar
    with needs("output of a grammar", extra="serve"):
        from llguidance.gbnf_to_lark import any_to_lark
    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # it raises that, for a rule that does not exist
        raise ValueError(f"grammar cannot be served: {error}") from error


def check_schema(schema: Any) -> None:
    """Raise ValueError for a JSON schema that would take too long to compile."""
    if not isinstance(schema, dict):
        raise ValueError("it is not an object")
    if _remainders(schema) > MAX_REMAINDERS:
        raise ValueError(f"the least common multiple of its multipleOf is above {MAX_REMAINDERS} of their smallest digit")


def _remainders(schema: Any) -> int:
    """Return the least common multiple of all multipleOf in the schema, in units of their smallest decimal digit."""
    steps = [Decimal(repr(value)).normalize() for value in _values(schema, "multipleOf") if type(value) in (int, float)]
    places = max((-exponent for step in steps if isinstance(exponent := step.as_tuple().exponent, int)), default=0)
    total = 1
    for step in steps:
        total = math.lcm(total, int(Fraction(step) * 10 ** max(places, 0)))
        if total > MAX_REMAINDERS:
            break  # stop before the numbers grow without bound
    return total


def _values(node: Any, key: str) -> Iterator[Any]:
    """Yield the values of `key` at all levels."""
    nodes = [node]
    while nodes:
        match nodes.pop():
            case dict() as child:
                if key in child:
                    yield child[key]
                nodes += child.values()
            case list() as child:
                nodes += child
