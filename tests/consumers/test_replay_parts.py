"""The parts of a replay that need no ranks: changes as people write them, the way to a step, distances of weights, times."""

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.core.ledgers import record, write

from headrace.consumers.replay.changes import ChangeError, OptionChanges, weights_distance
from headrace.consumers.replay.start import NothingToReplayError, find_route
from headrace.core.errors import HeadraceError
from headrace.core.ledger import StepRange
from headrace.core.settings import KafkaSettings, Settings, StoreSettings, TopicSettings
from headrace.core.store import open_store, store_folder
from headrace.core.times import TimeError, parse_time
from headrace.core.topic_admin import apply
from headrace.schemas.state import ModelState, StepRecord
from headrace.schemas.training import ModelSettings, OptimizerSettings, TrainConfig
from headrace.schemas.weights import WeightsRef

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
MODEL = ModelSettings(base_model="tiny", optimizer=OptimizerSettings(beta1=0.5, weight_decay=0.3), max_sequence_tokens=64)


def test_options_are_read_as_json_or_as_they_stand() -> None:
    asked = OptionChanges.parse(["learning_rate=1e-4", "loss_fn=ppo", "scale_rewards=false", "epsilon_high=null", "optimizer.beta1=0.8"])
    assert asked.config == TrainConfig(learning_rate=1e-4, loss_fn="ppo", scale_rewards=False, epsilon_high=None)
    assert "epsilon_high" in asked.config.model_fields_set
    assert asked.settings(MODEL).optimizer == OptimizerSettings(beta1=0.8, weight_decay=0.3)
    assert asked.settings(MODEL).train == MODEL.train


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["learning_rate"], "write it as learning_rate=1e-4"),
        (["learning_rate="], "write it as learning_rate=1e-4"),
        (["learning_rate=fast"], "learning_rate: Input should be a valid number"),
        (["learning_rate=1e-4", "learning_rate=2e-4"], "learning_rate: it is set twice"),
        (["learning_rate=null"], "give the value itself"),
        (["batch.groups_per_step=3"], "there is no such option; there are advantage_balance"),
        (["optimizer.momentum=3"], "there is no such option"),
        (["optimizer.beta1=2"], "--set optimizer.beta1: Input should be less than 1"),
    ],
)
def test_what_is_no_option_or_no_value_of_it_is_refused_with_its_name(texts: list[str], said: str) -> None:
    with pytest.raises(ChangeError) as refused:
        OptionChanges.parse(texts).settings(MODEL)
    assert said in str(refused.value)


def test_what_does_not_fit_the_model_is_refused() -> None:
    OptionChanges.parse(["packed_sequence_length=64"]).settings(MODEL)
    with pytest.raises(
        ChangeError, match=r"--set does not fit the model: train.packed_sequence_length=128 is above max_sequence_tokens=64"
    ):
        OptionChanges.parse(["packed_sequence_length=128"]).settings(MODEL)


def test_times_are_how_long_ago_or_iso() -> None:
    assert parse_time("10m", NOW) == NOW - timedelta(minutes=10)
    assert parse_time("1.5 h", NOW) == NOW - timedelta(hours=1.5)
    assert parse_time("2026-11-30T08:15:00", NOW) == datetime(2026, 11, 30, 8, 15, tzinfo=UTC)
    assert parse_time("2026-11-30T08:15:00+02:00", NOW) == datetime(2026, 11, 30, 6, 15, tzinfo=UTC)
    for text in ("", "10", "10 minutes", "-5m", "tomorrow", "999999999d"):
        with pytest.raises(TimeError):
            parse_time(text, NOW)


def test_distances_are_relative_to_the_originals_norm_tensor_by_tensor(tmp_path: Path) -> None:
    for name, scale in (("ours", 1.1), ("theirs", 1.0)):
        (tmp_path / name).mkdir()
        tensors = {"a": torch.full((3, 3), 2.0), "b": torch.tensor([3.0, 4.0], dtype=torch.bfloat16) * scale, "c": torch.zeros(2)}
        save_file(tensors, tmp_path / name / "model.safetensors")
    found = weights_distance(tmp_path / "ours", tmp_path / "theirs")
    far = (torch.tensor([3.0, 4.0], dtype=torch.bfloat16) * 1.1).double() - torch.tensor([3.0, 4.0]).double()
    assert [each.name for each in found.tensors] == ["b", "a", "c"]
    assert found.tensors[0].relative == pytest.approx(float(far.norm()) / 5)
    assert [each.relative for each in found.tensors[1:]] == [0, 0]
    assert found.total.relative == pytest.approx(float(far.norm()) / math.sqrt(36 + 25))
    save_file({"a": torch.zeros(1)}, tmp_path / "ours" / "model.safetensors")
    with pytest.raises(HeadraceError, match="has other tensors than the original's"):
        weights_distance(tmp_path / "ours", tmp_path / "theirs")


@pytest.fixture
async def settings(kafka: str, topic_prefix: str, tmp_path: Path) -> Settings:
    found = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka),
        topics=TopicSettings(prefix=topic_prefix, partitions=1),
        store=StoreSettings(url=f"file://{tmp_path}/store"),
    )
    await apply(found)
    return found


async def test_the_way_to_a_step_begins_at_the_nearest_state_that_exists_and_never_before_one_that_began_anew(
    settings: Settings, tmp_path: Path
) -> None:
    """Snapshots at 2, 4 (rebased), 6; one at 7 that no record names; and one of an attempt at 5 that was never committed."""
    store = open_store(settings.store.url, settings.s3)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.json").write_text("{}")

    def stored(step: int, attempt: str | None = None) -> WeightsRef:
        name = f"models/m/i/snapshots/{step:08d}-a-new-name"
        identity = {"model_id": "m", "incarnation": "i", "step": step, "attempt": attempt or f"attempt-{step}"}
        return store_folder(store, name, tmp_path / "state", kind="snapshot", **identity)[1]  # type: ignore[arg-type]  # as named

    refs = {step: stored(step) for step in (2, 4, 6)}
    stored(7)
    stored(5, "of another worker")

    def step_of(step: int) -> StepRecord:
        cut = "rebased" if step == 4 else "groups_per_step"
        return record(step, cut=cut).model_copy(update={"snapshot": refs.get(step)})

    await write(settings, [step_of(step) for step in range(1, 9)], key="m")
    state = ModelState(
        model_id="m", incarnation="i", account="a", project="p", name="agent", worker_group="default", settings=MODEL, scanned=0
    )

    def delete(step: int, name: str) -> None:
        store.delete(f"models/m/i/snapshots/{step:08d}-a-new-name/{name}")

    async def way(steps: str) -> tuple[int, int, list[int]]:
        route = await find_route(settings, store, state, StepRange.parse(steps))
        return 0 if route.start is None else route.start.step, route.gone, [found.step for found in route.records]

    assert await way("8") == (7, 0, [8])
    assert await way("7..") == (6, 0, [7, 8])
    assert await way("..2") == (0, 0, [1, 2])
    assert await way("3..5") == (2, 0, [3, 4, 5])
    assert await way("6") == (4, 0, [5, 6])
    delete(7, "state.json")  # half deleted is gone
    delete(6, "manifest.json")
    assert await way("8") == (4, 2, [5, 6, 7, 8])
    delete(4, "manifest.json")
    with pytest.raises(NothingToReplayError, match="step 4 began again from a snapshot that is gone"):
        await way("8")
    assert await way("3") == (2, 0, [3])
    with pytest.raises(NothingToReplayError, match=r"steps 3\.\.9 were asked for, but the ledger of agent ends at step 8"):
        await way("3..9")
