"""The state of a demo run, read from Kafka alone: groups as they arrive, steps as they are committed, refusals.

Guarantees: numbers come from the log alone (`trajectory-groups` and `training-events` of the model's lane), not from inside a worker or an
agent; a record is counted once. Limitations: one model; each run has its own topic prefix.
"""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from headrace.core.kafka import client_options
from headrace.core.kept import kept_or_none
from headrace.core.polling import leave_out
from headrace.core.reading import follow
from headrace.core.settings import Settings
from headrace.schemas import topics
from headrace.schemas.base import Record
from headrace.schemas.carried import CARRIED
from headrace.schemas.codec import JSON_TYPE, SampledGroup, decode_group
from headrace.schemas.envelope import header_text
from headrace.schemas.events import GroupRejected, StepCompleted
from headrace.schemas.reasons import CodecError

ENDS = 10
"""Steps at each end whose mean reward is reported; a third of a short run."""


class Summary(Record):
    """What `--json` prints."""

    steps: int
    reward_first: float
    reward_last: float
    policy_version: int
    groups: int
    rejected: int
    max_lag: int
    seconds: float
    tokens_per_second: float


@dataclass(slots=True, kw_only=True)
class History:
    """The run so far. `wanted` steps end it."""

    wanted: int
    steps: list[StepCompleted] = field(default_factory=list)
    rejected: int = 0
    arrived: int = 0
    first: SampledGroup | None = None
    last: SampledGroup | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def trained(self) -> bool:
        """Whether all steps are committed."""
        return len(self.steps) >= self.wanted

    @property
    def served(self) -> bool:
        """Whether the policy of the last step has sampled: its weights went the whole way round."""
        return self.trained and self.last is not None and sampled_by(self.last) >= self.steps[self.wanted - 1].policy_version

    @property
    def queued(self) -> int:
        """Groups in the log that are neither trained on nor refused."""
        return max(0, self.arrived - self.rejected - sum(step.groups for step in self.steps))

    def note_group(self, group: SampledGroup) -> None:
        """A group arrived."""
        self.arrived += 1
        self.first = self.first or group
        self.last = group
        self.changed.set()

    def note_event(self, event: object) -> None:
        """An event arrived; a step that an agent saw come after the last wanted one is not counted."""
        if isinstance(event, StepCompleted) and not self.trained:
            self.steps.append(event)
        elif isinstance(event, GroupRejected):
            self.rejected += 1
        self.changed.set()

    def summary(self, seconds: float) -> Summary:
        """The numbers of the run; `seconds` is its wall time, start-up included."""
        rewards = [reward(step) for step in self.steps]
        ends = max(1, min(ENDS, len(rewards) // 3))
        return Summary(
            steps=len(self.steps),
            reward_first=round(fmean(rewards[:ends]), 4),
            reward_last=round(fmean(rewards[-ends:]), 4),
            policy_version=self.steps[-1].policy_version,
            groups=sum(step.groups for step in self.steps),
            rejected=self.rejected,
            max_lag=max((lag for step in self.steps for lag in step.lag_histogram), default=0),
            seconds=round(seconds, 1),
            tokens_per_second=round(self.tokens_per_second(len(self.steps)), 1),
        )

    def tokens_per_second(self, window: int) -> float:
        """Tokens trained on by wall time, between the first and the last commit of the last `window` steps."""
        steps = self.steps[-window:]
        if len(steps) == 1:
            return steps[0].tokens / max(steps[0].seconds, 1e-3)
        seconds = sum((after.completed_at - before.completed_at).total_seconds() for before, after in pairwise(steps))
        return sum(step.tokens for step in steps[1:]) / max(seconds, 1e-3)


def reward(step: StepCompleted) -> float:
    """Mean reward of the step's trajectories."""
    return step.metrics.get("reward_mean", 0.0)


def mean_lag(step: StepCompleted) -> float:
    """Mean over the step's trajectories, in policy versions."""
    count = sum(step.lag_histogram.values())
    return sum(lag * n for lag, n in step.lag_histogram.items()) / count if count else 0.0


def sampled_by(group: SampledGroup) -> int:
    """The oldest policy version that sampled in the group."""
    return min((t.initial_policy_version or 0 for t in group.group.trajectories), default=0)


async def follow_groups(settings: Settings, lane: int, history: History) -> None:
    """Count groups as they arrive; runs until it is cancelled."""
    options = client_options(settings.kafka, "headrace-demo")
    async with aclosing(follow(options, settings.topic_names.trajectory_groups, lane)) as batches:
        async for batch in batches:
            for record in batch:
                headers = header_text(record.headers)
                try:
                    history.note_group(decode_group(record.value or b"", headers.get("content-type", JSON_TYPE)))
                except CodecError as error:  # the lane dead-letters it
                    leave_out(record, str(error))


async def follow_events(settings: Settings, lane: int, history: History) -> None:
    """Note steps and refusals as they are committed; runs until it is cancelled."""
    options = client_options(settings.kafka, "headrace-demo")
    async with aclosing(follow(options, settings.topic_names.training_events, lane)) as batches:
        async for batch in batches:
            for record in batch:
                event = kept_or_none(record, CARRIED[topics.TRAINING_EVENTS])
                if event is not None:
                    history.note_event(event)
