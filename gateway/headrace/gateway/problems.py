"""What goes wrong, as each API tells it.

Handlers raise `ProblemError`; the shape of its answer follows from the path: `{"detail": …}` for the training-jobs API, `{"code",
"message", "details"}` with gRPC's codes for the RLOR API, `{"error": {…}}` for inference. Guarantees: a validation error names the place of
each fault and never echoes a value, which could be a secret; Kafka or the store being away is a 503 with `Retry-After`.
"""

from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from headrace.core.errors import HeadraceError
from headrace.core.kafka import KafkaUnavailableError
from headrace.core.reading import ReadStalledError
from headrace.core.store import StoreUnavailableError
from headrace.gateway.log_writer import OvertakenError

RETRY_AFTER_SECONDS = 2
Family = Literal["training-jobs", "rlor", "inference"]
_RLOR = ("/v1/accounts", "/training/", "/hot_load/", "/v1/models/hot_load")
_INFERENCE = ("/v1/chat", "/v1/completions", "/inference/")
_ABORTED = 10
_MOST_FAULTS = 101
# google.rpc.Code by HTTP status.
_CODES = {400: 3, 401: 16, 403: 7, 404: 5, 409: 6, 412: 9, 413: 11, 422: 3, 425: 9, 429: 8, 499: 1, 500: 13, 501: 12, 503: 14, 504: 4}
FAILED_PRECONDITION = 9
"""gRPC's code for what is not possible now; in answers with status 400."""
_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ProblemError(Exception):
    """A request that gets no answer but this.

    Args:
        status: HTTP status.
        message: What is wrong, where, and what to do.
        headers: Of the answer.
        details: Of the RLOR API's answer: typed objects.
        code: gRPC code, where it does not follow from the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        headers: dict[str, str] | None = None,
        details: Sequence[dict[str, Any]] = (),
        code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})
        if status in {409, 501}:
            self.headers.setdefault("x-should-retry", "false")  # clients would repeat it without effect
        if status == 503:
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))
        self.details = list(details)
        self.code = _CODES.get(status, 2) if code is None else code


class FaultError(HeadraceError):
    """One field of a body that can't be taken. `loc` begins with `body`, as FastAPI's own.

    Args:
        loc: Where, part by part.
        msg: What is wrong.
        type: Kind of fault, as pydantic names it.
    """

    def __init__(self, loc: Sequence[str | int], msg: str, type: str = "value_error") -> None:  # noqa: A002 - the wire's name
        super().__init__(f"{'.'.join(map(str, loc))}: {msg}")
        self.loc = tuple(loc)
        self.msg = msg
        self.type = type

    def __reduce__(self) -> tuple[type["FaultError"], tuple[object, ...]]:
        return FaultError, (self.loc, self.msg, self.type)


class UnprocessableError(Exception):
    """A body with faults: 422 in the training-jobs API, 400 elsewhere."""

    def __init__(self, faults: Sequence[FaultError]) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = list(faults)

    def __reduce__(self) -> tuple[type["UnprocessableError"], tuple[object, ...]]:
        return UnprocessableError, (self.faults,)


def install(app: FastAPI) -> None:
    """Make the app answer problems in its APIs' shapes."""

    async def problem(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ProblemError)  # noqa: S101 - narrows the type: registered for it
        return answer(request.url.path, error)

    async def unprocessable(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, UnprocessableError)  # noqa: S101 - narrows the type
        return faults_answer(request.url.path, error.faults)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - narrows the type
        items = error.errors()[:_MOST_FAULTS]
        return faults_answer(request.url.path, [FaultError(item["loc"], item["msg"], item["type"]) for item in items])

    async def plain(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)  # noqa: S101 - narrows the type
        return answer(request.url.path, ProblemError(error.status_code, str(error.detail), headers=dict(error.headers or {})))

    async def away(request: Request, error: Exception) -> JSONResponse:
        return answer(request.url.path, ProblemError(503, str(error)))

    async def overtaken(request: Request, error: Exception) -> JSONResponse:
        # Who sends it again is judged by what there is now: the clients may do so themselves.
        return answer(request.url.path, ProblemError(409, str(error), headers={"x-should-retry": "true"}, code=_ABORTED))

    app.add_exception_handler(ProblemError, problem)
    app.add_exception_handler(OvertakenError, overtaken)
    app.add_exception_handler(UnprocessableError, unprocessable)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain)
    for kind in (KafkaUnavailableError, ReadStalledError, StoreUnavailableError):
        app.add_exception_handler(kind, away)


def family_of(path: str) -> Family:
    """The API that a path belongs to; what is no one else's answers as the training-jobs API does."""
    return "rlor" if path.startswith(_RLOR) else "inference" if path.startswith(_INFERENCE) else "training-jobs"


def no_key() -> ProblemError:
    """A request without a key that is known."""
    return ProblemError(401, "no key: send `Authorization: Bearer <token>` or `X-Api-Key: <token>`", headers={"WWW-Authenticate": "Bearer"})


def answer(path: str, problem: ProblemError) -> JSONResponse:
    """A problem in the shape of the API that `path` belongs to."""
    body: dict[str, Any]
    family = family_of(path)
    if family == "rlor":
        body = {"code": problem.code, "message": problem.message, "details": problem.details}
    elif family == "inference":
        kind = _OPENAI_TYPES.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
        body = {"error": {"message": problem.message, "type": kind, "param": None, "code": problem.status}}
    else:
        body = {"detail": problem.message}
    return JSONResponse(body, status_code=problem.status, headers=problem.headers)


def faults_answer(path: str, faults: Sequence[FaultError]) -> JSONResponse:
    """Faults of a body in the shape of the API that `path` belongs to; the first `_MOST_FAULTS` of them."""
    faults = faults[:_MOST_FAULTS]
    if family_of(path) != "training-jobs":
        said = "; ".join(f"{'.'.join(str(part) for part in fault.loc if part != 'body') or 'body'}: {fault.msg}" for fault in faults)
        return answer(path, ProblemError(400, said))
    items = [{"loc": list(fault.loc), "msg": fault.msg, "type": fault.type} for fault in faults]
    return JSONResponse({"detail": items}, status_code=422)
