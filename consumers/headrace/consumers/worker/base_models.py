"""The base models that this worker can train, and models that wait for theirs.

Guarantees: a problem names what is missing and what there is. Limitations: only the existence of a base model's folder is checked here; its
contents are checked when it is loaded.
"""

import logging
import os
from collections.abc import Mapping

from headrace.consumers.worker.jobs import MESSAGE_LIMIT
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.pending import Retry
from headrace.core.settings import BaseModelEntry
from headrace.schemas.training import ModelSettings, row_length_problem
from headrace.trainer.plan import BaseSource

logger = logging.getLogger(__name__)


def base_source(entry: BaseModelEntry) -> BaseSource:
    """A base model of the catalogue, as the ranks and the tokenizing process load it."""
    return BaseSource(path=entry.path, gguf_file=entry.gguf_file)


def settings_problem(settings: ModelSettings, catalogue: Mapping[str, BaseModelEntry]) -> str | None:
    """Why the worker's configuration does not let this model train; None if it does."""
    entry = catalogue.get(settings.base_model)
    if entry is None:
        names = ", ".join(sorted(catalogue)) or "none: set base_models in the configuration"
        return f"base model {settings.base_model!r} is not in this worker's catalogue, which has: {names}"
    if settings.adaptation not in entry.trainable:
        return f"base model {settings.base_model!r} may be trained as {' or '.join(entry.trainable)}, not as {settings.adaptation}"
    # A job's config was merged over the model's since the settings were validated.
    return row_length_problem(settings.train, settings.max_sequence_tokens)


def base_problem(settings: ModelSettings, catalogue: Mapping[str, BaseModelEntry]) -> str | None:
    """Why this worker can't use the model's base model, whatever the batch; None if nothing is known against it."""
    plain = settings.model_copy(update={"train": type(settings.train)()})
    if (problem := settings_problem(plain, catalogue)) is not None:
        return problem
    path = catalogue[settings.base_model].path
    found = os.path.isdir(path)  # noqa: PTH112 - a pathlib path raises where it may not look
    return None if found else f"base model {settings.base_model!r}: {path} is no folder on this worker, or it may not look there"


def wait_for_base(model: LaneModel, problem: str, *, ranks: bool = False) -> None:
    """The base model can't be used: the model trains nothing until that is repaired. The worker tries again by itself.

    Args:
        model: An active model.
        problem: What is wrong.
        ranks: The ranks could not load it, so that only a step shows whether it works again.
    """
    problem = problem[:MESSAGE_LIMIT]
    known = model.draft.waiting_for == problem
    model.retry = model.retry if known else Retry()
    model.retry.failed(ranks=ranks)
    if not known:
        logger.warning("%s waits, and tries again by itself: %s", model.state.name, problem)
        model.report_status("waiting", problem)
        model.change(waiting_for=problem)


def resume_with_base(model: LaneModel) -> None:
    """The base model can be used: a model that waited for it trains again."""
    model.retry = Retry()
    if model.draft.waiting_for is not None:
        logger.info("%s resumes: its base model can be used", model.state.name)
        model.report_status("active", None)
        model.change(waiting_for=None)
        model.clear_job_waits()
