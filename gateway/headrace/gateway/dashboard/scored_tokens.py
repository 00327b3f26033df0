"""The kept tokens of one trajectory, and where in them the turns of its conversation stand. Pure.

A turn that brought its token ids is found by them, where a stretch of trained tokens begins; turns without ids are matched in order, if
there are as many of them as stretches. Guarantees: a span is only given where the ids are equal, or the count leaves no doubt. Limitations:
turns that are told apart by neither; their tokens stand in the whole sequence all the same.

The messages and sampled turns of a trajectory as rows of a page. Pure.

Guarantees: all text is text; what is no text is named by its type. Limitations: pictures and sound.

What token ids say: as the sampler wrote them next to the ids, else by the base model's tokenizer.

Guarantees: one text for each token; the texts of a sequence together are its text. Limitations: without either, ids are all there is; base
models that lie in the object store are not fetched for it.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from headrace.core.reports import PackedRows
from headrace.core.settings import Settings
from headrace.gateway.dashboard.answers import Call, HistoryRow, MessageRow, Span, Tokens
from headrace.schemas.chat import Choice, Message, MessageOrChoice, Tool, ToolCall
from headrace.schemas.codec import SAFETENSORS_TYPE
from headrace.schemas.parsing import load_json
from headrace.schemas.reasons import CodecError
from headrace.schemas.trajectory import Trajectory
from headrace.schemas.turns import raw_choices

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FLOATS = {
    "advantages": "advantages",
    "ratios": "ratios",
    "weights": "weights",
    "behaviour": "behaviour_logprobs",
    "old": "old_logprobs",
    "new": "new_logprobs",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A sequence in the file."""

    sequence: int
    row: int
    update: int
    part: int


def places_of(rows: PackedRows, group_id: str, trajectory: int) -> list[Place]:
    """The kept sequences of a trajectory, by update and part."""
    arrays = rows.arrays
    named = np.array([name == group_id for name in rows.groups], np.bool_)
    if not named.any():
        return []
    at = np.flatnonzero(named[arrays["sequence_groups"]] & (arrays["sequence_trajectories"] == trajectory))
    owners = np.searchsorted(arrays["row_sequences"], at, side="right") - 1
    places = [
        Place(int(s), int(arrays["row_numbers"][row]), int(arrays["row_updates"][row]), int(arrays["sequence_parts"][s]))
        for s, row in zip(at.tolist(), owners.tolist(), strict=True)
    ]
    return sorted(places, key=lambda place: (place.update, place.part, place.row))


def tokens_at(rows: PackedRows, place: Place, texts: list[str] | None = None) -> Tokens:
    """A sequence's tokens in columns."""
    arrays = rows.arrays
    first, last = (int(end) for end in arrays["sequence_tokens"][place.sequence : place.sequence + 2])
    part = slice(first, last)
    return Tokens(
        update=place.update,
        row=place.row,
        part=place.part,
        ids=arrays["token_ids"][part].tolist(),
        texts=texts,
        trained=arrays["trainable"][part].tolist(),
        lags=[None if lag < 0 else lag for lag in arrays["lags"][part].tolist()],
        **{name: _nullable(arrays[column][part]) for name, column in _FLOATS.items()},
    )


def spans(sequences: Sequence[Tokens], turns: Sequence[Sequence[int] | None]) -> list[Span | None]:
    """Where each turn's tokens stand.

    Args:
        sequences: Of one update.
        turns: Token ids of each assistant turn, in the order of the conversation; None where it brought none.
    """
    if turns and all(turn is None for turn in turns):
        return _by_order(sequences, len(turns))
    found: list[Span | None] = []
    after = [0] * len(sequences)
    arrays = [(np.array(each.ids, np.int64), _stretches(each)) for each in sequences]
    for turn in turns:
        span = None
        for number, (ids, stretches) in enumerate(arrays):
            if turn and (start := _find(ids, stretches, turn, after[number])) is not None:
                span = Span(sequence=number, start=start, stop=start + len(turn))
                after[number] = span.stop
                break
        found.append(span)
    return found


def _by_order(sequences: Sequence[Tokens], turns: int) -> list[Span | None]:
    stretches = [(number, *stretch) for number, each in enumerate(sequences) for stretch in _stretches(each)]
    if len(stretches) != turns:
        return [None] * turns
    return [Span(sequence=number, start=start, stop=stop) for number, start, stop in stretches]


