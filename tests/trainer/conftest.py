"""Fixtures of the trainer's tests: tiny base models and plans for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.trainer.tiny import random_groups, save_byte_tokenizer, save_model

from headrace.schemas.state import TrainingScalars
from headrace.schemas.training import LoraSettings, ModelSettings, OptimizerSettings, SftConfig, TrainConfig
from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.plan import BaseSource, KlReference, StateKey, StepPlan


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> BaseSource:
    """Qwen3, hidden 32, 2 layers, a byte a token, tied embeddings."""
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder)
    save_byte_tokenizer(folder)
    return BaseSource(path=str(folder))


@pytest.fixture(scope="session")
def make_base(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., BaseSource]:
    """Another architecture, or other settings of its config."""

    def make(architecture: str = "qwen3", **changes: Any) -> BaseSource:
        folder = tmp_path_factory.mktemp(architecture)
        save_model(folder, architecture, **changes)
        save_byte_tokenizer(folder)
        return BaseSource(path=str(folder))

    return make


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], BaseSource]:
    """A base folder without weights, with this chat template: enough to tokenize."""

    def make(template: str | None) -> BaseSource:
        folder = tmp_path_factory.mktemp("template")
        save_model(folder)
        save_byte_tokenizer(folder, template)
        return BaseSource(path=str(folder))

    return make


@pytest.fixture
def make_plan(tiny: BaseSource, tmp_path: Path) -> Callable[..., StepPlan]:
    """A plan for the tiny model with groups of its own for each step."""

    def make(
        state: StateKey | None = None,
        *,
        attempt: str = "attempt",
        base: BaseSource = tiny,
        adaptation: Literal["lora", "full"] = "full",
        groups: tuple[TokenizedGroup, ...] | None = None,
        config: TrainConfig | None = None,
        load_from: Path | None = None,
        seed: int = 0,
        reference: KlReference | None = None,
        evaluation: tuple[TokenizedGroup, ...] = (),
        sft: SftConfig | None = None,
        scalars: TrainingScalars | None = None,
        **optimizer: float,
    ) -> StepPlan:
        state = state or StateKey(model_id="m", incarnation="i", step=0)
        return StepPlan(
            state=state,
            attempt=attempt,
            base=base,
            settings=ModelSettings(
                base_model="tiny",
                adaptation=adaptation,
                lora=LoraSettings(r=4, alpha=8),
                optimizer=OptimizerSettings.model_validate({"max_grad_norm": 1.0, **optimizer}),
                seed=seed,
            ),
            config=config or TrainConfig(learning_rate=1e-3),
            groups=random_groups(state.step) if groups is None else groups,
            reference=reference,
            evaluation=evaluation,
            sft=sft,
            scalars=scalars or TrainingScalars(),
            load_from=None if load_from is None else str(load_from),
            out_dir=str(tmp_path / f"{attempt}-{state.step}"),
        )

    return make
