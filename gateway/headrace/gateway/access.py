"""Who calls, and how often they may.

Guarantees: without configured tokens everybody on this machine is the account of the settings (`serve` refuses to listen elsewhere then);
with tokens, a request without one, or with a wrong one, is 401, and one token too fast is 429. Objects of other accounts, and of projects
that a token does not cover, are 404: `Caller.sees` says it. Limitations: limits across several gateways; each counts for itself.
"""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers

from headrace.core.http_server import host_of, is_foreign_page, is_loopback
from headrace.gateway.gate import Gate, gate_of
from headrace.gateway.problems import ProblemError, no_key

_KNOWN = "headrace.caller"
"""Where the caller of a request is kept, once it is known: the door asks before it reads a body, and a handler asks again."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is."""

    account: str
    owner: str
    projects: tuple[str, ...] = ()
    """Empty: all."""
    is_local: bool = False
    """There are no tokens: everybody on this machine is one account, whose is all of the store."""

    def sees(self, account: str, project: str | None = None) -> bool:
        """Whether an object is there for this caller."""
        return account == self.account and (project is None or not self.projects or project in self.projects)


async def identify(request: Request) -> Caller:
    """The caller of a request.

    Raises:
        ProblemError: 401, 403, 429.
    """
    known: Caller | None = request.scope.get(_KNOWN)
    if known is None:
        known = request.scope[_KNOWN] = identify_again(request)
    return known


def identify_again(request: Request) -> Caller:
    """The caller of a request as of now: an answer that lasts asks whether its key is still good. Raises as `identify`."""
    gate: Gate = gate_of(request)
    if not gate.tokens.configured:
        _check_local(request)
        return Caller(gate.settings.account, "local", is_local=True)
    token = _token(request.headers)
    if token is None:
        raise no_key()
    stored = gate.tokens.find(token)
    if stored is None:
        raise ProblemError(401, "the key is not one of this gateway's, or was revoked", headers={"WWW-Authenticate": "Bearer"})
    seconds = gate.pace.wait_for(stored.id)
    if seconds > 0:
        message = f"more than {gate.settings.gateway.requests_per_minute} requests a minute with this key (gateway.requests_per_minute)"
        raise ProblemError(429, message, headers={"Retry-After": str(max(1, round(seconds)))})
    return Caller(stored.account, stored.owner, stored.projects)


def _check_local(request: Request) -> None:
    """Without keys, a page that someone's browser has open must not call in that browser's name.

    A name of its own that it has led to loopback stands in `Host`, and its address in `Origin`.
    """
    host = request.headers.get("host", "")
    if not is_loopback(host_of(host)):
        raise ProblemError(
            403, f"without tokens this gateway answers to localhost only, not to Host {host[:100]!r}: `headrace tokens create`"
        )
    origin = request.headers.get("origin")
    if is_foreign_page(host, origin):
        raise ProblemError(403, f"without tokens no page of {str(origin)[:100]!r} may call: `headrace tokens create`")


def _token(headers: Headers) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key") or None


KnownCaller = Annotated[Caller, Depends(identify)]
