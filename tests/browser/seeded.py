"""A log as a worker, an engine and a client would have left it, for pages to show: two models, one of them with steps, jobs and engines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
from aiokafka import AIOKafkaProducer
from pydantic import BaseModel
from safetensors.numpy import save
from tests.core.ledgers import BEGAN, digest, record, store_report, write

from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.models import model_id_of
from headrace.core.reports import LAYOUT
from headrace.core.settings import Settings
from headrace.core.store import open_store
from headrace.schemas.chat import Choice, ChoiceMessage, Message, Tool, ToolCall, ToolCallFunction, ToolFunction
from headrace.schemas.envelope import seal
from headrace.schemas.events import GroupRejected, StepCompleted
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import ModelState, ReportedGroup, ReportedTrajectory, StepRecord, StepReport
from headrace.schemas.training import ModelSettings
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup
from headrace.schemas.weights import WeightsApplied, WeightsFailed

AGENT, OTHER = model_id_of("default", "default", "shop-agent"), model_id_of("rival", "default", "hidden-agent")
STEPS = 60
SCRIPT = '<script>document.body.dataset.hacked = "yes"</script><img src="x" onerror="document.body.dataset.hacked=\'yes\'">'
WORDS = ["<pad>", "<end>", "<user>", "<assistant>", "<tool>", "<unk>", "what", "is", "the", "secret", "it", "cat", "dog", "fish"]
PROMPT, RIGHT, WRONG = [2, 6, 7, 8, 9, 1, 3], [8, 9, 7, 11, 1], [8, 9, 7, 12, 1]
ADVANTAGES, RATIOS = (0.75, -0.75), (1.0, 1.25, 0.5, 2.0, 1.0)


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of one word a token, as a base model's folder has it."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - only where pages decode

    folder.mkdir(parents=True, exist_ok=True)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))  # noqa: S106 - a token, no secret
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class Seeded:
    """What was written, and how to write more."""

    settings: Settings
    scratch: Path
    lane: int
    groups: dict[str, int]
    """Offsets of the groups by id."""
    version: int = STEPS

    async def step(self, **metrics: float) -> None:
        """One more step, as a worker commits it."""
        self.version += 1
        made = _step(self.version, self.lane, {**_metrics(self.version), **metrics})
        done = StepCompleted(
            model_id=AGENT, incarnation="i", step=made.step, policy_version=made.step, groups=2, trajectories=4, tokens=96,
            metrics=made.metrics, seconds=1.0,
        )  # fmt: skip
        await write(self.settings, [made, _state(AGENT, "shop-agent", version=self.version), done], key=AGENT)

    async def touch_other(self) -> None:
        """Something about the other account's model."""
        await write(self.settings, [_state(OTHER, "hidden-agent", version=0, account="rival")], key=OTHER)

    async def job(self, job_id: str, state: JobState, **more: object) -> None:
        """A job's document."""
        await _put(self.settings, self.settings.topic_names.jobs, job_id, [_job(job_id, state, **more)])


