"""Output that is JSON of a given schema: which tokens may come next, through llguidance (needed only for such requests).

A schema is compiled once; a request's `Constraint` is a light copy of the compiled state.
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

from slipstream.extras import needs
from slipstream.inference.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Between JSON's parts: nothing, a space, or a line break with indentation. A model that is free to write blanks for ever does.
WHITESPACE = r"( |\n {0,16})?"

# llguidance bounds what it does for a schema, but makes a state of every remainder of a multipleOf: 1 MB for 2,000.
MAX_REMAINDERS = 2_000
MAX_KEPT = 1_000_000  # characters of all schemas that are kept compiled, which takes up to 120 bytes for each


class Grammars:
    """Compiled schemas of one tokenizer, the latest used kept. Raises MissingPackageError without llguidance."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, keep: int = 128) -> None:
        with needs("output of a JSON schema", extra="serve"):
            import llguidance
        if not tokenizer.end_ids:
            raise ValueError("output of a JSON schema needs an end token, and this model's files name none (eos_token_id)")
        self._matcher = llguidance.LLMatcher
        self._end_ids = sorted(tokenizer.end_ids)
        self._words = -(-max(vocab_size, tokenizer.vocab_size) // 32)  # int32 words of a mask
        self._tokens = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=self._end_ids[0])
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._keep = keep

    def constraint(self, schema: str) -> Constraint:
        """`schema`: JSON text of an object. Raises ValueError with the library's reason."""
        compiled = self._compiled.pop(schema, None) or self._compile(schema)
        self._compiled[schema] = compiled
        while len(self._compiled) > self._keep or sum(map(len, self._compiled)) > MAX_KEPT:
            self._compiled.popitem(last=False)
        return Constraint(compiled.deep_copy(), self._end_ids, self._words)

    def _compile(self, schema: str) -> LLMatcher:
        try:
            if not isinstance(parsed := json.loads(schema), dict):
                raise ValueError("it is not an object")
            if _remainders(parsed) > MAX_REMAINDERS:
                raise ValueError(f"the least common multiple of its multipleOf is above {MAX_REMAINDERS} of their smallest digit")
            grammar = self._matcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
            matcher = self._matcher(self._tokens, grammar, log_level=0)
        except (ValueError, RecursionError, OverflowError) as error:
            raise ValueError(f"json_schema is no JSON schema: {error}") from error
        if matcher.is_error():
            raise ValueError(f"json_schema cannot be served: {matcher.get_error()}")
        matcher.compute_bitmask()  # the first mask of a large schema takes 0.1 s, for which all would wait; copies have its states
        return matcher


class Constraint:
    """What one request may generate next."""

    def __init__(self, matcher: LLMatcher, end_ids: Sequence[int], num_words: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._num_words = num_words

    @property
    def done(self) -> bool:
        """The JSON is complete and nothing but an end token may follow: the request can end here."""
        return self._matcher.is_stopped()

    def mask(self) -> Tensor:
        """int32 [ceil(vocab / 32)], bit t % 32 of word t // 32: token t may come next. End tokens when the JSON may end."""
        words = np.zeros(self._num_words, dtype=np.uint32)
        if not self.done:
            found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: self._num_words]  # it may give one more
            words[: len(found)] = found
        for token in self._end_ids:
            bit = np.uint32(1 << token % 32)
            if self._matcher.is_accepting():
                words[token // 32] |= bit
            else:
                words[token // 32] &= ~bit
        return torch.from_numpy(words.view(np.int32))

    def accept(self, token: int) -> None:
        """`token` was generated. An end token changes nothing."""
        if token not in self._end_ids and not self._matcher.consume_token(token):
            raise ValueError(f"token {token} is not allowed by the JSON schema: {self._matcher.get_error()}")


def _remainders(schema: Any) -> int:
    """How many there are to the least common multiple of every multipleOf in it, whose unit is their smallest digit."""
    steps = [Decimal(repr(value)).normalize() for value in _values(schema, "multipleOf") if type(value) in (int, float)]
    places = max((-exponent for step in steps if isinstance(exponent := step.as_tuple().exponent, int)), default=0)
    total = 1
    for step in steps:
        total = math.lcm(total, int(Fraction(step) * 10 ** max(places, 0)))
        if total > MAX_REMAINDERS:
            break  # numbers without end
    return total


def _values(node: Any, key: str) -> Iterator[Any]:
    """Of `key`, wherever it is."""
    nodes = [node]
    while nodes:
        match nodes.pop():
            case dict() as found:
                if key in found:
                    yield found[key]
                nodes += found.values()
            case list() as found:
                nodes += found
