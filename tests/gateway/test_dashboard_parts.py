"""What the dashboard makes of steps and tokens, without a gateway."""

from datetime import timedelta
from itertools import pairwise

import numpy as np
import orjson
import pytest
from safetensors.numpy import save
from tests.core.ledgers import BEGAN
from tests.core.ledgers import record as ledger_step

from headrace.core.reports import LAYOUT, open_rows
from headrace.gateway.dashboard.answers import Span, Tokens
from headrace.gateway.dashboard.scored_tokens import places_of, said_texts, spans, tokens_at
from headrace.gateway.dashboard.seen import curve, lags, versions
from headrace.gateway.step_history import StepEntry, StepHistory
from headrace.schemas.codec import JSON_TYPE, SAFETENSORS_TYPE
from headrace.schemas.state import StepRecord
from headrace.schemas.weights import WeightsRef


def _entry(step: int, **metrics: float) -> StepEntry:
    known = dict.fromkeys(StepEntry.__dataclass_fields__)
    return StepEntry(
        **known
        | {"step": step, "committed_at": BEGAN + timedelta(seconds=step), "metrics": metrics, "weights": WeightsRef(uri="", digest="")}  # type: ignore[arg-type]
    )


def _history(*steps: StepRecord) -> StepHistory:
    history = StepHistory("i", 0)
    for record in steps:
        history.append(record, 2 * record.step)
    return history


def _record(step: int, **metrics: float) -> StepRecord:
    return ledger_step(step).model_copy(update={"committed_at": BEGAN + timedelta(seconds=step), "metrics": metrics})


def test_thousands_of_steps_are_a_few_points_and_a_spike_is_still_there():
    found = curve(_history(*(_record(step, loss=float(step == 4321)) for step in range(1, 10_001))), "loss", 300).points
    assert 100 <= len(found) <= 300
    assert (found[0].first, found[-1].last) == (1, 10_000)
    assert all(before.last + 1 == after.first for before, after in pairwise(found))
    (spike,) = [point for point in found if point.high == 1]
    assert spike.first <= 4321 <= spike.last
    assert spike.low == 0
    assert spike.mean == pytest.approx(1 / (spike.last - spike.first + 1))


def test_steps_without_the_metric_are_left_out():
    found = curve(_history(_record(1, loss=1.0), _record(2), _record(3, loss=3.0)), "loss", 300).points
    assert [(point.first, point.mean) for point in found] == [(1, 1.0), (3, 3.0)]
    assert curve(_history(), "loss", 300).points == []


def test_versions_are_thinned_with_the_first_and_the_last():
    found = versions(_history(*(_record(step) for step in range(1, 1001))).moments(), 100)
    assert len(found) <= 101
    assert (found[0].version, found[-1].version) == (1, 1000)


def test_lags_are_weighted_by_tokens_over_the_latest_steps():
    early = [_entry(step, lag_tokens_0=1e9) for step in range(1, 11)]
    late = [_entry(step, lag_tokens_0=30.0, ratio_mean_lag_0=1.0, lag_tokens_16_up=2.0) for step in range(11, 60)]
    found = lags([*early, *late, _entry(60, lag_tokens_0=70.0, ratio_mean_lag_0=2.0, lag_tokens_unknown=5.0)])
    assert (found.steps, [bar.lag for bar in found.bars]) == (50, ["0", "16+", "unknown"])
    assert found.bars[0].tokens == 49 * 30 + 70
    assert found.bars[0].ratio == pytest.approx((49 * 30 + 70 * 2) / (49 * 30 + 70))
    assert found.bars[1].ratio is None


def _tokens(ids: list[int], trained: str) -> Tokens:
    nothing = [None] * len(ids)
    return Tokens(
        update=0, row=0, part=0, ids=ids, texts=None, trained=[mark == "x" for mark in trained], advantages=nothing, ratios=nothing,
        weights=nothing, behaviour=nothing, old=nothing, new=nothing, lags=nothing,
    )  # fmt: skip


def _spans(sequences: list[Tokens], turns: list[list[int] | None]) -> list[tuple[int, int, int] | None]:
    return [None if found is None else (found.sequence, found.start, found.stop) for found in spans(sequences, turns)]


