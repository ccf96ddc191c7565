"""Texts to vectors: `EmbeddingEngine`, over an encoder, or over a decoder that was trained to embed.

Texts are computed without padding, many in one forward, each attending only to its own tokens. Calls that arrive during a forward
share the next one. sentence-transformers' files in the model's folder define how hidden states become a vector (`Pooling.read`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.config import huggingface
from slipstream.inference.config import TransformerConfig
from slipstream.inference.core import SamplingParams
from slipstream.inference.cross_encoder import CrossEncoder
from slipstream.inference.engine import ClosedError, FailedError, probed, text_of
from slipstream.inference.runner import BLOCK_SIZE
from slipstream.inference.stats import Stats
from slipstream.inference.text import Tokenizer

__all__ = ["EmbeddingEngine", "Pooling"]

logger = logging.getLogger(__name__)

_TYPED = ("bert", "electra")  # families that use token types, from transformers' tokenizers; in others all types are 0
ROWS = 2048  # tokens per forward: more make it no faster, and its scratch memory would not fit into caches

_POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # (rows [T, E], tokens per text [N]) -> [N, E]
    "cls_token": lambda rows, lengths: rows[lengths.cumsum(0) - lengths],
    "lasttoken": lambda rows, lengths: rows[lengths.cumsum(0) - 1],
    "mean_tokens": lambda rows, lengths: torch.segment_reduce(rows, "mean", lengths=lengths),
    "max_tokens": lambda rows, lengths: torch.segment_reduce(rows, "max", lengths=lengths),
    "mean_sqrt_len_tokens": lambda rows, lengths: torch.segment_reduce(rows, "sum", lengths=lengths) / lengths.sqrt()[:, None],
}
_NEWER = {"cls": "cls_token", "lasttoken": "lasttoken", "mean": "mean_tokens", "max": "max_tokens"}
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a text's hidden states become one vector."""

    modes: tuple[str, ...] = ("mean_tokens",)  # of _POOLINGS; several are concatenated
    normalize: bool = False  # scale vectors to length 1
    max_tokens: int | None = None  # per text; None: the model's context
    prompt: str = ""  # before each text

    @classmethod
    def read(cls, folder: Path | None) -> Pooling:
        """Read modules.json and the files that it names; without it, the mean of all tokens. Raises ValueError for others."""
        if folder is None or not (folder / "modules.json").is_file():
            return cls()
        modules = huggingface.read_modules(folder / "modules.json")
        if other := [name for name in modules if name not in _MODULES]:
            raise ValueError(f"{folder / 'modules.json'} has a module {other[0]}; supported are {', '.join(_MODULES)}")
        modes, prompt = cls().modes, _default_prompt(folder / "config_sentence_transformers.json")
        if "Pooling" in modules:
            pooled = huggingface.read_object(file := folder / modules["Pooling"] / "config.json")
            modes = _modes(pooled)
            if not modes or not set(modes) <= set(_POOLINGS):
                raise ValueError(f"{file} pools by {', '.join(modes) or 'nothing'}; supported are {', '.join(_POOLINGS)}")
            if prompt and pooled.get("include_prompt") is False:
                raise ValueError(f"{file} pools without the default prompt (include_prompt false), which is not supported")
        limits = folder / "sentence_bert_config.json"
        limit = huggingface.read_object(limits).get("max_seq_length") if limits.is_file() else None
        return cls(modes, "Normalize" in modules, limit, prompt)

    def __call__(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """rows: fp32 [tokens of all texts, hidden]; lengths: tokens of each -> fp32 [texts, dimensions]."""
        pooled = torch.cat([_POOLINGS[mode](rows, lengths) for mode in self.modes], 1)
        return torch.nn.functional.normalize(pooled, dim=1) if self.normalize else pooled


def _modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    if isinstance(config.get("pooling_mode"), str):
        return (_NEWER.get(config["pooling_mode"], config["pooling_mode"]),)
    return tuple(key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on is True)


def _default_prompt(file: Path) -> str:
    """The one of `prompts` that applies if the caller names none; "" if there is none."""
    given = huggingface.read_object(file) if file.is_file() else {}
    prompts, name = given.get("prompts") or {}, given.get("default_prompt_name")
    if name is not None and name not in prompts:
        raise ValueError(f"{file}: default_prompt_name is {name!r}; it must be null or of prompts: {', '.join(prompts)}")
    return "" if name is None else str(prompts[name])


class Forward(Protocol):
    """`NativeDecoder` or `Decoder`."""

    config: TransformerConfig
    num_blocks: int
    max_context: int

    def hidden(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Tensor: ...


class Embedded(NamedTuple):
    vectors: Tensor  # fp32 [texts, dimensions]
    num_tokens: int


class Scored(NamedTuple):
    scores: list[float]  # higher is more alike
    num_tokens: int


@dataclass(slots=True, eq=False)
class _Text:
    """One text of a call, and its vector once it is computed."""

    tokens: Sequence[int]
    types: Sequence[int] | None = None  # token types, if it is a pair
    vector: Tensor | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.vector is not None or self.error is not None


def _types_of(batch: Sequence[_Text]) -> list[Sequence[int]] | None:
    """The types of all tokens; None: all are 0."""
    if not any(any(item.types or ()) for item in batch):
        return None
    return [item.types or [0] * len(item.tokens) for item in batch]


class EmbeddingEngine:
    """Any thread may call it. It has the parts of an engine that a server and `InferenceEngine` need, but does not generate."""

    sampling: Mapping[str, Any] = {}
    end_ids: frozenset[int] = frozenset()
    adapters: tuple[str, ...] = ()
    embeds = True

    def __init__(
        self,
        forward: Forward,
        tokenizer: Tokenizer | None,
        pooling: Pooling,
        *,
        vocab_size: int,
        model_name: str,
        classifier: CrossEncoder | None = None,
        closed: str = "",
    ) -> None:
        """`classifier`: pairs get scores, and texts no vectors. `closed`: if not empty, every call is rejected with this text."""
        self.runner, self.tokenizer, self.pooling, self.model_name = forward, tokenizer, pooling, model_name
        self.classifier = classifier
        self._has_types = getattr(forward.config, "family", "") in _TYPED
        self.max_context = min(forward.max_context, pooling.max_tokens or forward.max_context)
        self._vocab_size = vocab_size
        self._waiting: deque[deque[_Text]] = deque()  # per call; calls take turns
        self._running = threading.Lock()  # held during a forward by the call that computes for all
        self._closed = closed
        self._forwards = self._tokens = 0

    @property
    def does(self) -> str:
        return "embeds texts" if self.classifier is None else "scores pairs of texts"

    @property
    def instead(self) -> str:
        """What it does instead of generating."""
        names = ("embed", "embeddings") if self.classifier is None else ("score", "rerank")
        return "call {}(), or POST /v1/{}".format(*names)

    # ---- vectors

    def embed(self, texts: Sequence[str | Sequence[int]], *, truncate: int = False) -> Embedded:
        """Vectors of texts, or of token ids as given. Raises ValueError for a text that is empty or too long (`truncate` cuts it to
        so many tokens; True: `max_context`, the most), FailedError if the forward of one text fails alone, ClosedError."""
        if self.classifier is not None:
            raise ValueError(f"{self.model_name} scores pairs of texts and makes no vectors: call score(), or POST /v1/rerank")
        return self._embed({f"text {i}": text for i, text in enumerate(texts)}, truncate)

    def _embed(self, texts: Mapping[str, str | Sequence[int]], truncate: int) -> Embedded:
        """`texts`: name in error messages -> text."""
        return self._run([_Text(self._tokens_of(name, text, truncate)) for name, text in texts.items()])

    def _run(self, items: Sequence[_Text]) -> Embedded:
        """Compute `items`, together with texts that other calls wait for."""
        if items:
            self._waiting.append(deque(items))
        for item in items:
            while not item.done:
                with self._running:
                    if not item.done:
                        self._compute()
        failed = next((item.error for item in items if item.error is not None), None)
        if failed is not None:
            raise failed
        vectors = [item.vector for item in items if item.vector is not None]
        if not vectors:
            return Embedded(torch.empty(0, len(self.pooling.modes) * self.runner.config.hidden_size), 0)
        return Embedded(torch.stack(vectors), sum(len(item.tokens) for item in items))

    def score(self, pairs: Sequence[tuple[str, str]], *, truncate: int = False) -> Scored:
        """The classifier's score of each pair, or the cosine of its texts' vectors. Raises as `embed`, for "text 2 of pair 0", or
        for "pair 0" as a whole, whose longer text is cut first."""
        if self.classifier is not None:
            done = self._run([self._pair_of(f"pair {i}", pair, truncate) for i, pair in enumerate(pairs)])
            return Scored(done.vectors.flatten().tolist(), done.num_tokens)
        names: dict[str, str] = {}
        for i, pair in enumerate(pairs):
            for side, text in enumerate(pair, 1):
                names.setdefault(text, f"text {side} of pair {i}")
        places = {text: i for i, text in enumerate(names)}
        found = self._embed({name: text for text, name in names.items()}, truncate)
        vectors = torch.nn.functional.normalize(found.vectors, dim=1)
        firsts, seconds = ([places[pair[side]] for pair in pairs] for side in (0, 1))
        return Scored((vectors[firsts] * vectors[seconds]).sum(1).tolist(), found.num_tokens)

    def _pair_of(self, name: str, pair: tuple[str, str], truncate: int) -> _Text:
        if self.tokenizer is None:
            raise ValueError(f"{name} is text, and {self.model_name} has no tokenizer; open it with one")
        most = self._most(truncate)
        tokens, types = self.tokenizer.pair(*pair, most if truncate else None)
        return _Text(self._tokens_of(name, tokens, truncate=False), types)

    def _most(self, truncate: int) -> int:
        if not isinstance(truncate, bool) and truncate < 1:
            raise ValueError(f"truncate is {truncate}; it must be True, False, or a number of tokens of at least 1")
        return self.max_context if isinstance(truncate, bool) else min(truncate, self.max_context)

    def _tokens_of(self, name: str, text: str | Sequence[int], truncate: int) -> Sequence[int]:
        most = self._most(truncate)
        if not isinstance(text, str):
            tokens = list(text[:most] if truncate else text)
        elif self.tokenizer is None:
            raise ValueError(f"{name} is text, and {self.model_name} has no tokenizer; give token ids, or open it with one")
        else:
            text = self.pooling.prompt + text
            tokens = self.tokenizer.cut(text, most, "right", special=True) if truncate else self.tokenizer.encode(text)
        if len(tokens) > self.max_context:
            raise ValueError(
                f"{name} has {len(tokens)} tokens; {self.model_name} takes {self.max_context}: cut it, or truncate "
                "(truncate=True; over HTTP truncate_prompt_tokens: -1)"
            )
        if not tokens:
            raise ValueError(f"{name} has no tokens")
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise ValueError(f"{name} has a token id outside of 0 to {self._vocab_size - 1}")
        return tokens

    def _compute(self) -> None:
        """One forward, with texts of each call in turn, so that no call waits for all texts of another."""
        batch: list[_Text] = []
        rows = blocks = 0
        while self._waiting:
            texts = self._waiting[0]
            length = len(texts[0].tokens)
            rows, blocks = rows + length, blocks + -(-length // BLOCK_SIZE)
            if batch and (rows > ROWS or blocks > self.runner.num_blocks):
                break
            batch.append(texts.popleft())
            self._waiting.popleft()
            if texts:
                self._waiting.append(texts)
        try:
            self._compute_in_parts(batch)
        finally:  # an interrupt in the thread that computes would leave the calls of the others waiting
            for item in batch:
                if not item.done:
                    item.error = ClosedError("the forward was interrupted")

    def _compute_in_parts(self, batch: Sequence[_Text]) -> None:
        """A text must not end another's call: as in `engine`, [Note: A forward that fails]."""
        if (error := self._closed or self._forward(batch)) is None:
            return
        if not self._closed and len(batch) > 1:
            half = len(batch) // 2
            for part in (batch[:half], batch[half:]):
                self._compute_in_parts(part)
            return
        if not self._closed and (broken := probed(lambda: self.runner.hidden([[0]]).cpu())) is not None:
            self.fail(f"no text can be computed any more, nor a single token alone: {broken}")
        for item in batch:
            item.error = ClosedError(self._closed) if self._closed else FailedError(f"the forward failed: {error}")

    def _forward(self, batch: Sequence[_Text]) -> str | None:
        """Compute texts together. Return None, or the error text."""
        try:
            hidden = self.runner.hidden([item.tokens for item in batch], _types_of(batch) if self._has_types else None)
            lengths = torch.tensor([len(item.tokens) for item in batch], device=hidden.device)
            vectors = (self.classifier or self.pooling)(hidden, lengths).cpu()
        except Exception as error:  # any error of the model or device
            logger.error("a forward of %d texts failed: %s", len(batch), text_of(error), exc_info=len(batch) == 1)
            return text_of(error)
        self._forwards, self._tokens = self._forwards + 1, self._tokens + len(hidden)
        for item, vector in zip(batch, vectors, strict=True):
            item.vector = vector
        return None

    # ---- what every engine has

    @property
    def healthy(self) -> bool:
        return not self._closed

    def start(self) -> None:
        """Nothing to start: calls compute in their own threads."""

    def prepare(self) -> None:
        """Nothing to prepare."""

    def fail(self, why: str) -> None:
        """Reject all calls from now on, and return at once. The running forward ends with its own error."""
        if not self._closed:
            self._closed = why
            logger.error("the engine of %s fails: %s", self.model_name, why)

    def close(self) -> None:
        with self._running:
            self._closed = "the engine is closed"

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        return list(self._tokens_of("the text", prompt, truncate=False))

    def submit(self, prompt: Any, params: SamplingParams, **more: Any) -> Any:
        raise ValueError(f"{self.model_name} {self.does} and does not generate: {self.instead}")

    def load_adapter(self, name: str, folder: Any, *, replace: bool = False) -> None:
        raise ValueError(f"{self.model_name} {self.does}, and adapters are of models that generate")

    def unload_adapter(self, name: str) -> None:
        raise ValueError(f"there is no adapter {name!r:.100}")

    def cancel(self, handle: Any) -> None:
        raise AssertionError("nothing is submitted")

    def hold(self, handle: Any, held: bool) -> None:
        raise AssertionError("nothing is submitted")

    def stats(self) -> Stats:
        return Stats(
            healthy=self.healthy,
            blocks=self.runner.num_blocks,
            block_size=BLOCK_SIZE,
            prompt_tokens=self._tokens,
            forwards=self._forwards,
        )
