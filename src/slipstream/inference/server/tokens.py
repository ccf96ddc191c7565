"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from slipstream.inference.server.bodies import TextBody, TokensBody
from slipstream.inference.server.chat import Message, Tool
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.gate import JSON
from slipstream.inference.server.requests import MAX_MESSAGES, Fields, TokenId, check_messages, parse, without_effect, wrong
from slipstream.inference.server.state import Front, Serving
from slipstream.inference.text import TooLongError

MAX_TOKENS = 131_072  # of one request: the JSON of its response holds the interpreter for milliseconds


class TokenizeRequest(Fields):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None  # of a prompt; the template writes those of a chat
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_a_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "a request has either prompt or messages")
        return self


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]


async def tokenize(front: Front, request: Request) -> Response:
    def make(server: Serving, body: bytes) -> tuple[Response, list[str]]:
        check_messages(body)
        given = parse(TokenizeRequest, body)
        server.check_model(given.model or server.engine.model_name)
        if given.messages is None:
            text, special = given.prompt or "", given.add_special_tokens is not False
        else:
            try:
                text = server.tokenizer.chat(
                    [message.for_template() for message in given.messages],
                    tools=[tool.model_dump(exclude_none=True) for tool in given.tools or ()] or None,
                    add_generation_prompt=given.add_generation_prompt is not False,
                )
            except (ValueError, RecursionError) as error:
                raise RequestError(str(error), param="messages") from None
            special = False
        try:
            ids = server.tokenizer.encode(text, special=special, max_tokens=MAX_TOKENS)
        except TooLongError:
            param = "prompt" if given.messages is None else "messages"
            raise RequestError(f"the text has more than {MAX_TOKENS:,} tokens; send it in parts", param=param) from None
        texts = (
            [server.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids] if given.return_token_strs else None
        )
        context = server.engine.max_context
        answer: TokensBody = {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": texts}
        return JSON(answer), without_effect(given)

    return await front.respond(request, make)


async def detokenize(front: Front, request: Request) -> Response:
    def make(server: Serving, body: bytes) -> tuple[Response, list[str]]:
        given = parse(DetokenizeRequest, body)
        server.check_model(given.model or server.engine.model_name)
        size = server.tokenizer.vocab_size
        if (unknown := next((token for token in given.tokens if token >= size), None)) is not None:
            raise RequestError(f"token {unknown} is not in the vocabulary, whose last is {size - 1}", param="tokens")
        answer: TextBody = {"prompt": server.tokenizer.decode(given.tokens, skip_special=False)}
        return JSON(answer), without_effect(given)

    return await front.respond(request, make)
