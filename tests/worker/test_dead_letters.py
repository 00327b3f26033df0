"""A dead letter that is sent again trains, once the reason is gone."""

from tests.worker.conftest import following, learner
from tests.worker.groups import group

from headrace.core.dead_letters import LetterFilter, list_letters
from headrace.core.models import model_id_of
from headrace.core.resolving import resolve
from headrace.core.settings import Settings
from headrace.producers import TrajectoryProducer
from headrace.schemas.dead_letters import DeadLetterResolved
from headrace.schemas.state import StepRecord


async def test_letters_of_an_unknown_model_train_when_they_are_sent_again_after_it_was_created(shared: Settings) -> None:
    model_id = model_id_of(shared.account, "tests", "came late")
    async with following(shared, model_id) as seen, TrajectoryProducer(shared, model_id=model_id) as producer:
        sent = [(await producer.send(group(name, seed=seed))).offset for seed, name in enumerate("ab")]
        await seen.until_dead_letters(2)
        wanted = LetterFilter(reason="unknown_model", keys=frozenset({model_id}))
        assert [letter.offset for letter in await list_letters(shared, wanted)] == sent
        await learner(shared, "came late")
        outcomes = await resolve(shared, "retried", wanted, by="ada")
        (step,) = await seen.until(StepRecord, 1)
        resolved = await seen.until(DeadLetterResolved, 2)
    assert [outcome.resolved for outcome in outcomes] == resolved
    trained = [offset for span in step.offsets for offset in range(span.first, span.last + 1)]
    assert trained == [record.new_offset for record in resolved]
    assert (step.groups, await list_letters(shared, wanted)) == (2, [])
