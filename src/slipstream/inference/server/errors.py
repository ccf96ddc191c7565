"""An error response in OpenAI's format."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from slipstream.inference.engine import ClosedError, FailedError


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    type: Literal["error"]  # Anthropic's
    error: ErrorDetail


class RequestError(Exception):
    """An error response in OpenAI's format."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 500:  # it would fail again, so clients that repeat what got a 500 are told not to: OpenAI's obey the header
            self.headers["x-should-retry"] = "false"

    @classmethod
    def failed(cls, why: str | None) -> RequestError:
        """The request is at fault."""
        return cls(f"the request failed: {why}", status=500, code="generation_failed")

    @classmethod
    def unavailable(cls, why: str | None) -> RequestError:
        """The engine, or the server, is at fault."""
        return cls(f"{why}", status=503, code="unavailable", retry_after=5)

    @classmethod
    def of(cls, error: FailedError | ClosedError) -> RequestError:
        """The error of a request that is at fault, or that the engine did not accept."""
        return (cls.failed if isinstance(error, FailedError) else cls.unavailable)(str(error))

    def body(self) -> ErrorBody:
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else "invalid_request_error"
        return {"type": "error", "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
