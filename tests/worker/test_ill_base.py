"""A base model that can't be used costs its models time, and no group."""

import logging
import shutil
from pathlib import Path

import pytest
from tests.worker.groups import group
from tests.worker.learners import learner_settings
from tests.worker.stage import Stage, offsets_of, until

from headrace.core.lanes import lane_of
from headrace.core.model_views import ModelView
from headrace.core.models import create_model, get_model, model_id_of
from headrace.core.settings import BaseModelEntry
from headrace.schemas.events import GroupRejected, ModelStatusChanged, TrajectoryRejected
from headrace.schemas.state import StepRecord
from headrace.schemas.trajectory import TrajectoryGroup

pytestmark = pytest.mark.asyncio(loop_scope="session")


def text_group(name: str, seed: int) -> TrajectoryGroup:
    """A group whose prompts need the tokenizer."""
    body = group(name, seed=seed, version=None).model_dump(exclude_none=True)
    for trajectory in body["trajectories"]:
        del trajectory["messages_and_choices"][1]["prompt_token_ids"]
    return TrajectoryGroup.model_validate(body)


async def model_of(stage: Stage, lane: int, base: Path) -> ModelView:
    """A model of a base model of its own."""
    stage.settings.base_models["ill"] = BaseModelEntry(path=str(base))
    names = (f"ill {i}" for i in range(10_000))
    lanes, account = stage.settings.topics.partitions, stage.settings.account
    name = next(name for name in names if lane_of(model_id_of(account, "rules", name), lanes) == lane)
    settings = learner_settings(learning_rate=1e-2).model_copy(update={"base_model": "ill"})
    return await create_model(stage.settings, project="rules", name=name, model=settings)


async def test_a_model_waits_for_its_base_model_whatever_is_wrong_there_and_goes_on_by_itself_when_it_is_repaired(
    stage: Stage, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lane, base = stage.free_lane(), tmp_path / "base"
    model, other = await model_of(stage, lane, base), await stage.model(lane)
    caplog.set_level(logging.INFO, "headrace")
    async with stage.seen(model) as seen, stage.seen(other) as beside:
        async with stage.owner(lane):
            waits = await seen.until_state(lambda state: state.waiting_for is not None)
            assert (waits.status, f"{base} is no folder" in (waits.waiting_for or "")) == ("active", True)
            first = await stage.send(model, text_group("a", 0), group("b", seed=1, version=None))
            await stage.send(other, *(group(f"o{i}", seed=i, version=None) for i in range(2)))
            await beside.until(StepRecord, 1)
            shutil.copytree(tiny_model, base)
            (base / "tokenizer.json").write_text("{")
            (base / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:1000])
            await seen.until_state(lambda state: "tokenizer can't be read" in (state.waiting_for or ""))
            view = await get_model(stage.settings, model.model_id)
            assert (view.status, "tokenizer" in (view.status_detail or "")) == ("waiting", True)
        async with stage.owner(lane) as owner:
            await until(lambda: owner.lane.models is not None and first[1] < owner.models.position)
            shutil.copy(tiny_model / "tokenizer.json", base)
            await seen.until_state(lambda state: "SafetensorError" in (state.waiting_for or ""), 30)
            second = await stage.send(model, text_group("c", 2), group("d", seed=3, version=None))
            shutil.copy(tiny_model / "model.safetensors", base)
            steps = await seen.until(StepRecord, 2)
            await seen.until_state(lambda state: state.waiting_for is None and state.policy_version == 2)
    assert [offsets_of(step) for step in steps] == [first, second]
    assert seen.of(GroupRejected) == seen.of(TrajectoryRejected) == []
    said = [event.status for event in seen.of(ModelStatusChanged)]
    assert (set(said), said[-1]) == ({"waiting", "active"}, "active")
    lines = [record.message for record in caplog.records if "waits, and tries again by itself" in record.message]
    assert len(lines) <= 4, lines
