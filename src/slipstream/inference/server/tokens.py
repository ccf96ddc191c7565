"""/tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from pydantic import Field, JsonValue, model_validator

from slipstream.inference.server.bodies import TextBody, TokensBody
from slipstream.inference.server.chat import Message, Tool, templated
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.requests import MAX_MESSAGES, Fields, TokenId, wrong
from slipstream.inference.server.state import Front, Serving

MAX_TOKENS = 131_072  # per request: the JSON of its response holds the GIL for milliseconds


class TokenizeRequest(Fields):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None  # only for a prompt; a chat's template writes them itself
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_a_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "a request has either prompt or messages")
        return self


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]


def _tokenize(server: Serving, given: TokenizeRequest) -> tuple[TokensBody, Sequence[str]]:
    variables = {name: (f"chat_template_kwargs.{name}", value) for name, value in (given.chat_template_kwargs or {}).items()}
    if given.messages is None:
        unread = [field for field, _ in variables.values()]
        text, special = given.prompt or "", given.add_special_tokens is not False
    else:
        messages = [message.for_template() for message in given.messages]
        text, unread = templated(server, messages, given.tools or (), given.add_generation_prompt is not False, variables)
        special = False
    ids = server.encode(text, "prompt" if given.messages is None else "messages", special=special, most=MAX_TOKENS)
    named = given.return_token_strs
    texts = [server.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids] if named else None
    return {"count": len(ids), "max_model_len": server.engine.max_context, "tokens": ids, "token_strs": texts}, unread


def _detokenize(server: Serving, given: DetokenizeRequest) -> tuple[TextBody, Sequence[str]]:
    size = server.tokenizer.vocab_size
    if (unknown := next((token for token in given.tokens if token >= size), None)) is not None:
        raise RequestError(f"token {unknown} is not in the vocabulary, whose last is {size - 1}", param="tokens")
    return {"prompt": server.tokenizer.decode(given.tokens, skip_special=False)}, ()


tokenize = partial(Front.respond, kind=TokenizeRequest, compute=_tokenize)
detokenize = partial(Front.respond, kind=DetokenizeRequest, compute=_detokenize)