def test_turns_are_found_by_their_ids_in_order_also_when_they_are_alike_or_adjacent():
    sequence = _tokens([1, 2, 7, 7, 3, 7, 7, 8, 9], "__xx_xxxx")
    assert _spans([sequence], [[7, 7], [7, 7], [8, 9]]) == [(0, 2, 4), (0, 5, 7), (0, 7, 9)]


def test_a_turn_stands_in_whichever_sequence_has_it_and_one_that_was_not_trained_in_none():
    first, second = _tokens([1, 5, 6], "_xx"), _tokens([1, 2, 8, 8], "__xx")
    assert _spans([first, second], [[8, 8], [4, 4], [5, 6]]) == [(1, 2, 4), None, (0, 1, 3)]


def test_the_first_token_of_a_sequence_is_never_trained_and_belongs_to_its_turn_all_the_same():
    assert spans([_tokens([5, 6, 7], "_xx")], [[5, 6, 7]]) == [Span(sequence=0, start=0, stop=3)]


def test_turns_without_ids_are_matched_in_order_if_there_are_as_many_as_stretches():
    sequence = _tokens([1, 5, 6, 2, 7], "_xx_x")
    assert _spans([sequence], [None, None]) == [(0, 1, 3), (0, 4, 5)]
    assert _spans([sequence], [None, None, None]) == [None, None, None]


def test_tokens_of_one_trajectory_come_by_update_with_null_where_there_is_no_number():
    nan = float("nan")
    numbers = np.array([nan, 0.5, nan, 0.5, nan, 0.25], np.float32)
    arrays = {
        "row_numbers": np.array([4, 6], np.int32),
        "row_updates": np.array([1, 0], np.int32),
        "row_sequences": np.array([0, 2, 3]),
        "sequence_groups": np.array([0, 1, 0], np.int32),
        "sequence_trajectories": np.array([3, 3, 3], np.int32),
        "sequence_parts": np.zeros(3, np.int32),
        "sequence_tokens": np.array([0, 2, 4, 6]),
        "token_ids": np.arange(6, dtype=np.int32),
        "trainable": np.array([False, True] * 3),
        "lags": np.array([-1, 2] * 3, np.int32),
        **dict.fromkeys(("advantages", "ratios", "weights", "behaviour_logprobs", "old_logprobs", "new_logprobs"), numbers),
    }
    rows = open_rows(bytes(save(arrays, {"layout": LAYOUT, "rows": "9", "groups": orjson.dumps(["g", "other"]).decode()})))
    places = places_of(rows, "g", 3)
    assert [(place.update, place.row) for place in places] == [(0, 6), (1, 4)]
    found = tokens_at(rows, places[0])
    assert (found.ids, found.advantages, found.lags, found.trained) == ([4, 5], [None, 0.25], [None, 2], [False, True])
    assert places_of(rows, "nobody", 3) == places_of(rows, "g", 1) == []


def test_token_texts_are_those_of_the_entries_and_a_character_of_two_tokens_is_whole():
    snowman = list("☃".encode())

    def body(*entries: dict[str, object]) -> bytes:
        choice = {"finish_reason": "stop", "message": {"content": ""}, "logprobs": {"content": list(entries)}}
        return orjson.dumps({"trajectories": [{"messages_and_choices": [{"role": "user", "content": "a"}, choice]}]})

    by_bytes = body({"token": "token_id:1", "bytes": snowman[:2]}, {"token": "token_id:2", "bytes": snowman[2:]})
    assert said_texts(by_bytes, JSON_TYPE) == {0: ["", "☃"]}
    assert said_texts(body({"token": " a"}, {"token": "b", "bytes": None}), JSON_TYPE) == {0: [" a", "b"]}
    only_ids = body({"token": "token_id:1", "bytes": list(b"token_id:1")})
    assert said_texts(only_ids, JSON_TYPE) == said_texts(b"", SAFETENSORS_TYPE) == {}


def test_a_step_entry_has_what_the_pages_need_of_the_ledgers_record():
    shown = {"refusals", "trajectory_refusals", "metrics", "report", "job_id", "cut", "updates", "groups"}
    assert shown <= StepEntry.__dataclass_fields__.keys() & StepRecord.model_fields.keys()
