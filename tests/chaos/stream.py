"""The stream that a chaos run trains on: written from a seed, with what must become of each record said next to it.

Guarantees: the same seed and number of steps give the same bytes in the same order for each partition, whatever the run; the expectation
of a record follows from what stands before it in the log, never from time. Each unit (a full batch of the stream, or a job) is one step,
so the number of steps is known before any worker runs. Between the units stands what must not train: duplicates inside the window (and
repeats beyond it, which do train), unreadable bytes, stale and unknown versions, equal rewards, payloads that are not there, groups on
foreign lanes or of unknown models, late groups of jobs that ended, repeated job records, and jobs that lack a group until much later.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from uuid import UUID

import orjson

from headrace.core.lanes import lane_of
from headrace.core.models import model_id_of
from headrace.schemas.chat import Choice, ChoiceMessage, Message
from headrace.schemas.claim import GroupClaim
from headrace.schemas.codec import JSON_TYPE, SAFETENSORS_TYPE, encode_json, encode_safetensors, sampled
from headrace.schemas.envelope import type_of
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.reasons import DeadLetterReason, RejectionReason
from headrace.schemas.training import BatchPolicy, LoraSettings, ModelSettings, OptimizerSettings, SftConfig, TrainConfig
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup

ACCOUNT, PROJECT = "chaos", "proof"
LANES = 2
WINDOW = 40
"""The duplicate window: small, so that ids leave it all the time."""
MAX_LAG = 8

TRAINED = "trained"
_LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
JOB = "job record"
"""Opens a job, or repeats a record and is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A model of the run."""

    name: str
    lane: int
    settings: ModelSettings

    @property
    def model_id(self) -> str:
        """As `create_model` will make it."""
        return model_id_of(ACCOUNT, PROJECT, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimIds:
    """What a claim says of its group."""

    group_id: str
    job_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record to write to `trajectory-groups`, and what must become of it."""

    learner: str
    key: bytes | None
    value: bytes | None
    partition: int
    expected: str
    """`TRAINED`, `JOB`, a `RejectionReason` or a `DeadLetterReason`."""
    headers: tuple[tuple[str, bytes], ...] = ()
    claimed: ClaimIds | None = None
    """`value` goes to the object store, and a claim with these ids into the log."""
    unit: int | None = None
    """The unit of its learner that is complete with this record, counted from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """All that is written."""

    learners: tuple[Learner, ...]
    entries: tuple[Entry, ...]
    steps: dict[str, int]
    """Steps by learner."""


def _named(stem: str, lane: int) -> str:
    """A name whose model falls on the lane."""
    return next(name for i in range(1000) if lane_of(model_id_of(ACCOUNT, PROJECT, name := f"{stem}-{i}"), LANES) == lane)


def learners() -> tuple[Learner, ...]:
    """Two models that share a lane, one of them a LoRA adapter, and one on a lane of its own; each with state that can be got wrong."""
    optimizer = OptimizerSettings(max_grad_norm=1.0, warmup_updates=5, schedule="linear", schedule_updates=5000, min_rate_ratio=0.1)
    full = ModelSettings(
        base_model="tiny",
        adaptation="full",
        batch=BatchPolicy(groups_per_step=2, zero_variance="refuse"),
        train=TrainConfig(learning_rate=1e-3),
        optimizer=optimizer,
        max_policy_lag=MAX_LAG,
        seed=1,
    )
    lora = ModelSettings(
        base_model="tiny",
        adaptation="lora",
        lora=LoraSettings(r=4, alpha=8),
        batch=BatchPolicy(groups_per_step=3),
        train=TrainConfig(learning_rate=1e-2, scale_learning_rate_by_reward_std_dev=True),
        optimizer=optimizer,
        seed=2,
    )
    against_its_past = ModelSettings(
        base_model="tiny",
        adaptation="full",
        batch=BatchPolicy(groups_per_step=2),
        train=TrainConfig(learning_rate=1e-3, kl_penalty_step_lag=2, kl_loss_coef=0.05),
        optimizer=optimizer,
        seed=3,
    )
    return (
        Learner(name=_named("full", 0), lane=0, settings=full),
        Learner(name=_named("lora", 0), lane=0, settings=lora),
        Learner(name=_named("kl", 1), lane=1, settings=against_its_past),
    )


def write(steps: int, seed: int) -> Stream:
    """A stream of so many steps over all learners."""
    rng = random.Random(seed)
    chosen = learners()
    shares = {learner.name: 0 for learner in chosen}
    for _ in range(steps):
        shares[rng.choice(chosen).name] += 1
    lines = [list(_Line(learner, random.Random(f"{seed}/{learner.name}")).units(shares[learner.name])) for learner in chosen]
    return Stream(learners=chosen, entries=tuple(_shuffled(lines, rng)), steps=shares)


def _shuffled(lines: Sequence[Sequence[Entry]], rng: random.Random) -> Iterator[Entry]:
    """The lines' entries, each line in its order, in bursts."""
    waiting = [deque(line) for line in lines]
    while any(waiting):
        line = rng.choice([line for line in waiting if line])
        for _ in range(min(len(line), rng.randint(1, 6))):
            yield line.popleft()


