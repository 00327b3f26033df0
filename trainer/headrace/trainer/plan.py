"""The messages between the process that owns Kafka and the rank: a plan handed over, a result handed back.

Guarantees: plain frozen data, no torch, no Kafka; a plan says from which state it starts, so a rank can't train on top of a state that
was never committed (exactly-once rule 5). Limitations: sharing memory; a plan is pickled (protocol 5) through a pipe.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from headrace.core.errors import HeadraceError
from headrace.schemas.state import Fingerprint, RowsKept, TrainingScalars
from headrace.schemas.training import ModelSettings, SftConfig, TrainConfig
from headrace.trainer.groups import TokenizedGroup


class DivergedError(HeadraceError):
    """An update made weights that are not finite, or far too large: the state before it is the last good one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKey:
    """The identity of a training state: two attempts at one step are two states."""

    model_id: str
    incarnation: str
    step: int
    """Committed steps so far; 0 is the base model."""
    attempt: str | None = None
    """The attempt that made the state; None at step 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSource:
    """Where a base model is: a Hugging Face folder, or a folder that holds a GGUF file."""

    path: str
    gguf_file: str | None = None
    """File name inside `path`, when the weights and the tokenizer are in a GGUF file."""


class BaseUnusableError(HeadraceError):
    """A base model can't be used as its files are now; says which and why. No group and no step is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlReference:
    """The policy that KL is measured against: the base model, stored weights, or what it said of the tokens themselves."""

    kind: Literal["base", "weights", "logprobs"]
    folder: str | None = None
    """`weights`: a local folder as `WeightsWriter` writes it (a peft adapter, or a whole model for full training)."""
    logprobs: tuple[npt.NDArray[np.float32], ...] = ()
    """`logprobs`: of the sampled tokens of each sequence of the plan's groups, in their order; NaN where it says nothing."""
    evaluation: tuple[npt.NDArray[np.float32], ...] = ()
    """`logprobs`: the same for the plan's evaluation set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step to run."""

    state: StateKey
    """The state to start from."""
    attempt: str
    """UUID of this attempt; the new state carries it."""
    base: BaseSource
    settings: ModelSettings
    config: TrainConfig
    """The job's config over the model's, already merged."""
    groups: tuple[TokenizedGroup, ...]
    sft: SftConfig | None = None
    """Supervised fine-tuning on the groups' trajectories instead of a policy-gradient step; rewards count for nothing then."""
    forward_only: bool = False
    """Compute the groups' log-probabilities and train nothing: the new state has the old one's bits."""
    evaluation: tuple[TokenizedGroup, ...] = ()
    """Scored with the new state, without training on it."""
    scalars: TrainingScalars = field(default_factory=TrainingScalars)
    """Of the state to start from."""
    reference: KlReference | None = None
    """Needed where the config asks for a KL term."""
    load_from: str | None = None
    """Local folder of the snapshot of `state`; needed where the rank does not hold that state and its step is above 0. At step 0: of the
    weights that the model begins with, null for the base model's."""
    becomes: StateKey | None = None
    """The new state's identity, where it is not the next step of the same model: a fork's, or after a rebase. `groups` is empty then."""
    snapshot: bool = True
    """Whether the new state is written, too."""
    report_rows: RowsKept = "none"
    """How many of the packed rows are written."""
    out_dir: str
    """Local folder, of this plan alone: the rank writes `weights/` and, where asked for, `snapshot/`, `rows/`, `plots/` and `logprobs/`
    into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """A plan before its turn: to be made ready."""

    plan: StepPlan
    goes_on: bool
    """Whether the rank may continue to it by itself, if the plan that it runs, or one that it gets before it gets this, makes its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """Run the plan that was handed over before its turn, with what was not known then."""

    out_dir: str
    """Of the plan, and of no other: a step that is run again has the attempt that it had."""
    scalars: TrainingScalars
    snapshot: bool
    load_from: str | None

    @classmethod
    def of(cls, plan: StepPlan) -> "HandedOver":
        """What is said in the plan's place."""
        return cls(out_dir=plan.out_dir, scalars=plan.scalars, snapshot=plan.snapshot, load_from=plan.load_from)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """Write the state that the ranks hold, because another model's turn comes or the worker ends."""

    state: StateKey
    folder: str
    """Local; it exists, and is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The state lies in the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did. The files are in the plan's `out_dir`."""

    key: StateKey
    """The new state: step + 1, this attempt. The rank holds it now."""
    scalars: TrainingScalars
    """Of the new state."""
    updates: int
    """Optimizer updates: 0 when nothing could be trained, or was to be."""
    loss: float | None
    """Mean over the updates of each one's loss: the sum over its sampled tokens of loss times coefficient; None without an update."""
    grad_norm: float | None
    """Euclidean norm before clipping; None without an update."""
    num_sequences: int
    """Packed rows."""
    tokens: int
    """All tokens that went through the model, context included, padding not."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Finite numbers only; `headrace.trainer.metrics` says what each is."""
    plan_digest: str
    """SHA-256 (hex) of the packed plan: equal plans train equally."""
    seed: int
    """What the random generators were set to, from (seed of the model, incarnation, step)."""
    weights_format: str
    """`full` or `lora`."""
    seconds: float
    """That the rank was busy with it, and with nothing else."""
    fingerprint: Fingerprint
    goes_on: str | None = None
    """The folder of the plan that the rank has continued to by itself: that plan's result, or failure, comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignOfLife:
    """From a rank: it has joined its world, or a plan is still running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """From a rank: the plan raised. Of one that it continued to by itself from there nothing is said."""

    text: str
    """The traceback; of a base model what is wrong with it."""
    outage: str | None = None
    """What does not work, if that is a disk or another thing that the plan is not to blame for (`headrace.core.outages`)."""
    diverged: bool = False
    """Whether a `DivergedError` was raised: the same plan would raise it again."""
    of_base: bool = False
    """The base model could not be used: the plan is not at fault."""


Answer = StepResult | Saved | Failure | SignOfLife
"""From a rank; the result is rank 0's."""
