"""The evaluation set of a job, out of the store and tokenized as the model's groups are.

Guarantees: a set that is gone, or is not what the job named, fails with the reason, and so does one of which no group can be scored; its
groups are no part of the model's batch policy, so those without variance stay. Gives up: single groups that can't be tokenized; they are
left out, and the log says how many. The sets of the next steps are read again.
"""

import asyncio
import logging

from headrace.consumers.intake.admission import AdmissionRequest, Admitted, check_base
from headrace.consumers.intake.admission_pool import AdmissionPool
from headrace.core.errors import HeadraceError
from headrace.core.group_sets import read_lines
from headrace.core.payloads import PayloadError
from headrace.core.store import ObjectStore
from headrace.schemas.jobs import GroupSet
from headrace.schemas.training import BatchPolicy, ModelSettings
from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.plan import BaseSource

logger = logging.getLogger(__name__)


class EvaluationSetError(HeadraceError):
    """An evaluation set that can't be used; says which and why."""


async def evaluation_groups(
    store: ObjectStore, pool: AdmissionPool, stored: GroupSet | None, base: BaseSource, settings: ModelSettings
) -> tuple[TokenizedGroup, ...]:
    """The groups of a set; none where there is no set.

    Args:
        store: Object store.
        pool: Tokenizes.
        stored: Where the set is.
        base: The model's base model.
        settings: The model's settings.

    Raises:
        EvaluationSetError: see there.
        BaseUnusableError: the base model can't be used.
        HeadraceError: the store can't be reached.
    """
    if stored is None:
        return ()
    try:
        lines = await asyncio.to_thread(read_lines, store, stored)
    except PayloadError as error:
        raise EvaluationSetError(f"the evaluation set can't be used: {error}") from error
    plain = settings.model_copy(update={"batch": BatchPolicy(over_long=settings.batch.over_long)})
    requests = [
        AdmissionRequest(value=line, headers={}, fallback_id=f"line {number}", base=base, settings=plain)
        for number, line in enumerate(lines, start=1)
    ]
    answers = await pool.admit(requests)
    check_base(answers)
    groups = tuple(answer.group for answer in answers if isinstance(answer, Admitted))
    refused = [(number, answer) for number, answer in enumerate(answers, start=1) if not isinstance(answer, Admitted)]
    if refused:
        number, answer = refused[0]
        first = f"line {number}: {getattr(answer, 'detail', type(answer).__name__)}"
        if not groups:
            raise EvaluationSetError(f"no group of the evaluation set {stored.uri} can be scored, the first is {first}")
        logger.warning(
            "%d of %d groups of the evaluation set %s are left out, the first is %s", len(refused), len(answers), stored.uri, first
        )
    if not any(group.trainable_tokens for group in groups):
        raise EvaluationSetError(f"the evaluation set {stored.uri} has no sampled token: each sample needs an assistant's answer")
    return groups