async def seed(settings: Settings, scratch: Path) -> Seeded:
    """Write it all; the topics exist."""
    store = open_store(settings.store.url, settings.s3)
    lane = lane_of(AGENT, settings.topics.partitions)
    groups = [_group("greeting"), _group("<b>odd</b> & id", said=SCRIPT)]
    offsets = dict(zip([str(group.group_id) for group in groups], await write(settings, groups, key=AGENT, source="agent-1"), strict=True))
    steps = []
    for number in range(1, STEPS + 1):
        kept = {STEPS: "all", STEPS - 1: "none"}.get(number)
        ref = None
        if kept is not None:
            report = StepReport(
                model_id=AGENT, incarnation="i", step=number, attempt=f"attempt-{number}", lane=lane,
                groups=tuple(_reported(name, offset) for name, offset in offsets.items()), timings={"step": 0.75}, rows=kept,
            )  # fmt: skip
            ref = store_report(store, report, scratch, rows=_rows(list(offsets)) if kept == "all" else None)
        steps.append(_step(number, lane, _metrics(number), report=ref, offsets=list(offsets.values())))
    refused = GroupRejected(
        model_id=AGENT, group_id="old-group", reason=RejectionReason.STALE, detail="9 versions old", partition=lane, offset=900,
    )  # fmt: skip
    await write(settings, [*steps, _state(AGENT, "shop-agent", version=STEPS), refused], key=AGENT)
    await write(settings, [_state(OTHER, "hidden-agent", version=0, account="rival")], key=OTHER)
    await _put(settings, settings.topic_names.weight_acks, "engine-a", [_ack(version, 0.8) for version in range(1, STEPS + 1)])
    failed = WeightsFailed(
        engine_id="engine-b", model_id=AGENT, incarnation="i", policy_version=40, digest=digest("w"), error="no space left on device",
        failed_at=BEGAN + timedelta(seconds=41),
    )  # fmt: skip
    late = [_ack(version, 4, "engine-b") for version in range(5, STEPS - 8, 7) if version != 40]
    await _put(settings, settings.topic_names.weight_acks, "engine-b", [*late, failed])
    seeded = Seeded(settings, scratch, lane, offsets)
    await seeded.job("job-done", JobState.COMPLETED, step=STEPS, started_at=BEGAN, completed_at=BEGAN + timedelta(seconds=30))
    await seeded.job("job-failed", JobState.FAILED, error_message="group greeting can't be tokenized: <i>no</i> template")
    await seeded.job("job-waits", JobState.PENDING, waiting_for="a worker with 2 machines")
    return seeded


def _metrics(step: int) -> dict[str, float]:
    part = step / STEPS
    lags = {"0": 600.0 * part, "1": 250.0, "2": 120.0 * (1 - part) + 1, "16_up": 3.0}
    return {
        "reward_mean": 0.2 + 0.7 * part + 0.05 * math.sin(step),
        "loss": 0.02 * math.cos(step) - 0.01 * part,
        "kl_behaviour": 0.001 * (1 + math.sin(step / 3)),
        "grad_norm": 1.0,
        "tokens": 974.0,
        **{f"lag_tokens_{lag}": count for lag, count in lags.items()},
        **{f"ratio_mean_lag_{lag}": 1.01 for lag in lags},
    }


def _step(number: int, lane: int, metrics: Mapping[str, float], **more: object) -> StepRecord:
    refusals = {RejectionReason.ZERO_VARIANCE: 2} if number % 10 == 0 else {}
    return record(number, model_id=AGENT, incarnation="i", lane=lane, metrics=metrics, refusals=refusals, **more)  # type: ignore[arg-type]


def _state(model_id: str, name: str, *, version: int, account: str = "default") -> ModelState:
    return ModelState(
        model_id=model_id, incarnation="i", account=account, project="default", name=name, worker_group="default",
        settings=ModelSettings(base_model="tiny"), policy_version=version, scanned=0, groups_trained=2 * version, created_at=BEGAN,
        refusals={RejectionReason.ZERO_VARIANCE: 12, RejectionReason.STALE: 5}, trajectory_refusals={RejectionReason.TOO_LONG: 3},
    )  # fmt: skip


def _job(job_id: str, state: JobState, **more: object) -> JobDocument:
    return JobDocument.model_validate(
        {"job_id": job_id, "model_id": AGENT, "state": state, "created_at": BEGAN, "updated_at": BEGAN, "num_groups": 2, **more}
    )


def _ack(version: int, after: float, engine: str = "engine-a") -> WeightsApplied:
    return WeightsApplied(
        engine_id=engine, model_id=AGENT, incarnation="i", policy_version=version, digest=digest("w"), seconds=0.4,
        applied_at=BEGAN + timedelta(seconds=version + after),
    )  # fmt: skip


def _group(group_id: str, said: str = "what is the secret") -> TrajectoryGroup:
    return TrajectoryGroup(trajectories=[_trajectory(said, RIGHT, 1.0), _trajectory(said, WRONG, 0.0)], group_id=group_id)


