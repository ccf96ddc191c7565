"""/v1/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from slipstream.inference.server.answers import CompletionFormat
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.grammar import structured
from slipstream.inference.server.requests import MAX_SEQUENCES, NOT_SERVED, SampledFields, TokenId, explained, wrong
from slipstream.inference.server.state import MAX_IDS, Caller, Prepared, Serving, check_entries


class CompletionRequest(SampledFields):
    prompt: Annotated[
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]], Field(min_length=1, fail_fast=True)],
        explained("prompt", "must be a non-empty string, list of strings, list of token ids, or list of lists of token ids"),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    best_of: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None  # completions generated; the n likeliest are returned
    echo: bool | None = None
    suffix: Annotated[Literal[""] | None, NOT_SERVED] = None

    @model_validator(mode="after")
    def _is_consistent(self) -> CompletionRequest:
        if self.best_of is not None and (self.best_of < (self.n or 1) or (self.stream and self.best_of > (self.n or 1))):
            raise wrong("best_of", "best_of must be n or more, and equal to n in a stream")
        return self

    def limits(self, context: int) -> tuple[int | None, int]:
        """The tokens to generate: as many as requested, or else at most the second number, OpenAI's default."""
        return (None, context) if self.max_tokens == -1 else (self.max_tokens, 16)

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or a list of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


def prepare(server: Serving, request: CompletionRequest, caller: Caller) -> Prepared:
    """Raises RequestError."""
    kept = request.n or 1
    width = max(kept, request.best_of or 1)
    server.check_number(len(request.prompts()), width)
    requested, default = request.limits(server.engine.max_context)
    cut = request.cut(server.engine.max_context, request.max_tokens if request.max_tokens is not None else default)
    special = request.add_special_tokens is not False
    prompts = [server.encode(prompt, "prompt", special=special, cut=cut) for prompt in request.prompts()]
    if not all(prompts):
        raise RequestError("a prompt has no tokens", param="prompt")
    if request.return_token_ids or request.echo:
        check_entries(sum(map(len, prompts)) * kept, "return_token_ids" if request.return_token_ids else "echo", MAX_IDS)
    scores = request.logprobs if request.echo and request.prompt_logprobs is None else request.prompt_logprobs
    params = request.sampling(
        server.max_tokens(prompts, requested, default, "prompt"),
        logprobs=request.logprobs if width == kept else request.logprobs or 0,  # they rank the best of several
        prompt_logprobs=scores,
        **structured(request.structured()),
    )
    form = CompletionFormat(
        request,
        request.model or server.engine.model_name,
        server.tokenizer,
        width=width,
        logprobs=request.logprobs is not None,
        prompts=prompts,
        echo=request.prompts() if request.echo else (),
        silent=request.max_tokens == 0,
        kept=kept,
    )
    return server.prepared(request, prompts, params, form, caller, n=width, constraint=next(iter(request.structured()), ""))
