"""Captured calls to the histories that train: which calls are of the trained model, and which of them continue which.

A call extends the longest chain whose prompt and sampled ids its own prompt begins with, token for token; otherwise it begins a history of
its own: a branch. Calls without ids are compared by their conversations. A chain becomes a history of messages and choices, as if an agent
had built it by hand.

Guarantees: the ids alone decide, not the order of the calls; siblings take the order of their times, so the first continues in the chain.
Each sampled token trains once: a call that repeats another's prompt and answer is left out, as a retry that was answered twice. Calls to
other models do not train. Limitations: two answers to one request are two branches, for without headers a retry is no other than a second
try.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from headrace.schemas.dialects import Json
from headrace.schemas.exchanges import Call, Exchanges, calls_of
from headrace.schemas.parsing import shown, validate
from headrace.schemas.reasons import CodecError
from headrace.schemas.reasons import DeadLetterReason as Reason

OwnName = Callable[[str], bool]
"""Whether a model's name, without a version, is the trained model's."""

_HAND_BUILT = ("messages_and_choices", "tools", "additional_histories")
_MOST_NAMED = 5


def unfold(group: Any, own: OwnName | None = None) -> None:  # noqa: ANN401 - raw JSON
    """Put histories in the place of the exchanges of a raw group's trajectories. Wrong shapes elsewhere are left to validation.

    Args:
        group: Changed in place; a trajectory gets `unread` where tokens of its calls are not known.
        own: Of the trained model; None: not known here.

    Raises:
        CodecError: an exchange can't be read, or a trajectory has exchanges and hand-built histories.
    """
    members = group.get("trajectories") if isinstance(group, dict) else None
    for t, trajectory in enumerate(members if isinstance(members, list) else []):
        if isinstance(trajectory, dict) and trajectory.get("exchanges") is not None:
            try:
                if group.get("purpose") == "sft":
                    raise CodecError(Reason.INVALID_SCHEMA, "exchanges", "captured calls are rollouts: send an example as messages")
                _unfold(trajectory, own)
            except CodecError as error:
                raise CodecError(error.reason, f"trajectories[{t}].{error.path}", error.detail) from None


def _unfold(trajectory: Json, own: OwnName | None) -> None:
    try:
        exchanges = validate(Exchanges, trajectory["exchanges"])
    except CodecError as error:
        raise CodecError(error.reason, f"exchanges.{error.path}" if error.path else "exchanges", error.detail) from None
    both = [name for name in _HAND_BUILT if trajectory.get(name)]
    if exchanges and both:
        detail = f"the trajectory has {both[0]} too: captured exchanges and hand-built histories exclude each other"
        raise CodecError(Reason.INVALID_SCHEMA, "exchanges", detail)
    del trajectory["exchanges"]
    if not exchanges:
        return
    trajectory.setdefault("reward", 0.0)  # the client that captures leaves out what has its default
    calls, unread = _of_the_model(calls_of(exchanges), own)
    lacking = [call.lacks for call in calls if call.lacks is not None]
    trajectory["unread"] = unread or (f"{lacking[0]} (calls without: {len(lacking)} of {len(calls)})" if lacking else None)
    # A raw prompt (completions) without ids is no conversation, so nothing stands before what was sampled.
    histories = [_history(chain) for chain in chains(call for call in calls if call.lacks is None or call.conversation)]
    if histories:
        trajectory |= histories[0]
        trajectory["additional_histories"] = histories[1:]
    _note_versions(trajectory, calls)


def _of_the_model(calls: list[Call], own: OwnName | None) -> tuple[list[Call], str | None]:
    """The calls of the trained model; none and why, where it can't be told which."""
    if own is not None and (ours := [call for call in calls if call.model is not None and own(call.model)]):
        return ours, None
    names = sorted({call.model for call in calls if call.model is not None})
    if len(names) > 1:  # a judge or a sub-agent of another service gives no ids: the model that trains does
        names = sorted({call.model for call in calls if call.model is not None and call.lacks is None}) or names
    if len(names) > 1:
        told = ", ".join(shown(name) for name in names[:_MOST_NAMED])
        return [], f"the exchanges are of {len(names)} models ({told}), and it can't be told which trains: leave the others out"
    return [call for call in calls if call.model is None or call.model in names], None


