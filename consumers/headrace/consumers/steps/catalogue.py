"""What this worker can train: its catalogue of base models, asked before a model is begun and before each of its steps.

Guarantees: a reason that names what is missing and what there is. Gives up: looking into the folder; what it holds shows when it is loaded.
"""

from collections.abc import Mapping
from pathlib import Path

from headrace.core.settings import BaseModelEntry
from headrace.schemas.training import ModelSettings, row_length_problem


def problem_of(settings: ModelSettings, catalogue: Mapping[str, BaseModelEntry]) -> str | None:
    """Why settings can't be trained with this catalogue of base models; None if they can."""
    entry = catalogue.get(settings.base_model)
    if entry is None:
        names = ", ".join(sorted(catalogue)) or "none: set base_models in the configuration"
        return f"base model {settings.base_model!r} is not in this worker's catalogue, which has: {names}"
    if settings.adaptation not in entry.trainable:
        return f"base model {settings.base_model!r} may be trained as {' or '.join(entry.trainable)}, not as {settings.adaptation}"
    if not Path(entry.path).is_dir():
        return f"base model {settings.base_model!r}: {entry.path} is no folder on this worker"
    # A job's config was merged over the model's since the settings were validated.
    return row_length_problem(settings.train, settings.max_sequence_tokens)
