"""/v1/embeddings as OpenAI has it, /v1/rerank as Cohere and Jina do, /v1/score as vLLM does; over an `EmbeddingEngine`.

Vectors are computed outside the event loop, by the thread that parses the body.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from slipstream.inference.embedding import EmbeddingEngine
from slipstream.inference.engine import ClosedError
from slipstream.inference.server.bodies import EmbeddingsBody, InputUsage, OneEmbedding, OneRank, OneScore, RerankBody, ScoreBody
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.gate import JSON
from slipstream.inference.server.requests import LABELS, Fields, TokenId, parse, without_effect, wrong
from slipstream.inference.server.router import Router
from slipstream.inference.server.state import Front, Serving

MAX_TEXTS = 2048  # per request, as OpenAI's

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]


class Embedding(Fields):
    """What the requests share."""

    labels = LABELS

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # -1, or the context: texts are cut to it
    user: str | None = None  # a label; no effect


class EmbeddingRequest(Embedding):
    input: str | Texts | Tokens | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None  # the first of them, and normalized again if the model's are


class Text(Fields):
    text: str


class RerankRequest(Embedding):
    query: str
    documents: Annotated[list[str | Text], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None


class ScoreRequest(Embedding):
    text_1: str | Texts
    text_2: str | Texts

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


async def _answer(kind: type[Kind], compute: Callable[[Embedder, Kind, bool], object], front: Front, request: Request) -> Response:
    """`compute(engine, the request, whether texts are cut)`, with its ValueErrors as those of the request."""

    def make(server: Serving, body: bytes) -> tuple[Response, list[str]]:
        given, engine = parse(kind, body), server.engine
        server.check_model(given.model or engine.model_name)
        if not isinstance(engine, Embedder) or not engine.embeds:
            raise RequestError(f"{engine.model_name} generates text; serve an encoder for vectors", code="unsupported_model")
        cut = given.truncate_prompt_tokens
        if cut is not None and cut not in (-1, engine.max_context):
            message = f"truncate_prompt_tokens is {cut}; texts are cut to the model's {engine.max_context} tokens (or -1) only"
            raise RequestError(message, param="truncate_prompt_tokens")
        try:
            return JSON(compute(engine, given, cut is not None)), without_effect(given)
        except ValueError as error:
            raise RequestError(str(error), param="input") from None
        except ClosedError as error:
            raise RequestError(str(error), status=503, code="unavailable", retry_after=5) from None

    return await front.respond(request, make)


def _embeddings(engine: Embedder, given: EmbeddingRequest, cut: bool) -> EmbeddingsBody:
    single = isinstance(given.input, str) or isinstance(given.input[0], int)
    texts: Any = [given.input] if single else given.input
    found = engine.embed(texts, truncate=cut)
    vectors = found.vectors
    if given.dimensions is not None:
        if given.dimensions > vectors.shape[1]:
            raise RequestError(f"dimensions is {given.dimensions}; the model has {vectors.shape[1]}", param="dimensions")
        vectors = vectors[:, : given.dimensions]
        vectors = torch.nn.functional.normalize(vectors, dim=1) if engine.pooling.normalize else vectors
    rows = (
        [base64.b64encode(row.numpy().astype("<f4").tobytes()).decode() for row in vectors]
        if given.encoding_format == "base64"
        else vectors.tolist()
    )
    data: list[OneEmbedding] = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    return {"object": "list", "model": engine.model_name, "data": data, "usage": _usage(found.num_tokens)}


def _rerank(engine: Embedder, given: RerankRequest, cut: bool) -> RerankBody:
    texts = [one if isinstance(one, str) else one.text for one in given.documents]
    found = engine.score([(given.query, text) for text in texts], truncate=cut)
    order = sorted(range(len(texts)), key=lambda i: -found.scores[i])[: given.top_n]
    shown = given.return_documents is not False
    results: list[OneRank] = [
        {"index": i, "relevance_score": found.scores[i], "document": {"text": texts[i]} if shown else None} for i in order
    ]
    return {"id": _new_id("rerank"), "model": engine.model_name, "results": results, "usage": _usage(found.num_tokens)}


def _score(engine: Embedder, given: ScoreRequest, cut: bool) -> ScoreBody:
    first, second = ([one] if isinstance(one, str) else one for one in (given.text_1, given.text_2))
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    found = engine.score(pairs, truncate=cut)
    data: list[OneScore] = [{"object": "score", "index": i, "score": one} for i, one in enumerate(found.scores)]
    return {
        "id": _new_id("score"),
        "object": "list",
        "created": int(time.time()),
        "model": engine.model_name,
        "data": data,
        "usage": _usage(found.num_tokens),
    }


def _usage(num_tokens: int) -> InputUsage:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


embeddings = partial(_answer, EmbeddingRequest, _embeddings)
rerank = partial(_answer, RerankRequest, _rerank)
score = partial(_answer, ScoreRequest, _score)
