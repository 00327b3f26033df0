r"""Texts of requests that Kafka and the store are to hold.

JSON can name half of a surrogate pair (`"\ud800"`), which Python takes and UTF-8 has no bytes for. Guarantees: such a text is a fault of
its field, and never reaches what would fail on it. Gives up: bodies that orjson reads, which refuses them itself.
"""

from typing import Annotated

from pydantic import AfterValidator


def _with_bytes(text: str) -> str:
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("it has half of a surrogate pair, which is no character")
    return text


Text = Annotated[str, AfterValidator(_with_bytes)]
"""A text that is UTF-8."""
