"""One trajectory as a page: its conversation from the log, its tokens from the rows that the step kept.

Guarantees: group and trajectory are of the model's own step; what is missing is said in a sentence with what to do. Limitations: rows
beyond `_ROWS_BYTES` a step and tokens beyond `_TOKENS` a page. One page at a time reads rows, so that several do not fill the memory.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headrace.core.fetching import fetch_offsets
from headrace.core.kafka import client_options
from headrace.core.logged_groups import group_body
from headrace.core.model_views import ModelView
from headrace.core.payloads import PayloadError
from headrace.core.reading import OffsetLostError
from headrace.core.reports import NoReportError, PackedRows, RowsTooLargeError, RowsUnreadableError, open_rows, read_rows
from headrace.core.store import DigestMismatchError
from headrace.gateway.dashboard.answers import HistoryRow, Tokens, TrajectoryPage
from headrace.gateway.dashboard.scored_tokens import (
    Place,
    histories,
    is_assistant,
    places_of,
    said_texts,
    spans,
    texts_of,
    tokenizer_of,
    tokens_at,
)
from headrace.gateway.dashboard.seen import model_row
from headrace.gateway.dashboard.step_page import StepGroups, step_groups, trajectory_row
from headrace.gateway.gate import Gate
from headrace.gateway.problems import ProblemError
from headrace.gateway.step_history import StepEntry
from headrace.gateway.tables import Tables
from headrace.schemas.chat import Choice, MessageOrChoice
from headrace.schemas.codec import decode_group
from headrace.schemas.reasons import CodecError
from headrace.schemas.state import ReportedGroup
from headrace.schemas.trajectory import Trajectory

_ROWS_BYTES = 256 * 1024 * 1024
_TOKENS = 100_000
_NOT_KEPT = "The tokens of this step were not kept, so nothing is coloured: set worker.report_rows to sample or all for steps to come."

_reader = ThreadPoolExecutor(1, thread_name_prefix="headrace-rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """A trajectory as it stands in the log."""

    trajectory: Trajectory
    turns: list[list[int] | None]
    """Token ids of each assistant turn."""
    texts: list[list[str] | None]
    """What the sampler wrote next to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Which tokens."""

    kept: str
    """How many rows the step kept."""
    group_id: str
    index: int
    update: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """The tokens of one update."""

    sequences: list[Tokens]
    updates: list[int]
    update: int | None
    note: str | None


async def trajectory_page(
    gate: Gate, tables: Tables, view: ModelView, entry: StepEntry, *, group_id: str, index: int | None, update: int | None
) -> TrajectoryPage:
    """The page.

    Args:
        gate: Of the gateway.
        tables: As they stand.
        view: The model.
        entry: The step.
        group_id: Of the step.
        index: Of the trajectory in the group as it was sent; None: the first that was trained on.
        update: Whose tokens, of a step with several; None: the first that is kept.

    Raises:
        ProblemError: 404, the step did not train on it.
        HeadraceError: neither the store nor Kafka answered.
    """
    found = await step_groups(gate, view, entry)
    group = next((each for each in found.groups if each.group_id == group_id), None)
    if group is None:
        raise ProblemError(404, f"step {entry.step} did not train on group {group_id}")
    if index is None:
        index = group.trajectories[0].index if group.trajectories else 0
    if group.trajectories and all(each.index != index for each in group.trajectories):
        raise ProblemError(404, f"step {entry.step} did not train on trajectory {index} of group {group_id}")
    notes = [] if found.problem is None else [found.problem]
    said = await _said(gate, found, group, index)
    if isinstance(said, str):
        notes.append(said)
    wanted = _Wanted(kept=found.rows, group_id=group_id, index=index, update=update)
    scored = await asyncio.get_running_loop().run_in_executor(_reader, _scored, gate, view, entry, wanted)
    if scored.note is not None:
        notes.append(scored.note)
    conversation: list[HistoryRow] = []
    sequences = scored.sequences
    if not isinstance(said, str):
        where = spans(sequences, said.turns)
        conversation = histories(said.trajectory, where)
        for span, texts in zip(where, said.texts, strict=True):
            if span is not None and texts is not None and len(texts) == span.stop - span.start:
                sequences = _with_texts(sequences, span.sequence, span.start, texts)
    if any(each.texts is None for each in sequences):
        notes.append(
            f"Tokens are shown as ids where neither the trajectory nor tokenizer.json of base model {view.settings.base_model} says their "
            "text."
        )
    spoken = None if isinstance(said, str) else said.trajectory
    return TrajectoryPage(
        model=model_row(tables, view),
        step=entry.step,
        group_id=group_id,
        offset=group.offset,
        producer=group.producer,
        index=index,
        siblings=[trajectory_row(each) for each in group.trajectories],
        histories=conversation,
        metrics={} if spoken is None else dict(spoken.metrics),
        metadata={} if spoken is None else dict(spoken.metadata),
        logs=[] if spoken is None else spoken.logs,
        sequences=sequences,
        updates=scored.updates,
        update=scored.update,
        notes=notes,
    )


async def _said(gate: Gate, found: StepGroups, group: ReportedGroup, index: int) -> _Said | str:
    """The trajectory from the log; or why it can't be read."""
    options = client_options(gate.settings.kafka, "headrace-gateway")
    try:
        records = await fetch_offsets(options, gate.settings.groups_topic, found.lane, [group.offset])
    except OffsetLostError as error:
        return f"The conversation is gone: {error}"

    def read() -> _Said | str:
        try:
            body, content_type, _ = group_body(records[group.offset], lambda: gate.store)
            sampled = decode_group(body, content_type)
        except (CodecError, PayloadError) as error:
            return f"The conversation can't be read: {error}"
        if index >= len(sampled.group.trajectories):
            return f"The group at offset {group.offset} has no trajectory {index}: the log is not the one that the step was trained on."
        written = said_texts(body, content_type)
        # The choices of a group are numbered over all of its trajectories.
        number = sum(isinstance(item, Choice) for each in sampled.group.trajectories[:index] for item in _items(each))
        trajectory = sampled.group.trajectories[index]
        turns: list[list[int] | None] = []
        texts: list[list[str] | None] = []
        for item in filter(is_assistant, _items(trajectory)):
            turn = None
            if isinstance(item, Choice):
                turn = sampled.turns[number]
                number += 1
            turns.append(None if turn is None else turn.token_ids.tolist())
            texts.append(written.get(number - 1) if isinstance(item, Choice) else None)
        return _Said(trajectory=trajectory, turns=turns, texts=texts)

    return await asyncio.to_thread(read)


