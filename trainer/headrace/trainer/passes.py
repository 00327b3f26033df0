"""The passes of one step over the resident model: what is scored before, the updates, what is scored after.

In this order: the reference's log-probabilities, the learner's own before the step where `precalculate_logprobs` or the evaluation ask for
them, the updates, the evaluation. A forward-only step scores its groups instead of training on them. Guarantees: every rank makes the same
passes in the same order; what is only scored changes nothing that the updates see. A gradient that is not
finite raises.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from headrace.core.errors import HeadraceError
from headrace.trainer.batches import RowShape, whole_update
from headrace.trainer.evaluation import Evaluation
from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.growth import Growth
from headrace.trainer.learning_rate import sft_rate, update_rate
from headrace.trainer.logprobs_file import Floats, by_owner
from headrace.trainer.metrics import TokenStats
from headrace.trainer.options import StepOptions
from headrace.trainer.placed import sequence_blocks
from headrace.trainer.plan import StepPlan
from headrace.trainer.reference import as_reference
from headrace.trainer.resident import Loaded
from headrace.trainer.reward_trend import multiplier
from headrace.trainer.rows import PackedUpdate
from headrace.trainer.update import PerRow, Updated, Updater, UpdateSettings, without_dropout
from headrace.trainer.world import Seat, WorldSettings

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What a step's passes came to."""

    packed: list[PackedUpdate]
    """What went through the model for the step itself: its updates, or what a forward-only step scored."""
    done: list[Updated] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Of each update."""
    stats: list[TokenStats]
    """Of all rows of `packed`, rank by rank, at rank 0; elsewhere this rank's."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """At rank 0."""


class StepPasses:
    """Runs the passes of one step on this rank.

    Args:
        loaded: The model, in the state that the step starts from.
        plan: The step.
        options: Of its config.
        world: How many ranks.
        seat: This rank's place.
    """

    def __init__(self, loaded: Loaded, plan: StepPlan, options: StepOptions, world: WorldSettings, seat: Seat) -> None:
        self._loaded = loaded
        self._plan = plan
        self._options = options
        self._world = world
        self._seat = seat
        self._updater = Updater(loaded.trainable, loaded.scorer, options, rank=seat.rank, ranks=world.size)

    def run(self, updates: list[PackedUpdate], shape: RowShape, lap: Callable[[str], None]) -> Passed:
        """All passes. Called by all ranks.

        Args:
            updates: What is trained; empty for a forward-only step.
            shape: Of the rows of what is only scored.
            lap: Notes that a phase has ended.

        Raises:
            HeadraceError: the config asks for a reference that the plan does not bring, or that does not fit; a gradient is not finite.
            DivergedError: an update made weights that are far larger than before it.
        """
        plan, recompute = self._plan, self._options.loss.recompute_old
        forward = [self._whole(plan.groups, shape)] if plan.forward_only and plan.groups else []
        evaluation = Evaluation(plan.evaluation, self._whole(plan.evaluation, shape), self._updater) if plan.evaluation else None
        packed = [*updates, *forward]
        if not packed and evaluation is None:
            lap("update")
            return Passed(packed=[], stats=[])
        without_dropout(self._loaded.trainable.engine.module, recompute=self._world.activation_checkpointing)
        reference = self._reference(packed, evaluation)
        old = [self._updater.score(update) for update in packed] if recompute and packed else None
        if evaluation is not None:
            evaluation.begin(recompute_old=recompute, reference=None if reference is None else reference[-1])
        lap("score")
        done, rates = [], []
        growth = Growth(self._loaded.trainable, plan.settings.optimizer.max_weight_growth) if updates else None
        for i, update in enumerate(updates):
            settings = self._settings(update, i, len(updates))
            rates.append(settings.rate)
            done.append(self._updater.run(update, settings, old=_at(old, i), reference=_at(reference, i)))
            if growth is not None:
                growth.check(f"update {i + 1} of {len(updates)}", settings.rate)
        scored = [self._updater.evaluate(update, old=_at(old, i), reference=_at(reference, i)) for i, update in enumerate(forward)]
        stats = self._gather([stat for passed in (*done, *scored) for stat in passed.stats])
        lap("update")
        numbers: dict[str, float] = {}
        if evaluation is not None:
            found = evaluation.score()
            share = self._gather(list(found.stats))
            numbers = evaluation.numbers(found, share, self._world.size) if self._seat.rank == 0 else {}
            lap("evaluate")
        return Passed(packed=packed, done=done, rates=rates, stats=stats, evaluation=numbers)

    def _whole(self, groups: Sequence[TokenizedGroup], shape: RowShape) -> PackedUpdate:
        return whole_update(groups, self._options, shape, self._plan.state.step, None)

    def _reference(self, packed: Sequence[PackedUpdate], evaluation: Evaluation | None) -> list[PerRow] | None:
        """Of what is packed, and of the evaluation behind it."""
        if not self._options.needs_reference:
            return None
        plan, behind = self._plan, [] if evaluation is None else [evaluation.update]
        if plan.reference is None:
            raise HeadraceError("the config asks for KL to a reference policy, and the plan brings none")
        if plan.reference.kind == "logprobs":
            known = by_owner(plan.groups, plan.reference.logprobs)
            found = [self._known(update, known) for update in packed]
            return found + [self._known(update, by_owner(plan.evaluation, plan.reference.evaluation)) for update in behind]
        adaptation = self._loaded.settings.adaptation
        with as_reference(plan.reference, plan.base, self._loaded.trainable, self._loaded.model, adaptation):
            return [self._updater.score(update) for update in (*packed, *behind)]

    def _known(self, update: PackedUpdate, known: dict[tuple[int, int, int], Floats]) -> PerRow:
        """Log-probabilities that the plan brings, for this rank's rows."""
        rows = []
        for row in self._updater.own_rows(update):
            values_N = np.full(len(row.targets_N), np.nan, np.float32)
            for block in sequence_blocks(row) if row.sequences else ():
                owner = update.owners[int(row.branches_N[block.start])]
                values_N[block] = known[owner.group, owner.trajectory, owner.sequence]
            rows.append(self._updater.tensor(values_N))
        return rows

    def _settings(self, update: PackedUpdate, i: int, updates: int) -> UpdateSettings:
        plan, options = self._plan, self._options
        optimizer = plan.settings.optimizer
        if plan.sft is not None:
            rate = sft_rate(plan.sft, i, updates)
            return UpdateSettings(rate=rate, weight_decay=plan.sft.weight_decay, max_grad_norm=plan.sft.max_grad_norm)
        rate = update_rate(
            options.learning_rate,
            optimizer,
            plan.scalars.updates + i,
            reward_multiplier=multiplier(plan.scalars.reward_trend) if options.scale_rate_by_reward_deviation else 1.0,
            trajectories=update.trajectories,
            power=options.trajectories_power,
        )
        return UpdateSettings(rate=rate, weight_decay=optimizer.weight_decay, max_grad_norm=optimizer.max_grad_norm)

    def _gather(self, share: list[T]) -> list[T]:
        """Every rank's share at rank 0, rank by rank."""
        if self._world.size == 1:
            return share
        shares: list[Any] | None = [None] * self._world.size if self._seat.rank == 0 else None
        torch.distributed.gather_object(share, shares, dst=0)
        return share if shares is None else [each for one in shares for each in one]


def _at(found: list[PerRow] | None, i: int) -> PerRow | None:
    return None if found is None else found[i]
