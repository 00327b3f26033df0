"""What this worker can train: its catalogue of base models, asked before a model is begun and before each of its steps.

Guarantees: a reason that names what is missing and what there is. Limitations: it does not look into the folder; what the folder holds
shows when it is loaded.
"""

import os
from collections.abc import Mapping

from headrace.core.settings import BaseModelEntry
from headrace.schemas.training import ModelSettings, row_length_problem


def problem_of(settings: ModelSettings, catalogue: Mapping[str, BaseModelEntry]) -> str | None:
    """Why the configuration does not let this model train; None if it does."""
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
    if (problem := problem_of(plain, catalogue)) is not None:
        return problem
    path = catalogue[settings.base_model].path
    found = os.path.isdir(path)  # noqa: PTH112 - a pathlib path raises where it may not look
    return None if found else f"base model {settings.base_model!r}: {path} is no folder on this worker, or it may not look there"
