"""Rules 3, 5 and 12: commits whose outcome nobody knows, state on the ranks that outlives them, and what goes while they wait."""

import asyncio

import pytest
from aiokafka.errors import KafkaConnectionError
from tests.worker.groups import group
from tests.worker.stage import SOON, Commit, Stage, offsets_of, until

from headrace.consumers.worker.commits import LaneWriter
from headrace.core.kafka import client_options
from headrace.schemas.commands import DeleteModel
from headrace.schemas.events import GroupRejected
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import StepRecord
from headrace.schemas.weights import WeightsPublished

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_unknown_outcome_a_step_whose_commit_was_not_answered_is_found_by_its_attempt_and_not_run_again(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    unanswered: list[StepRecord] = []

    async def lose_one_answer(commit: Commit) -> dict[str, int]:
        written = await commit.go()
        if (steps := commit.of(StepRecord)) and not unanswered:
            unanswered.extend(steps)
            raise KafkaConnectionError("the answer is lost")
        return written

    async with stage.seen(model) as seen, stage.owner(lane, lose_one_answer) as owner:
        sent = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(4)))
        first, second = await seen.until(StepRecord, 2)
        await seen.until_state(lambda state: state.policy_version == 2)
        await seen.until(WeightsPublished, 2)
        assert stage.run_of(owner, model).state.last_attempt == second.attempt
    assert first == unanswered[0], "the files that were stored for it are those that count"
    assert second.attempt_before == first.attempt
    assert (offsets_of(first), offsets_of(second)) == (sent[:2], sent[2:])
    assert max(seen.event_ids.values()) == 1


async def test_unknown_outcome_a_lane_that_the_group_took_away_is_not_claimed_to_learn_of_a_commit(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)

    async def lost_with_the_lane(commit: Commit) -> dict[str, int]:
        written = await commit.go()
        if commit.of(StepRecord):
            commit.owner.wanted = False
            raise KafkaConnectionError("the answer is lost")
        return written

    async with stage.seen(model) as seen:
        async with stage.owner(lane, lost_with_the_lane) as former:
            await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
            await former.task
        async with stage.owner(lane):
            await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2, 4)))
            steps = await seen.until(StepRecord, 2)
    assert [step.step for step in steps] == [1, 2]


@pytest.mark.parametrize("landed", [True, False])
async def test_unknown_outcome_a_lane_that_is_taken_away_while_its_commit_is_on_its_way_commits_nothing_more(
    stage: Stage, landed: bool
) -> None:
    """What it knows is from before that commit, without the groups of its step: said now, it would undo the step, or lose the groups."""
    lane = stage.free_lane()
    model = await stage.model(lane)
    on_its_way = asyncio.Event()

    async def no_answer(commit: Commit) -> dict[str, int]:
        if not commit.of(StepRecord):
            return await commit.go()
        if landed:
            await commit.go()
        on_its_way.set()
        return await commit.never()

    async with stage.seen(model) as seen:
        async with stage.owner(lane, no_answer) as former:
            sent = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
            await asyncio.wait_for(on_its_way.wait(), SOON)
            await former.lose()
        async with stage.owner(lane):
            more = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2, 4)))
            steps = await seen.until(StepRecord, 2)
            await seen.until_state(lambda state: state.policy_version == 2)
    assert [(step.step, offsets_of(step)) for step in steps] == [(1, sent), (2, more)]
    assert max(seen.event_ids.values()) == 1


async def test_committed_state_only_what_the_ranks_made_of_a_fenced_step_is_not_gone_on_from(stage: Stage) -> None:
    """The worker gets the lane back with step 2 on its ranks, which nobody has committed: again, it must come out as the first time."""
    lane = stage.free_lane()
    model = await stage.model(lane)
    fenced: list[StepRecord] = []

    async def fence_the_second(commit: Commit) -> dict[str, int]:
        if (steps := commit.of(StepRecord, lambda record: record.step == 2)) and not fenced:
            fenced.extend(steps)
            other = LaneWriter(stage.settings, lane, client_options(stage.settings.kafka, "test-other"))
            await other.start()
            await other.stop()
        return await commit.go()

    async with stage.seen(model) as seen, stage.owner(lane, fence_the_second):
        await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(6)))
        steps = await seen.until(StepRecord, 3)
        published = await seen.until(WeightsPublished, 3)
    assert [step.step for step in steps] == [1, 2, 3]
    (lost,) = fenced
    assert steps[1].attempt != lost.attempt
    assert steps[1].weights.uri != lost.weights.uri, "rule 14: two attempts, two names"
    assert (steps[1].plan_digest, steps[1].weights.digest) == (lost.plan_digest, lost.weights.digest)
    assert len({record.digest for record in published}) == 3


async def test_incarnation_a_model_that_is_deleted_while_its_step_waits_for_its_commit_publishes_nothing(stage: Stage) -> None:
    """A refusal is being committed when the step is done: the step's turn comes when its model is gone, and the lane lives on."""
    lane = stage.free_lane()
    model = await stage.model(lane)
    deleted = asyncio.Event()

    async def hold_the_refusal(commit: Commit) -> dict[str, int]:
        if commit.of(GroupRejected, lambda event: event.reason is RejectionReason.NO_TRAJECTORIES):
            await deleted.wait()
        return await commit.go()

    async with stage.seen(model) as seen, stage.owner(lane, hold_the_refusal) as owner:
        await seen.until_state(lambda state: state.status == "active")
        await stage.put(model, b'{"trajectories": []}')
        await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
        await until(lambda: getattr(stage.world._resident, "model_id", None) == model.model_id)
        await stage.command(DeleteModel(model_id=model.model_id))
        await until(lambda: stage.run_of(owner, model).status == "deleted")
        deleted.set()
        refused = await seen.until(GroupRejected, 3)
        await seen.until_state(lambda state: state.status == "deleted")
        assert not owner.task.done()
    assert [event.reason for event in refused[1:]] == [RejectionReason.MODEL_DELETED] * 2
    assert seen.of(StepRecord) == seen.of(WeightsPublished) == []
