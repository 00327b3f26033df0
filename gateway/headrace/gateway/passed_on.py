"""The body of a request that continues to an engine: the few fields that the gateway reads, and the text with another `model` in it.

Guarantees: time and memory grow with the length of the body, whatever it holds: nothing of it becomes an object but the model's name. What
continues is what the client sent, but for the model's name and, where log-probabilities are asked for, the switches for token ids that
the client did not set. Limitations: the engine checks the rest; a body that is to be kept (`parsed`) has at most `_MOST_KEPT_VALUES`.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson

from headrace.gateway.problems import ProblemError

_SWITCHES = {True: ("return_tokens_as_token_ids", "return_token_ids"), False: ("return_token_ids",)}
"""For chat completions, and for completions, where people read the tokens' texts."""
_MOST_KEPT_VALUES = 1_000_000
_FALSE = {True: frozenset({b"", b"null", b"false", b"0"}), False: frozenset({b"", b"null", b"false"})}
"""A completion's `logprobs` is a number of alternatives: 0 asks for the sampled tokens' own."""


class _Fields(msgspec.Struct):
    """Values as they stand; empty where the body has none."""

    model: msgspec.Raw = msgspec.Raw()
    logprobs: msgspec.Raw = msgspec.Raw()
    return_tokens_as_token_ids: msgspec.Raw = msgspec.Raw()
    return_token_ids: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class PassedOn:
    """A body, cut where the model's name stands."""

    model: str
    before: bytes
    behind: bytes

    def named(self, model: str) -> bytes:
        """The body with another name of the model."""
        return b"".join((self.before, orjson.dumps(model), self.behind))

    def parsed(self) -> dict[str, Any]:
        """The body as an object.

        Raises:
            ProblemError: 400: an engine would not read it; 413: it has too many values to be kept.
        """
        text = self.named(self.model)
        if sum(map(text.count, (b",", b"[", b"{"))) > _MOST_KEPT_VALUES:
            raise ProblemError(413, f"a request that is to be kept has at most {_MOST_KEPT_VALUES} values: leave x-headrace-trajectory out")
        try:
            found: dict[str, Any] = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise ProblemError(400, f"the body is not JSON: {error}") from None
        return found


def read_passed_on(body: bytes, *, chat: bool) -> PassedOn:
    """Read a body.

    Args:
        body: As received.
        chat: Whether it asks for a chat completion, or for a completion. Log-probabilities need token ids next to them: text does not say
            which tokens it was.

    Raises:
        ProblemError: 400: it is not a JSON object with a model's name.
    """
    try:
        fields = msgspec.json.decode(body, type=_Fields)
    except msgspec.ValidationError:
        raise ProblemError(400, "the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProblemError(400, f"the body is not JSON: {error}") from None
    name = _name(fields.model)
    start = _address(fields.model) - _address(body)
    before, behind = body[:start], body[start + len(memoryview(fields.model)) :]
    if bytes(fields.logprobs) not in _FALSE[chat]:
        missing = "".join(f'"{switch}":true,' for switch in _SWITCHES[chat] if not bytes(getattr(fields, switch)))
        before = before.replace(b"{", b"{" + missing.encode(), 1)
    return PassedOn(name, before, behind)


def _name(raw: msgspec.Raw) -> str:
    try:
        name = msgspec.json.decode(raw, type=str) if bytes(memoryview(raw)[:1]) == b'"' else ""
    except (msgspec.MsgspecError, UnicodeDecodeError):
        name = ""
    if not name:
        raise ProblemError(400, "model: missing; name it as wandb-artifact:///entity/project/name, with :stepN for a version")
    return name


def _address(text: bytes | msgspec.Raw) -> int:
    """Where it lies in memory: a `Raw` is a part of what was decoded."""
    return int(np.frombuffer(memoryview(text), np.uint8).ctypes.data)
