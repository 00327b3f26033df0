"""What a gateway holds of a model's steps, and what it reads again: a run may be as long as it likes."""

import tracemalloc
import uuid
from itertools import pairwise

import httpx
import pytest
from tests.core.ledgers import digest, record, write
from tests.gateway.job_bodies import make_model
from tests.gateway.lane_double import LaneDouble

from headrace.core.lanes import lane_of
from headrace.core.settings import Settings
from headrace.gateway.dashboard.seen import curve
from headrace.gateway.step_history import BUCKETS, RECENT, BriefStep, StepHistory, entry_of
from headrace.schemas.weights import WeightsRef

NAMES = [f"metric_{n}" for n in range(60)]


def uuid_of(step: int) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, str(step)))


def weights_of(step: int) -> WeightsRef:
    """As a worker names them."""
    return WeightsRef(uri=f"file:///store/models/m/i/weights/{step:08d}-{uuid_of(-step)}", digest=digest(str(step)))


def long_history(steps: int) -> StepHistory:
    history = StepHistory("i", 0)
    for step in range(1, steps + 1):
        metrics = {name: float(step + n) for n, name in enumerate(NAMES)}
        history.append(record(step, metrics=metrics, job_id=uuid_of(step)).model_copy(update={"weights": weights_of(step)}), 3 * step)
    return history


def test_an_old_step_takes_little_memory_however_many_there_are() -> None:
    sizes = []
    tracemalloc.start()
    try:
        for steps in (2000, 6000):
            before = tracemalloc.get_traced_memory()[0]
            history = long_history(steps)
            sizes.append(tracemalloc.get_traced_memory()[0] - before)
            del history
    finally:
        tracemalloc.stop()
    each = (sizes[1] - sizes[0]) / 4000
    assert each < 200, f"{each:.0f} bytes for each old step"
    assert sizes[0] - 2000 * each < 700_000, f"{sizes[0]} bytes for 2000 steps"


def test_what_names_an_old_step_is_what_the_ledger_says() -> None:
    records = [
        record(
            step,
            job_id=[None, f"job {step}", uuid_of(step)][step % 3],
        ).model_copy(update={"hot_load_identity": f"id-{step}" if step % 7 == 0 else None, "weights": weights_of(step)})
        for step in range(5, 5 + 3 * RECENT)
    ]
    # Weights of another step, as of a forward-only one, and of a strange name.
    records[9] = records[9].model_copy(update={"weights": records[2].weights})
    records[10] = records[10].model_copy(update={"weights": WeightsRef(uri="s3://elsewhere/x", digest="d")})
    history = StepHistory("i", 0)
    for n, each in enumerate(records):
        history.append(each, 100 + n)
        history.append(each, 1000 + n)  # a mirrored topic has it twice
    assert (len(history), len(history.recent), history.first_step) == (len(records), RECENT, 5)
    for n, each in enumerate(records):
        whole = entry_of(each)
        brief = {name: getattr(whole, name) for name in BriefStep.__dataclass_fields__}
        for found in (history.find(each.step), *([] if each.job_id is None else [history.of_job(each.job_id)])):
            assert found is not None
            assert {name: getattr(found, name) for name in brief} == brief
        assert history.offsets_of([each.step]) == {100 + n: each.step}
    assert history.find(4) is history.find(5 + 3 * RECENT) is history.of_job("nobody's") is None
    early = history.of_snapshot("id-7", (None,))  # type: ignore[arg-type]
    assert (early.step if early else None, history.of_snapshot("id-7", ("dep",))) == (7, None)
    assert [step for step, _ in history.moments()] == history.numbers == [each.step for each in records]


@pytest.mark.parametrize("steps", [1, RECENT, RECENT + 1, RECENT + BUCKETS + 1, 5000])
def test_a_curve_is_of_the_whole_run_and_adds_up(steps: int) -> None:
    history = long_history(steps)
    for points in (10, 300):
        found = curve(history, "metric_3", points).points
        assert (found[0].first, found[-1].last) == (1, steps)
        assert all(before.last + 1 == after.first for before, after in pairwise(found))
        assert len(found) <= points
        for point in found:
            assert (point.low, point.high) == (point.first + 3, point.last + 3)
            assert point.mean == pytest.approx((point.first + point.last) / 2 + 3)
    assert len(curve(history, "metric_3", 300).points) >= min(steps, BUCKETS // 2 + RECENT) * 0.9
    assert curve(history, "nothing", 300).points == []


async def test_old_steps_are_whole_on_every_page_and_in_every_answer(gateway: httpx.AsyncClient, settings: Settings) -> None:
    model = await make_model(gateway)
    state = await LaneDouble(gateway.gate).take_up(model)  # type: ignore[attr-defined]
    lane, steps = lane_of(model, settings.topics.partitions), RECENT + 30
    records = [
        record(step, model_id=model, incarnation=state.incarnation, lane=lane, metrics={"loss": step / 10, "reward_mean": 0.5})
        for step in range(1, steps + 1)
    ]
    await write(settings, [*records, state.model_copy(update={"policy_version": steps})], key=model)
    listed = (await gateway.get(f"/v1/preview/models/{model}/checkpoints", params={"limit": 3})).json()
    assert [(item["step"], item["metrics"].get("loss")) for item in listed["data"]] == [(0, None), (1, 0.1), (2, 0.2)]
    page = f"/dashboard/api/models/{model}"
    rows = (await gateway.get(f"{page}/steps", params={"before": RECENT, "limit": RECENT})).json()
    assert [(row["step"], row["loss"]) for row in rows["steps"]] == [(step, step / 10) for step in range(RECENT - 1, 0, -1)]
    assert rows["more"] is False
    found = (await gateway.get(f"{page}/steps/1")).json()
    assert (found["metrics"], found["first"], found["last"]) == ({"loss": 0.1, "reward_mean": 0.5}, 1, steps)
    assert (await gateway.get(f"{page}/steps/{steps + 1}")).status_code == 404
    points = (await gateway.get(f"{page}/curves/loss")).json()["points"]
    assert (points[0]["mean"], points[-1]["mean"], len(points)) == (0.1, steps / 10, steps)
    held = gateway.gate.view.tables.steps[model]  # type: ignore[attr-defined]
    assert (len(held), len(held.recent)) == (steps, RECENT)
    assert held.find(1).weights.digest == digest(f"weights {state.incarnation} 1")