@dataclass(slots=True)
class _Link:
    """A call among the others; keys are what their prompts and their whole texts compare by."""

    call: Call
    prompt: bytes
    whole: bytes
    parent: "_Link | None" = None
    children: "list[_Link]" = field(default_factory=list)


def chains(calls: Iterable[Call]) -> list[list[Call]]:
    """Chains of calls, in the order of their first calls.

    Args:
        calls: In the order of their times.
    """
    links: dict[tuple[bytes, bytes], _Link] = {}
    for call in calls:
        link = _link(call)
        links.setdefault((link.prompt, link.whole), link)  # the same prompt and answer again: counted once
    _find_parents(list(links.values()))
    first_children = {id(link.children[0]) for link in links.values() if link.children}
    found: list[list[Call]] = []
    for link in links.values():
        if id(link) in first_children:
            continue
        chain = [link.call]
        at = link
        while at.children:
            at = at.children[0]
            chain.append(at.call)
        found.append(chain)
    return found


def _find_parents(links: list[_Link]) -> None:
    """For each call, the one with the longest whole text that its prompt begins with: one pass over all texts in their order.

    In sorted order every text stands behind its own beginnings, so a stack holds the whole texts that the current one begins with.
    """
    wholes = [(link.whole, 0, i) for i, link in enumerate(links)]
    prompts = [(link.prompt, 1, i) for i, link in enumerate(links)]
    stack: list[_Link] = []
    for text, is_prompt, i in sorted(wholes + prompts):
        while stack and not text.startswith(stack[-1].whole):
            stack.pop()
        if is_prompt:
            links[i].parent = next((link for link in reversed(stack) if link is not links[i]), None)
        else:
            stack.append(links[i])
    for link in links:  # in the order of their times
        if link.parent is not None:
            link.parent.children.append(link)


def _link(call: Call) -> _Link:
    prompt, ids = call.choice.get("prompt_token_ids"), call.choice.get("token_ids")
    if prompt is not None and ids is not None:
        try:
            start = b"i" + array("I", prompt).tobytes()
            return _Link(call, start, start + array("I", ids).tobytes())
        except (OverflowError, TypeError):  # no ids: the codec names the place
            pass
    start = b"m" + b"".join(map(_key, call.conversation))
    return _Link(call, start, start + _key(call.choice["message"]))


def _key(message: Json) -> bytes:
    """A message as it compares: clients send back what they were given, with more or fewer fields."""
    calls = message.get("tool_calls") or []
    functions = [call.get("function") if isinstance(call, dict) else call for call in calls]
    compared = [message.get("role", "assistant"), message.get("content") or "", functions, message.get("tool_call_id")]
    return orjson.dumps(compared, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS) + b"\n"


def _history(chain: list[Call]) -> Json:
    items: list[Json] = list(chain[0].conversation)
    for i, call in enumerate(chain):
        if i:
            items += _new_messages(call.conversation)
        items.append(call.choice)
    return {"messages_and_choices": items, "tools": chain[0].tools}


def _new_messages(conversation: list[Json]) -> list[Json]:
    """What was said since the assistant spoke last."""
    last = max((i for i, message in enumerate(conversation) if message.get("role") == "assistant"), default=-1)
    return conversation[last + 1 :]


def _note_versions(trajectory: Json, calls: list[Call]) -> None:
    """The versions of the rollout, where its sender did not say them."""
    versions = [version for call in calls for version in call.choice.get("policy_versions") or []]
    if versions and trajectory.get("initial_policy_version") is None and trajectory.get("final_policy_version") is None:
        trajectory |= {"initial_policy_version": min(versions), "final_policy_version": max(versions)}
