r"""Lone surrogates (`"\ud800"`): half of a character, which JSON can name and UTF-8 has no bytes for.

Text that was cut inside a character has them, and no part of Headrace could write them again. So the reader puts U+FDD0 in their place, a
code point that stands for no character, and then U+FFFD. A trajectory whose conversation held one is marked with its fault (`unreadable`):
the trainer rejects it alone. In other texts (metadata, logs, tracebacks) the replacement is all that happens.

Guarantees: the text keeps its length in bytes; the rest of the group, and of a body, is not touched. Limitations: a text that
holds U+FDD0 itself is treated in the same way.
"""

import re
from collections.abc import Iterator
from typing import Any

STAND_IN = "\ufdd0"
_ESCAPED = rb"\ufdd0"
_RAW = STAND_IN.encode()
_SHOWN = "\ufffd"
_CONVERSATION = ("messages_and_choices", "tools", "additional_histories", "exchanges")
# An escaped backslash is taken whole, so that `\\ud800`, which is text, is none; a whole pair is a character.
_ESCAPES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\xed[\xa0-\xbf][\x80-\xbf]"
)
FAULT = "the text holds a lone surrogate, half of a character: send whole characters, or U+FFFD in its place"


def mended(text: bytes | bytearray | memoryview) -> bytes | None:
    """JSON text with `STAND_IN` for each lone surrogate; None if there is none."""
    changed = False

    def stand_in(match: "re.Match[bytes]") -> bytes:
        nonlocal changed
        found = match.group()
        if found == rb"\\" or len(found) == 12:
            return found
        changed = True
        return _ESCAPED if found[:1] == b"\\" else _RAW

    result = _ESCAPES.sub(stand_in, text)
    return result if changed else None


def holds_stand_in(text: bytes) -> bool:
    """Whether JSON text may hold a stand-in."""
    return _ESCAPED in text or _RAW in text


def mark_unreadable(group: Any) -> None:  # noqa: ANN401 - raw JSON
    """Mark, in a raw group, each trajectory whose conversation holds a stand-in, and replace all stand-ins."""
    trajectories = group.get("trajectories") if isinstance(group, dict) else None
    for trajectory in trajectories if isinstance(trajectories, list) else ():
        if isinstance(trajectory, dict):
            path = next((path for key in _CONVERSATION for path in _places(trajectory.get(key), key)), None)
            if path is not None:
                trajectory["unreadable"] = f"{path}: {FAULT}"
    _show(group)


def _places(value: Any, path: str) -> Iterator[str]:  # noqa: ANN401 - raw JSON
    stack = [(value, path)]
    while stack:
        item, where = stack.pop()
        if isinstance(item, str):
            if STAND_IN in item:
                yield where
        elif isinstance(item, dict):
            if any(STAND_IN in key for key in item):
                yield where
            stack.extend((inner, f"{where}.{key}") for key, inner in reversed(item.items()))
        elif isinstance(item, list):
            stack.extend((inner, f"{where}[{i}]") for i, inner in reversed([*enumerate(item)]))


def _show(value: Any) -> None:  # noqa: ANN401 - raw JSON
    """Put U+FFFD in the place of stand-ins, in texts and in keys."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            shown = {_readable(key): _readable(inner) for key, inner in item.items()}
            item.clear()
            item.update(shown)
            stack.extend(item.values())
        elif isinstance(item, list):
            item[:] = map(_readable, item)
            stack.extend(item)


def _readable(value: Any) -> Any:  # noqa: ANN401 - raw JSON
    return value.replace(STAND_IN, _SHOWN) if isinstance(value, str) else value