@dataclass(slots=True, kw_only=True)
class _Job:
    """A job on its way into the log."""

    job_id: str
    groups: list[TrajectoryGroup]
    """Not written yet."""
    record: Entry
    held: int = 0
    """Units that come before the rest of it."""


@dataclass(slots=True)
class _Line:
    """Writes the records of one learner."""

    learner: Learner
    rng: random.Random
    done: int = 0
    """Units that are complete: the learner's version when all of them have run."""
    made: int = 0
    window: deque[str] = field(default_factory=lambda: deque(maxlen=WINDOW))
    left: list[str] = field(default_factory=list)
    """Ids that have left the window."""
    ended: list[_Job] = field(default_factory=list)
    open: list[_Job] = field(default_factory=list)

    def units(self, count: int) -> Iterator[Entry]:
        """So many units; the last is a batch of the stream, so that nothing is left waiting in its bucket."""
        if count == 0:
            return
        while self.done + len(self.open) < count - 1:
            yield from self._noise()
            due = [job for job in self.open if job.held <= 0]
            yield from self._finish(due[0]) if due else self._unit(may_hold=self.done + len(self.open) + 2 < count)
            for job in self.open:
                job.held -= 1
        for job in list(self.open):
            yield from self._finish(job)
        yield from self._stream_batch()

    def _unit(self, *, may_hold: bool) -> Iterator[Entry]:
        if self.rng.random() < 0.65:
            yield from self._stream_batch()
            return
        job = self._job()
        yield self._trained(job.groups.pop(0))
        if may_hold and self.rng.random() < 0.3:
            job.held = self.rng.randint(1, 3)
            self.open.append(job)
            yield from self._unit(may_hold=False)
        else:
            self.open.append(job)
            yield from self._finish(job)

    def _stream_batch(self) -> Iterator[Entry]:
        places = self.learner.settings.batch.groups_per_step
        for place in range(places):
            if self.rng.random() < 0.25:
                yield from self._noise()
            group = self._group()
            if self.left and self.rng.random() < 0.1:
                group.group_id = self.left.pop(self.rng.randrange(len(self.left)))  # it left the window: new again
            if place + 1 == places:
                self.done += 1
            yield self._trained(group, unit=self.done if place + 1 == places else None)

    def _job(self) -> _Job:
        job_id = str(UUID(int=self.rng.getrandbits(128), version=4))
        sft = self.rng.random() < 0.2
        members = [self._group(job_id, sft=sft) for _ in range(self.rng.randint(1, 3))]
        record = TrainingJob(
            job_id=job_id,
            group_ids=tuple(str(group.group_id) for group in members),
            kind="sft" if sft else "rl",
            config=None if sft or self.rng.random() < 0.5 else TrainConfig(learning_rate=5e-4, loss_fn="ppo"),
            sft=SftConfig(learning_rate=1e-3, batch_size=2, epochs=2) if sft else None,
            created_at=_LONG_AGO,
        )
        entry = self._entry(orjson.dumps(record.model_dump(mode="json")), JOB, headers=(("ce_type", type_of(TrainingJob).encode()),))
        return _Job(job_id=job_id, groups=members, record=entry)

    def _finish(self, job: _Job) -> Iterator[Entry]:
        self.open.remove(job)
        self.done += 1
        self.ended.append(job)
        if not job.groups or self.rng.random() < 0.7:
            for group in job.groups:
                yield self._trained(group)
            yield replace(job.record, unit=self.done)
            return
        # A producer that does not wait for its groups: the record, then the last of them.
        *others, last = job.groups
        for group in others:
            yield self._trained(group)
        yield job.record
        yield self._trained(last, unit=self.done)

    def _noise(self) -> Iterator[Entry]:
        """What must not train: nothing, one or two records."""
        kinds = [
            self._duplicate,
            self._unreadable,
            self._no_tokens,
            self._foreign,
            self._unknown_version,
            self._stale,
            self._equal_rewards,
            self._late,
            self._repeated_record,
            self._foreign_payload,
        ]
        for _ in range(self.rng.choice((0, 0, 1, 2))):
            entry = self.rng.choice(kinds)()
            if entry is not None:
                yield entry

    def _duplicate(self) -> Entry | None:
        if not self.window:
            return None
        group = self._group()
        group.group_id = self.rng.choice(list(self.window))
        return self._of(group, RejectionReason.DUPLICATE)

    def _unreadable(self) -> Entry:
        name = self._name()
        bodies: list[tuple[bytes | None, str, DeadLetterReason]] = [
            (f"not json {name}".encode(), "headrace.trajectory-group.v1", DeadLetterReason.NOT_JSON),
            (None, "headrace.trajectory-group.v1", DeadLetterReason.NOT_JSON),
            (orjson.dumps({"trajectories": name}), "headrace.trajectory-group.v1", DeadLetterReason.INVALID_SCHEMA),
            (orjson.dumps({"trajectories": []}), "headrace.trajectory-group.v9", DeadLetterReason.UNSUPPORTED_VERSION),
            (orjson.dumps({"trajectories": []}), "headrace.tea-pot.v1", DeadLetterReason.UNKNOWN_TYPE),
        ]
        value, kind, reason = self.rng.choice(bodies)
        return self._entry(value, reason, headers=(("ce_type", kind.encode()),))

    def _no_tokens(self) -> Entry:
        group = TrajectoryGroup(trajectories=[Trajectory(reward=1.0), Trajectory(reward=0.0)], group_id=self._name())
        return self._of(group, RejectionReason.NO_TRAINABLE_TOKENS)

    def _foreign(self) -> Entry:
        group = self._group()
        entry = self._entry(encode_json(sampled(group)), DeadLetterReason.MISSING_KEY)
        match self.rng.randrange(3):
            case 0:
                return replace(entry, key=None)
            case 1:
                return replace(entry, expected=DeadLetterReason.WRONG_LANE, partition=1 - self.learner.lane)
            case _:
                name = next(n for i in range(1000) if lane_of(n := f"nobody-{self.made}-{i}", LANES) == self.learner.lane)
                return replace(entry, expected=DeadLetterReason.UNKNOWN_MODEL, key=name.encode())

    def _unknown_version(self) -> Entry:
        return self._admitted(self._group(version=self.done + 1000), RejectionReason.UNKNOWN_POLICY_VERSION)

    def _stale(self) -> Entry | None:
        if self.learner.settings.max_policy_lag is None or self.done <= 2 * MAX_LAG:
            return None
        return self._admitted(self._group(version=self.done - 2 * MAX_LAG), RejectionReason.STALE)

    def _equal_rewards(self) -> Entry | None:
        if self.learner.settings.batch.zero_variance == "count":
            return None
        group = self._group()
        for trajectory in group.trajectories:
            trajectory.reward = 0.5
        return self._of(group, RejectionReason.ZERO_VARIANCE)

    def _late(self) -> Entry | None:
        if not self.ended:
            return None
        return self._of(self._group(self.rng.choice(self.ended[-5:]).job_id), RejectionReason.JOB_CLOSED)

    def _repeated_record(self) -> Entry | None:
        if not self.ended:
            return None
        return self.rng.choice(self.ended[-5:]).record

    def _foreign_payload(self) -> Entry:
        where = {"uri": "file:///outside-of-the-store", "sha256": "0" * 64, "size": 9, "raw_size": 9, "content_type": JSON_TYPE}
        value = orjson.dumps(where | {"group_id": self._name()})
        return self._entry(value, RejectionReason.PAYLOAD_UNREADABLE, headers=(("ce_type", type_of(GroupClaim).encode()),))

    def _trained(self, group: TrajectoryGroup, unit: int | None = None) -> Entry:
        return replace(self._admitted(group, TRAINED), unit=unit)

    def _admitted(self, group: TrajectoryGroup, expected: str) -> Entry:
        """A record whose id enters the window, whatever the cut says of it."""
        if len(self.window) == WINDOW:
            self.left.append(self.window[0])
        self.window.append(str(group.group_id))
        return self._of(group, expected)

    def _of(self, group: TrajectoryGroup, expected: str) -> Entry:
        in_arrays = self.rng.random() < 0.5
        body = (encode_safetensors if in_arrays else encode_json)(sampled(group))
        content_type = SAFETENSORS_TYPE if in_arrays else JSON_TYPE
        claimed = ClaimIds(group_id=str(group.group_id), job_id=group.job_id) if self.rng.random() < 0.15 else None
        return replace(self._entry(body, expected, headers=(("content-type", content_type.encode()),)), claimed=claimed)

    def _entry(self, value: bytes | None, expected: str, *, headers: tuple[tuple[str, bytes], ...] = ()) -> Entry:
        return Entry(
            learner=self.learner.name,
            key=self.learner.model_id.encode(),
            value=value,
            partition=self.learner.lane,
            expected=expected,
            headers=headers,
        )

    def _group(self, job_id: str | None = None, *, sft: bool = False, version: int | None = None) -> TrajectoryGroup:
        """A group that can train: two to four rollouts, the first right and the last wrong; some have a member that can't."""
        if version is None:
            version = self.rng.randint(max(0, self.done - 2), self.done)
        count = self.rng.randint(2, 4)
        rewards = [1.0, *(round(self.rng.random(), 3) for _ in range(count - 2)), 0.0]
        trajectories = [self._trajectory(reward, version) for reward in rewards]
        if not sft and self.rng.random() < 0.1:
            bad = self._trajectory(0.5, version)
            bad.messages_and_choices[1].token_ids = [99, 1]  # the tiny model has 32 tokens
            bad.messages_and_choices[1].token_logprobs = [-1.0, -1.0]
            trajectories.append(bad)
        purpose = "sft" if sft else None
        return TrajectoryGroup(trajectories=trajectories, group_id=self._name(), job_id=job_id, purpose=purpose)

    def _trajectory(self, reward: float, version: int) -> Trajectory:
        tokens = [self.rng.randint(7, 31) for _ in range(self.rng.randint(2, 6))] + [1]
        choice = Choice(
            finish_reason="stop",
            message=ChoiceMessage(content="a"),
            token_ids=tokens,
            token_logprobs=[round(-0.2 - 3 * self.rng.random(), 4) for _ in tokens],
            prompt_token_ids=[2, self.rng.randint(7, 31), 8, 1, 3],
        )
        return Trajectory(
            messages_and_choices=[Message(role="user", content="a b"), choice],
            reward=reward,
            initial_policy_version=version,
            final_policy_version=version,
        )

    def _name(self) -> str:
        self.made += 1
        return f"{self.learner.name}-g{self.made}"