def _find(ids: npt.NDArray[np.int64], stretches: list[tuple[int, int]], turn: Sequence[int], after: int) -> int | None:
    wanted = np.array(turn, np.int64)
    # A turn may follow another without a token between; the first token of a sequence is never trained.
    starts = sorted({after, *(start for start, _ in stretches), *(start - 1 for start, _ in stretches)})
    return next((at for at in starts if at >= after and np.array_equal(ids[at : at + len(wanted)], wanted)), None)


def _stretches(tokens: Tokens) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.array([False, *tokens.trained, False], np.int8)))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _nullable(values: npt.NDArray[np.float32]) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]  # noqa: PLR0124 - NaN's test


def is_assistant(item: MessageOrChoice) -> bool:
    """Whether a turn is the model's."""
    return isinstance(item, Choice) or item.role == "assistant"


def histories(trajectory: Trajectory, spans: Sequence[Span | None]) -> list[HistoryRow]:
    """The conversation.

    Args:
        trajectory: As it was sent.
        spans: Of its assistant turns, in order over all histories.
    """
    following = iter(spans)
    return [
        HistoryRow(
            messages=[_row(item, next(following, None) if is_assistant(item) else None) for item in items], tools=_tools(tools or [])
        )
        for items, tools in trajectory.histories()
    ]


def _row(item: MessageOrChoice, span: Span | None) -> MessageRow:
    message = item.message if isinstance(item, Choice) else item
    return MessageRow(
        role=message.role,
        sampled=isinstance(item, Choice),
        name=message.name if isinstance(message, Message) else None,
        text="\n".join(part for part in (_text(message.content), message.refusal) if part),
        reasoning=message.reasoning_content or message.reasoning,
        calls=[_call(call) for call in message.tool_calls or []],
        call_id=message.tool_call_id if isinstance(message, Message) else None,
        finish_reason=item.finish_reason if isinstance(item, Choice) else None,
        span=span,
    )


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part["text"]) if isinstance(part.get("text"), str) else f"[{part.get('type', 'part')}]" for part in content)


def _call(call: ToolCall) -> Call:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return Call(id=call.id, name=call.function.name, arguments=str(arguments))
    return Call(id=call.id, name=call.function.name, arguments=_json(arguments))


def _tools(tools: Iterable[Tool]) -> str | None:
    listed = [tool.model_dump(mode="json", exclude_none=True) for tool in tools]
    return _json(listed) if listed else None


def _json(value: Any) -> str:  # noqa: ANN401 - any JSON
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


_FILE = "tokenizer.json"


def tokenizer_of(settings: Settings, base_model: str) -> "Tokenizer | None":
    """The base model's tokenizer; None where its folder has none, or the library is not installed. Blocks."""
    entry = settings.base_models.get(base_model)
    if entry is None or "://" in entry.path:
        return None
    file = Path(entry.path) / _FILE
    try:
        return _load(str(file), file.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=4)
def _load(file: str, _changed: int) -> "Tokenizer | None":
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - part of an extra
    except ImportError:
        return None
    try:
        return Tokenizer.from_file(file)
    except Exception:  # noqa: BLE001 - the library raises no type of its own
        return None


def texts_of(tokenizer: "Tokenizer", ids: Sequence[int]) -> list[str] | None:
    """A text for each token of one sequence: one that ends no character has none, the one that does has it whole. None: it can't say."""
    from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - as above

    stream = DecodeStream(skip_special_tokens=False)
    try:
        return [stream.step(tokenizer, token) or "" for token in ids]
    except Exception:  # noqa: BLE001 - the library raises no type of its own
        return None


def said_texts(body: bytes, content_type: str) -> Mapping[int, list[str]]:
    """The token texts that a group's JSON has, by the number of the choice: of entries with `bytes`, or with a text that is no id."""
    if content_type.startswith(SAFETENSORS_TYPE):
        return {}
    try:
        choices = list(raw_choices(load_json(body)))
    except CodecError:
        return {}
    found = {}
    for number, (choice, _) in enumerate(choices):
        logprobs = choice.get("logprobs")
        entries = logprobs.get("content") if isinstance(logprobs, dict) else None
        if isinstance(entries, list) and (texts := _said(entries)) is not None:
            found[number] = texts
    return found


def _said(entries: list[Any]) -> list[str] | None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = []
    for entry in entries:
        if not isinstance(entry, dict):
            return None
        token, said = entry.get("token"), entry.get("bytes")
        if not isinstance(token, str):
            return None
        named = token.startswith("token_id:")
        if isinstance(said, list) and all(isinstance(byte, int) and 0 <= byte < 256 for byte in said) and bytes(said) != token.encode():
            texts.append(decoder.decode(bytes(said)))
        elif named:
            return None
        else:
            texts.append(token)
    return texts or None
