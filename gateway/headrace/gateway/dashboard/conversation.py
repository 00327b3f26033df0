"""The messages and sampled turns of a trajectory as rows of a page. Pure.

Guarantees: all text is text; what is no text is named by its type. Limitations: pictures and sound.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from headrace.gateway.dashboard.answers import Call, HistoryRow, MessageRow, Span
from headrace.schemas.chat import Choice, Message, MessageOrChoice, Tool, ToolCall
from headrace.schemas.trajectory import Trajectory


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