def _trajectory(said: str, tokens: list[int], reward: float) -> Trajectory:
    call = ToolCall(id="call-1", function=ToolCallFunction(name="look_up", arguments='{"key": "secret"}'))
    return Trajectory(
        messages_and_choices=[
            Message(role="system", content="You answer in one word."),
            Message(role="user", content=said),
            Message(role="assistant", content=None, tool_calls=[call]),
            Message(role="tool", content=f"the secret is {said}", tool_call_id="call-1"),
            Choice(
                finish_reason="stop",
                message=ChoiceMessage(content=" ".join(WORDS[token] for token in tokens[:-1])),
                token_ids=tokens,
                token_logprobs=[-0.5] * len(tokens),
                prompt_token_ids=PROMPT,
            ),
        ],
        tools=[Tool(function=ToolFunction(name="look_up", description="Looks a key up."))],
        reward=reward,
        initial_policy_version=STEPS - 1,
        final_policy_version=STEPS - 1,
        metadata={"task": said},
        logs=[f"said {said}"],
    )


def _reported(group_id: str, offset: int) -> ReportedGroup:
    members = tuple(
        ReportedTrajectory(
            index=i, reward=1.0 - i, advantage=ADVANTAGES[i], tokens=12, trainable_tokens=5, initial_policy_version=STEPS - 1,
            final_policy_version=STEPS - 1,
        )
        for i in range(2)
    )  # fmt: skip
    return ReportedGroup(group_id=group_id, offset=offset, producer="agent-1", trajectories=members)


def _rows(groups: Sequence[str]) -> bytes:
    """One row with every trajectory of the groups, laid out as `headrace.trainer.rows_out` says."""
    owners = [(g, t) for g in range(len(groups)) for t in range(2)]
    sequences = [PROMPT + (RIGHT if t == 0 else WRONG) for _, t in owners]
    trainable = np.array(([False] * len(PROMPT) + [True] * len(RIGHT)) * len(owners))

    def trained(values: Sequence[float], factors: Sequence[float] = (1, 1)) -> npt.NDArray[np.float32]:
        """Of each sequence: nothing for the prompt, then the values, by a factor for each of the two trajectories."""
        return np.array([each for _, t in owners for each in (*[math.nan] * len(PROMPT), *(factors[t] * v for v in values))], np.float32)

    lengths = [len(each) for each in sequences]
    arrays = {
        "row_numbers": np.array([0], np.int32),
        "row_updates": np.array([0], np.int32),
        "row_sequences": np.array([0, len(owners)]),
        "sequence_groups": np.array([g for g, _ in owners], np.int32),
        "sequence_trajectories": np.array([t for _, t in owners], np.int32),
        "sequence_parts": np.zeros(len(owners), np.int32),
        "sequence_tokens": np.cumsum([0, *lengths]),
        "token_ids": np.concatenate([np.array(each, np.int32) for each in sequences]),
        "trainable": trainable,
        "lags": np.where(trainable, 1, -1).astype(np.int32),
        "advantages": trained([1.0] * len(RIGHT), ADVANTAGES),
        "ratios": trained(RATIOS),
        "weights": trained([0.1] * len(RIGHT)),
        "behaviour_logprobs": trained([-0.5] * len(RIGHT)),
        "old_logprobs": trained([-0.5] * len(RIGHT)),
        "new_logprobs": trained([-0.5 + math.log(ratio) for ratio in RATIOS]),
    }
    return bytes(save(arrays, {"layout": LAYOUT, "rows": "1", "groups": orjson.dumps(list(groups)).decode()}))


async def _put(settings: Settings, topic: str, key: str, records: Sequence[BaseModel]) -> None:
    producer = AIOKafkaProducer(**client_options(settings.kafka, "test"))
    await producer.start()
    try:
        for each in records:
            value, headers = seal(each, source="test")
            await producer.send_and_wait(topic, value, key=key.encode(), headers=headers)
    finally:
        await producer.stop()
