"""/v1/embeddings as in OpenAI's API, /v1/rerank as in Cohere's and Jina's, /v1/score as in vLLM, over an `EmbeddingEngine`."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import AliasChoices, Field, model_validator
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from slipstream.inference.embedding import EmbeddingEngine
from slipstream.inference.server.bodies import EmbeddingsBody, InputUsage, OneEmbedding, OneRank, OneScore, RerankBody, ScoreBody
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.gate import JSON
from slipstream.inference.server.requests import LABELS, Fields, TokenId, explained, wrong
from slipstream.inference.server.router import Router
from slipstream.inference.server.state import Front, Serving

MAX_TEXTS = 2048  # per request, as in OpenAI's API

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
OneOrMore = Annotated[str | Texts, explained("texts", f"must be a string or a list of 1 to {MAX_TEXTS:,} strings")]


class Embedding(Fields):
    """The common fields of the requests."""

    labels = LABELS

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # how many to keep; -1: the context
    user: str | None = None  # a label; no effect


class EmbeddingRequest(Embedding):
    input: Annotated[
        str | Texts | Tokens | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_TEXTS)],
        explained("input", f"must be a string, 1 to {MAX_TEXTS:,} strings, a list of token ids, or 1 to {MAX_TEXTS:,} such lists"),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None  # keep only the first ones, and normalize again if the model does


class Text(Fields):
    text: str


class RerankRequest(Embedding):
    query: str
    documents: Annotated[
        list[Annotated[str | Text, explained("document", "must be a string, or an object whose text is one")]],
        Field(min_length=1, max_length=MAX_TEXTS),
    ]
    top_n: Annotated[int, Field(ge=0)] | None = None  # 0: all, vLLM's default
    return_documents: bool | None = None


class ScoreRequest(Embedding):
    text_1: Annotated[OneOrMore, Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))]  # newer names in vLLM
    text_2: Annotated[OneOrMore, Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))]

    @model_validator(mode="after")
    def _fit(self) -> ScoreRequest:
        """One text against all, or pairs."""
        if isinstance(self.text_1, list) and isinstance(self.text_2, list) and len(self.text_1) not in (1, len(self.text_2)):
            raise wrong("text_1", f"text_1 has {len(self.text_1)} texts and text_2 {len(self.text_2)}: give one, or as many")
        if isinstance(self.text_1, list) and isinstance(self.text_2, str) and len(self.text_1) > 1:
            raise wrong("text_2", "text_2 must be a list if text_1 is one")
        return self


Kind = TypeVar("Kind", bound=Embedding)
Embedder = EmbeddingEngine | Router


async def _answer(
    kind: type[Kind], compute: Callable[[Embedder, Kind, int], Response], params: tuple[str, ...], front: Front, request: Request
) -> Response:
    """Respond with `compute(engine, request, to how many tokens to cut texts)` (True: the context; False: not). `params`: the
    fields that its ValueErrors name, for all texts, or for the first and the second text of a pair."""

    def prepare(server: Serving, body: bytes) -> tuple[Kind, Callable[[], Response]]:
        given, engine = server.parsed(kind, body), server.engine
        if not isinstance(engine, Embedder) or not engine.embeds:
            message = f"{engine.model_name} generates text; serve an encoder for vectors, and it or a cross-encoder for scores"
            raise RequestError(message, code="unsupported_model")
        cut = given.truncate_prompt_tokens
        if cut is not None and not (cut == -1 or 1 <= cut <= engine.max_context):
            message = f"truncate_prompt_tokens is {cut}; it must be -1, or 1 to the model's {engine.max_context} tokens"
            raise RequestError(message, param="truncate_prompt_tokens")
        return given, partial(compute, engine, given, cut == -1 if cut in (None, -1) else cut)

    try:
        return await front.compute(request, prepare)
    except ValueError as error:
        raise RequestError(str(error), param=params[str(error).startswith("text 2 of")]) from None


def _embeddings(engine: Embedder, given: EmbeddingRequest, cut: int) -> Response:
    single = isinstance(given.input, str) or isinstance(given.input[0], int)
    texts: Any = [given.input] if single else given.input
    found = engine.embed(texts, truncate=cut)
    vectors = found.vectors
    if given.dimensions is not None:
        if given.dimensions > vectors.shape[1]:
            raise RequestError(f"dimensions is {given.dimensions}; the model has {vectors.shape[1]}", param="dimensions")
        vectors = vectors[:, : given.dimensions]
        vectors = torch.nn.functional.normalize(vectors, dim=1) if engine.pooling.normalize else vectors
    body: EmbeddingsBody = {"object": "list", "model": engine.model_name, "data": [], "usage": _usage(found.num_tokens)}
    begin, _, end = bytes(JSON(body).body).rpartition(b"[]")
    packed = given.encoding_format == "base64"
    rows = b",".join(to_json(_row(i, row, packed)) for i, row in enumerate(vectors))  # each holds the GIL for a moment
    return Response(b"%b[%b]%b" % (begin, rows, end), media_type=JSON.media_type)


def _row(index: int, row: torch.Tensor, packed: bool) -> OneEmbedding:
    values = base64.b64encode(row.numpy().astype("<f4").tobytes()).decode() if packed else row.tolist()
    return {"object": "embedding", "index": index, "embedding": values}


def _rerank(engine: Embedder, given: RerankRequest, cut: int) -> Response:
    texts = [one if isinstance(one, str) else one.text for one in given.documents]
    found = engine.score([(given.query, text) for text in texts], truncate=cut)
    order = sorted(range(len(texts)), key=lambda i: -found.scores[i])[: given.top_n or None]
    results: list[OneRank] = [{"index": i, "relevance_score": found.scores[i]} for i in order]
    for one in results if given.return_documents is not False else ():
        one["document"] = {"text": texts[one["index"]]}
    body: RerankBody = {"id": _new_id("rerank"), "model": engine.model_name, "results": results, "usage": _usage(found.num_tokens)}
    return JSON(body)


def _score(engine: Embedder, given: ScoreRequest, cut: int) -> Response:
    first, second = ([one] if isinstance(one, str) else one for one in (given.text_1, given.text_2))
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    found = engine.score(pairs, truncate=cut)
    data: list[OneScore] = [{"object": "score", "index": i, "score": one} for i, one in enumerate(found.scores)]
    body: ScoreBody = {
        "id": _new_id("score"),
        "object": "list",
        "created": int(time.time()),
        "model": engine.model_name,
        "data": data,
        "usage": _usage(found.num_tokens),
    }
    return JSON(body)


def _usage(num_tokens: int) -> InputUsage:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


embeddings = partial(_answer, EmbeddingRequest, _embeddings, ("input",))
rerank = partial(_answer, RerankRequest, _rerank, ("query", "documents"))
score = partial(_answer, ScoreRequest, _score, ("text_1", "text_2"))
