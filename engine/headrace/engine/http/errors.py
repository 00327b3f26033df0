"""Errors in the shape that OpenAI's clients read: `{"error": {"message", "type", "param", "code"}}`.

Guarantees: what a client can put right says what to do; what it can't, no more than that the log says why. Refusals that pass have
`Retry-After`.
"""

import logging
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from headrace.engine.sampling.batching import EngineBusyError, SamplingError
from headrace.engine.serving.served_model import NoSuchPolicyError, PolicyNotReadyError
from headrace.schemas.reasons import CodecError
from headrace.trainer.chat_text import ChatTextError

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is refused.

    Args:
        message: What is wrong and what to do.
        status: HTTP status.
        param: The field.
        code: For machines.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """The body of an error."""
    return {"error": {"message": message, "type": _TYPES.get(status, "server_error"), "param": param, "code": code}}


def install_errors(app: FastAPI) -> None:
    """Make every error of the app one of these."""

    def answer(
        status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> JSONResponse:
        headers = None if retry_after is None else {"retry-after": str(retry_after)}
        return JSONResponse(error_body(message, status, param=param, code=code), status, headers)

    def on(kind: type[Exception], make: Callable[[Exception], Response]) -> None:
        async def handler(_request: Request, error: Exception) -> Response:
            return make(error)

        handle: Callable[[Request, Exception], Awaitable[Response]] = handler
        app.add_exception_handler(kind, handle)

    def api(error: Exception) -> Response:
        assert isinstance(error, ApiError)  # noqa: S101 - narrows the type
        return answer(error.status, str(error), param=error.param, code=error.code)

    def codec(error: Exception) -> Response:
        assert isinstance(error, CodecError)  # noqa: S101 - narrows the type
        return answer(400, str(error), param=error.path or None, code="invalid_value")

    def http(error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - narrows the type
        return answer(error.status_code, str(error.detail))

    def unforeseen(error: Exception) -> Response:
        logger.error("a request failed", exc_info=error)
        return answer(500, "the engine failed; its log says why", code="internal_error")

    on(ApiError, api)
    on(CodecError, codec)
    on(HTTPException, http)
    on(ChatTextError, lambda error: answer(400, str(error), param="messages", code="invalid_value"))
    on(NoSuchPolicyError, lambda error: answer(404, str(error), param="model", code="model_not_found"))
    on(PolicyNotReadyError, lambda error: answer(503, str(error), param="model", code="model_not_ready", retry_after=1))
    on(EngineBusyError, lambda error: answer(429, str(error), code="engine_busy", retry_after=1))
    on(SamplingError, lambda error: answer(500, str(error), code="sampling_failed"))
    on(ClientDisconnect, lambda _: Response(status_code=499))
    on(Exception, unforeseen)
