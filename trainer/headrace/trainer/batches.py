"""From a step's groups to the packed rows of its updates.

A policy-gradient step is one update over all rows, or several: of `grad_accumulation_sequences` rows each, or of at most
`max_trajectories_per_update` trajectories, or of as many rows as `max_tokens_per_update` holds, or both. Supervised fine-tuning is one
update for each batch of examples in each epoch, in an order drawn from the step's seed. Guarantees: a pure function of (groups, options,
capacity, ranks, policy version, seed); the coefficients of each update sum to what the whole step's sum to, so several updates weigh like
one. Limitations: balance between the updates of one step beyond what the order of rows gives.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.core.errors import HeadraceError
from headrace.schemas.training import SftConfig
from headrace.trainer.advantages import Credit, batch_credits, sft_credits
from headrace.trainer.groups import TokenizedGroup, TokenizedTrajectory
from headrace.trainer.options import KlOptions, LossOptions, StepOptions
from headrace.trainer.packing import pack
from headrace.trainer.rows import CreditedSequence, Owner, PackedRow, PackedUpdate

MicroStep = tuple[PackedRow | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """What a row may be on this world."""

    tokens: int
    """Where the config says nothing: at least the longest sequence."""
    ranks: int
    alone: bool
    """One sequence a row."""


def policy_updates(groups: Sequence[TokenizedGroup], options: StepOptions, shape: RowShape, version: int) -> list[PackedUpdate]:
    """The updates of a policy-gradient step; none where nothing trains.

    Raises:
        HeadraceError: `grad_accumulation_sequences` is no multiple of the number of ranks.
    """
    credits_K = batch_credits(groups, options.advantages, options.aggregation, options.aggregation_constant)
    most = options.trajectories_per_update or len(credits_K) or 1
    chunks = [credits_K[first : first + most] for first in range(0, len(credits_K), most)]
    packed = [_pack(groups, chunk, options.packed_sequence_length, shape, version) for chunk in chunks]
    packed = [update for update in packed if update.micro_steps]
    if all(size is None for size in (options.rows_per_update, options.tokens_per_update, options.trajectories_per_update)):
        return packed
    total = _coefficients(row for update in packed for row in update.rows)
    return [
        _scaled(replace(update, micro_steps=part, trajectories=_count(part, update.owners)), total)
        for update in packed
        for part in _parts(update.micro_steps, options, shape)
    ]


def _parts(micro_steps: tuple[MicroStep, ...], options: StepOptions, shape: RowShape) -> list[tuple[MicroStep, ...]]:
    rows, tokens = options.rows_per_update, options.tokens_per_update
    if rows is None:
        return [micro_steps] if tokens is None else _of_tokens(micro_steps, tokens)
    if rows % shape.ranks:
        raise HeadraceError(f"grad_accumulation_sequences is {rows}, but this world has {shape.ranks} ranks: it must be a multiple of them")
    size = rows // shape.ranks
    return [micro_steps[first : first + size] for first in range(0, len(micro_steps), size)]


def _of_tokens(micro_steps: Sequence[MicroStep], most: int) -> list[tuple[MicroStep, ...]]:
    """Micro steps in order, as many together as have `most` tokens; one that has more by itself is alone."""
    parts: list[list[MicroStep]] = []
    filled = 0
    for step in micro_steps:
        tokens = sum(len(row) for row in step if row is not None)
        if not parts or filled + tokens > most:
            parts.append([])
            filled = 0
        parts[-1].append(step)
        filled += tokens
    return [tuple(part) for part in parts]


def whole_update(groups: Sequence[TokenizedGroup], options: StepOptions, shape: RowShape, version: int, length: int | None) -> PackedUpdate:
    """Every trajectory with a sampled token, also of groups without variance: those weigh nothing. For passes that train nothing."""
    credited = {
        (credit.group, credit.trajectory): credit
        for credit in batch_credits(groups, options.advantages, options.aggregation, options.aggregation_constant)
    }
    credits_K = [
        credited.get((g, t)) or Credit(group=g, trajectory=t, advantage=0.0, weight=0.0, trainable_tokens=trajectory.trainable_tokens)
        for g, group in enumerate(groups)
        for t, trajectory in enumerate(group.trajectories)
        if trajectory.trainable_tokens > 0
    ]
    return _pack(groups, credits_K, length, shape, version)


def sft_updates(groups: Sequence[TokenizedGroup], config: SftConfig, shape: RowShape, seed: int, length: int | None) -> list[PackedUpdate]:
    """The updates of a supervised job: batches of `batch_size` examples, epoch after epoch."""
    places = [(g, t) for g, group in enumerate(groups) for t in range(len(group.trajectories))]
    examples = [replace(groups[g], trajectories=(_as_text(groups[g].trajectories[t]),)) for g, t in places]
    size = 2 if config.batch_size == "auto" else config.batch_size
    generator = np.random.default_rng(seed)
    updates = []
    for _ in range(config.epochs):
        order = generator.permutation(len(examples))
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            batch = [examples[i] for i in chosen]
            packed = _pack(batch, sft_credits(batch), length, shape, None)
            owners = (Owner(group=g, trajectory=t, sequence=o.sequence) for o in packed.owners for g, t in (places[chosen[o.group]],))
            updates.append(replace(packed, owners=tuple(owners)))
    return [update for update in updates if update.micro_steps]


def sft_options(options: StepOptions) -> StepOptions:
    """The options of a supervised step: plain likelihood (a CISPO term of ratio 1 and advantage 1), and nothing that corrects a sampler."""
    return replace(options, loss=LossOptions(), kl=KlOptions(), warnings=())


def _pack(
    groups: Sequence[TokenizedGroup], credits_K: Sequence[Credit], length: int | None, shape: RowShape, version: int | None
) -> PackedUpdate:
    sequences: list[CreditedSequence] = []
    owners: list[Owner] = []
    for credit in credits_K:
        trajectory = groups[credit.group].trajectories[credit.trajectory]
        versions = [v for v in (trajectory.initial_policy_version, trajectory.final_policy_version) if v is not None]
        first = len(sequences)  # not asked for below: it grows while the sequences are added
        sequences.extend(
            CreditedSequence(
                sequence=sequence,
                tree=credit.group,
                branch=first + i,
                advantage=credit.advantage,
                weight=credit.weight,
                version=min(versions, default=None),
            )
            for i, sequence in enumerate(trajectory.sequences)
        )
        owners.extend(Owner(group=credit.group, trajectory=credit.trajectory, sequence=i) for i in range(len(trajectory.sequences)))
    longest = max((len(credited.sequence) for credited in sequences), default=1)
    capacity = length or max(shape.tokens, longest)
    packed = pack(sequences, capacity=capacity, ranks=shape.ranks, alone=shape.alone, policy_version=version)
    return replace(packed, trajectories=len(credits_K), owners=tuple(owners))


def _count(micro_steps: Sequence[Sequence[PackedRow | None]], owners: Sequence[Owner]) -> int:
    """Trajectories of some of an update's rows."""
    rows = [row for step in micro_steps for row in step if row is not None]
    found = (owners[branch] for row in rows for branch in np.unique(row.branches_N))
    return len({(owner.group, owner.trajectory) for owner in found})


def _as_text(trajectory: TokenizedTrajectory) -> TokenizedTrajectory:
    """Without what a sampler said: an example is learnt, the process that wrote it."""
    sequences = (replace(s, logprobs=np.full_like(s.logprobs, np.nan), policy_versions=None) for s in trajectory.sequences)
    return replace(trajectory, sequences=tuple(sequences))


def _coefficients(rows: Iterable[PackedRow]) -> float:
    return math.fsum(float(row.weights_N.sum(dtype=np.float64)) for row in rows)


def _scaled(update: PackedUpdate, total: float) -> PackedUpdate:
    factor = total / _coefficients(update.rows)
    steps = tuple(
        tuple(row and replace(row, weights_N=(row.weights_N * factor).astype(np.float32)) for row in step) for step in update.micro_steps
    )
    return replace(update, micro_steps=steps)
