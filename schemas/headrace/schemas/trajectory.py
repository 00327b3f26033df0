"""Trajectories and the groups they are compared in.

Fields are those of the training-jobs API; Headrace adds to a group `group_id` (dedupe and lineage), `job_id` (the bucket), `purpose`, and
the one option of its job that it is read by. The model a group trains is the record's key, not a field. Shapes: rewards are any finite
float, compared within a group only.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal

from pydantic import Field, model_validator

from headrace.schemas.base import Open
from headrace.schemas.chat import Choice, MessageOrChoice, Tool
from headrace.schemas.exchanges import Exchanges

MetricValue = float | int | bool
MetadataValue = Any
"""Any JSON: clients nest objects and lists."""


NO_REWARD = "reward is missing: a trajectory that is compared with others needs one (0.0 where it earned nothing)"


class History(Open):
    """One more token history of a trajectory: a context that was compacted or branched off."""

    messages_and_choices: list[MessageOrChoice]
    tools: list[Tool] | None = None


class Trajectory(Open):
    """One rollout: what was said, what it was worth, which policy versions said it."""

    messages_and_choices: list[MessageOrChoice] = Field(default_factory=list)
    tools: list[Tool] | None = None
    additional_histories: list[History] = Field(default_factory=list)
    reward: float = 0.0
    """Required, but for the trajectories of an `sft` group: 0.0 is a reward, and no reward is none."""
    initial_policy_version: int | None = Field(default=None, ge=0)
    final_policy_version: int | None = Field(default=None, ge=0)
    metrics: dict[str, MetricValue] = Field(default_factory=dict)
    metadata: dict[str, MetadataValue] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)
    start_time: datetime | None = None
    exchanges: Exchanges | None = None
    """Captured calls, instead of hand-built histories; who reads a group reads them as histories (`headrace.schemas.captured`)."""
    unread: str | None = None
    """Written by the reading of `exchanges`: which call's tokens are not known. Without them the trajectory trains only as text."""

    def check_last_turn(self) -> None:
        """Raise ValueError where `keep_last_turn` would leave nothing to train: a history does not end with the assistant."""
        if any(not items or not _is_spoken(items[-1]) for items, _tools in self.histories()):
            raise ValueError("assistant_turns is 'last', but the last message is not the assistant's")

    def keep_last_turn(self) -> None:
        """Let only the last item of each history train, as supervised fine-tuning with `assistant_turns` "last" does."""
        self.check_last_turn()
        for items, _tools in self.histories():
            items[:-1] = [item.model_copy(update={"weight": 0}) if _is_spoken(item) else item for item in items[:-1]]

    def histories(self) -> Iterator[tuple[list[MessageOrChoice], list[Tool] | None]]:
        """The main history, then each additional one, as (items, tools)."""
        yield self.messages_and_choices, self.tools
        for history in self.additional_histories:
            yield history.messages_and_choices, history.tools


def _is_spoken(item: MessageOrChoice) -> bool:
    return isinstance(item, Choice) or item.role == "assistant"


class RolloutException(Open):
    """A rollout that failed: it counts in the metrics, never in the advantages."""

    type: str
    message: str = ""
    traceback: str | None = None


class TrajectoryGroup(Open):
    """Trajectories of one task whose rewards are compared with each other.

    `group_id` may be left out by a producer in another language: the lane then names it `<partition>-<offset>`.
    `job_id` puts the group into that job's bucket; without it the group belongs to the stream.
    `purpose` says what its trajectories are for, because a group is read before the job that names it: `sft` groups are examples to
    imitate (every assistant turn trains, rewards and versions do not matter) and need a job of kind `sft`; null is `rl`.
    `allow_training_without_logprobs` is that option of its job, for the same reason; null is the model's own setting.
    """

    trajectories: list[Trajectory]
    exceptions: list[RolloutException] = Field(default_factory=list)
    metadata: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, MetricValue] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)
    group_id: str | None = Field(default=None, min_length=1, max_length=256)
    job_id: str | None = Field(default=None, min_length=1, max_length=256)
    purpose: Literal["rl", "sft"] | None = None
    allow_training_without_logprobs: bool | None = None

    def without_reward(self) -> list[int]:
        """The members whose reward was left out and is needed; none of examples to imitate."""
        members = () if self.purpose == "sft" else self.trajectories
        return [i for i, trajectory in enumerate(members) if "reward" not in trajectory.model_fields_set]

    @model_validator(mode="before")
    @classmethod
    def _failed_alone(cls, value: Any) -> Any:  # noqa: ANN401 - raw JSON
        """Clients that leave out what is empty send a group of failed rollouts without `trajectories`."""
        if isinstance(value, dict) and value.get("exceptions") and "trajectories" not in value:
            return {**value, "trajectories": []}
        return value

    def choices(self) -> Iterator[Choice]:
        """Every sampled turn in wire order: by trajectory, by history, by item. The flat arrays follow this order."""
        for trajectory in self.trajectories:
            for items, _tools in trajectory.histories():
                yield from (item for item in items if isinstance(item, Choice))