def _items(trajectory: Trajectory) -> Iterator[MessageOrChoice]:
    return (item for items, _ in trajectory.histories() for item in items)


def _scored(gate: Gate, view: ModelView, entry: StepEntry, wanted: _Wanted) -> _Scored:
    """The kept tokens of the trajectory. Blocks."""
    nothing = _Scored(sequences=[], updates=[], update=None, note=_NOT_KEPT)
    if wanted.kept == "none":
        return nothing
    try:
        body = read_rows(gate.store, entry.report, _ROWS_BYTES)
        rows = None if body is None else open_rows(body)
    except (NoReportError, DigestMismatchError, RowsTooLargeError, RowsUnreadableError) as error:
        return _Scored(sequences=[], updates=[], update=None, note=f"The tokens can't be shown: {error}")
    if rows is None:
        return nothing
    if not rows.laid_out:
        return _Scored(sequences=[], updates=[], update=None, note="The rows are of another release: `headrace inspect --rows` lists them.")
    places = places_of(rows, wanted.group_id, wanted.index)
    if not places:
        why = "The sample of this step's rows does not hold this trajectory: set worker.report_rows to all to keep every row."
        return _Scored(sequences=[], updates=[], update=None, note=why if wanted.kept == "sample" else "Nothing of it was trained.")
    updates = sorted({place.update for place in places})
    shown = wanted.update if wanted.update in updates else updates[0]
    return _of_update(gate, view, rows, [place for place in places if place.update == shown], updates)


def _of_update(gate: Gate, view: ModelView, rows: PackedRows, places: list[Place], updates: list[int]) -> _Scored:
    tokenizer = tokenizer_of(gate.settings, view.settings.base_model)
    sequences: list[Tokens] = []
    left = _TOKENS
    for place in places:
        tokens = tokens_at(rows, place)
        left -= len(tokens.ids)
        if left < 0 and sequences:
            break
        texts = None if tokenizer is None else texts_of(tokenizer, tokens.ids)
        sequences.append(tokens.model_copy(update={"texts": texts}))
    note = f"Only the first {len(sequences)} of {len(places)} token sequences are shown." if len(sequences) < len(places) else None
    return _Scored(sequences=sequences, updates=updates, update=places[0].update, note=note)


def _with_texts(sequences: list[Tokens], number: int, start: int, texts: list[str]) -> list[Tokens]:
    """With what the sampler wrote in place of what the tokenizer says."""
    changed = sequences[number]
    all_texts = list(changed.texts) if changed.texts is not None else [f"⟨{token}⟩" for token in changed.ids]
    all_texts[start : start + len(texts)] = texts
    return [each.model_copy(update={"texts": all_texts}) if i == number else each for i, each in enumerate(sequences)]
