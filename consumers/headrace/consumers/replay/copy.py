"""Copying the groups that fit to where they are wanted: the work behind `headrace replay groups`.

Guarantees: what can't be read is told at once and counted, the rest is copied. Limitations: continuing where an earlier copy was
interrupted.
"""

import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path

from headrace.consumers.replay.groups import GroupReader, Selection, Unusable
from headrace.consumers.replay.targets import TOPIC_PREFIX, JsonLines, Target, json_file, topic_copy
from headrace.core.errors import HeadraceError
from headrace.core.ledger import read_ledger
from headrace.core.settings import Settings
from headrace.core.step_range import StepRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What came of a copy."""

    groups: int
    """Copied."""
    of: int
    """Groups of the model in the span."""
    claims: int
    """Of the copied ones, records whose payload stays in the object store; 0 where groups are written out."""
    unusable: int


async def copy_groups(
    settings: Settings, model_id: str, selection: Selection, to: str, *, bootstrap: str | None, say: Callable[[Unusable], None]
) -> Copied:
    """Copy groups.

    Args:
        settings: Of this process.
        model_id: Whose groups.
        selection: Which.
        to: `-`, `topic:NAME`, or the path of a new file.
        bootstrap: Brokers of the topic's cluster; None: ours.
        say: Called with what can't be copied.

    Raises:
        HeadraceError: the target can't be used, or Kafka or the store can't be reached.
    """
    groups = claims = unusable = 0
    async with AsyncExitStack() as stack:
        target = await _target(stack, settings, to, bootstrap)
        reader = GroupReader(settings, model_id, selection, decode=target.decodes)
        async for found in await stack.enter_async_context(aclosing(reader.read())):
            if isinstance(found, Unusable):
                unusable += 1
                say(found)
            else:
                await target.put(found)
                groups += 1
                claims += found.claimed and not target.decodes
    return Copied(groups=groups, of=reader.groups, claims=claims, unusable=unusable)


async def trained_offsets(settings: Settings, model_id: str, steps: StepRange, shadow_of: str | None) -> frozenset[int]:
    """Offsets of the groups that steps trained on, of the latest incarnation.

    Raises:
        HeadraceError: the ledger has none of these steps.
    """
    records = await read_ledger(settings, model_id, steps=steps, shadow_of=shadow_of)
    if not records:
        raise HeadraceError(f"the ledger has no step {steps} of model {model_id}: `headrace steps` lists those there are")
    return frozenset(offset for record in records for span in record.offsets for offset in range(span.first, span.last + 1))


async def _target(stack: AsyncExitStack, settings: Settings, to: str, bootstrap: str | None) -> Target:
    if to == "-":
        stack.callback(sys.stdout.buffer.flush)
        return JsonLines(sys.stdout.buffer)
    if to.startswith(TOPIC_PREFIX):
        return await stack.enter_async_context(topic_copy(settings, to.removeprefix(TOPIC_PREFIX), bootstrap))
    return stack.enter_context(json_file(Path(to)))
