"""A ledger as a worker would have left it: two models, a fork, reports, a group that waits, one refused, an incarnation that has ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save
from tests.core.ledgers import record, store_report, write

from headrace.core.lanes import lane_of
from headrace.core.models import model_id_of
from headrace.core.settings import Settings
from headrace.core.store.files import FileStore
from headrace.core.topic_admin import apply
from headrace.schemas.events import GroupRejected, TrajectoryRejected
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import (
    ModelState,
    Pending,
    ReportedGroup,
    ReportedTrajectory,
    StartFrom,
    StepRecord,
    StepReport,
    TrainingScalars,
)
from headrace.schemas.training import ModelSettings, TrainConfig
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup
from headrace.schemas.weights import WeightsRef

SOLVER, SECOND, FORK = (model_id_of("default", "default", name) for name in ("solver", "second", "fork"))
METRICS = {"tokens": 96.0, "reward_mean": 0.5, "lag_mean": 0.25, "ratio_mean": 1.5, "seconds_pack": 0.25, "seconds_update": 0.5}


@dataclass(frozen=True, slots=True)
class Recorded:
    environment: dict[str, str]
    """For `headrace(…)`."""
    offsets: dict[str, int]
    """Of groups, by id, in `trajectory-groups`."""
    store: FileStore
    steps: tuple[StepRecord, ...]
    """Of solver, as they were written."""


async def write_recorded(settings: Settings, scratch: Path) -> Recorded:
    """Write it all."""
    await apply(settings)
    store = FileStore(scratch / "store")
    ids = ["g1", "g2", "g3", "waits", "refused"]
    offsets = dict(zip(ids, await write(settings, [_group(name) for name in ids], key=SOLVER, source="agent-1"), strict=True))
    offsets["late"] = (await write(settings, [_group("late")], key=SOLVER, source="agent-1"))[0]
    lane = lane_of(SOLVER, settings.topics.partitions)
    stale = GroupRejected(
        model_id=SOLVER,
        group_id="refused",
        reason=RejectionReason.STALE,
        detail="9 versions old",
        partition=lane,
        offset=offsets["refused"],
    )
    long = TrajectoryRejected(
        model_id=SOLVER,
        group_id="g3",
        reason=RejectionReason.TOO_LONG,
        detail="9,000 tokens",
        trajectory=2,
        partition=lane,
        offset=offsets["g3"],
    )

    def step(number: int, group_id: str, *, report: bool = True, **more: object) -> StepRecord:
        ref = None
        if report:
            listed = {"refused": (stale,), "refused_trajectories": (long,), "refused_unlisted": 3} if number == 3 else {}
            kept = StepReport(
                model_id=SOLVER,
                incarnation="new",
                step=number,
                attempt=f"attempt-{number}",
                lane=lane,
                groups=(_reported(group_id, offsets[group_id]),),
                timings={"step": 0.75, "store": 0.0625},
                rows="sample" if number == 2 else "none",
            ).model_copy(update=listed)
            ref = store_report(store, kept, scratch, rows=_rows() if number == 2 else None)
        return record(
            number, model_id=SOLVER, incarnation="new", lane=lane, offsets=[offsets[group_id]], report=ref, metrics=METRICS, **more
        )

    steps = (
        step(1, "g1", report=False, snapshot=True),
        step(2, "g2", loss=0.25),
        step(
            3,
            "g3",
            cut="job",
            job_id="job-7",
            config=TrainConfig(learning_rate=1e-4, ppo=True),
            refusals={RejectionReason.STALE: 1},
            trajectory_refusals={RejectionReason.TOO_LONG: 1},
            loss=-0.125,
        ),
    )
    ended = [record(number, model_id=SOLVER, incarnation="old") for number in (1, 2)]
    pending = (Pending(offset=offsets["waits"]),)
    solver = _state(SOLVER, "solver", version=3, scanned=offsets["late"], pending=pending)
    # The refusal stands in a report; this one does not.
    only_event = stale.model_copy(update={"group_id": "refused-late", "offset": 900})
    await write(settings, [*ended, *steps, solver, only_event], key=SOLVER)
    second = [
        record(1, model_id=SECOND, incarnation="s", metrics=METRICS, weights="other 1"),
        record(2, model_id=SECOND, incarnation="s", metrics={**METRICS, "reward_mean": 0.75}, loss=0.5, weights="other 2"),
    ]
    learning_rate = {"train": {"learning_rate": 3e-5}, "lora": {"r": 4}}
    await write(settings, [*second, _state(SECOND, "second", version=2, settings=learning_rate)], key=SECOND)
    origin = StartFrom(
        snapshot=WeightsRef(uri="file:///store/forks/f/snapshot", digest="0" * 64),
        scalars=TrainingScalars(updates=2),
        forked_from=SOLVER,
        incarnation="new",
        step=2,
        attempt="attempt-2",
    )
    fork = record(1, model_id=FORK, incarnation="s", cut="forked", updates=0, loss=None).model_copy(update={"forked": origin})
    await write(settings, [fork, _state(FORK, "fork", version=1)], key=FORK)
    environment = {
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": str(settings.kafka.bootstrap_servers),
        "HEADRACE_TOPICS__PREFIX": settings.topics.prefix,
        "HEADRACE_TOPICS__PARTITIONS": str(settings.topics.partitions),
        "HEADRACE_STORE__URL": f"file://{scratch}/store",
    }
    return Recorded(environment, offsets, store, steps)


def _rows() -> bytes:
    """Two rows of five, as `headrace.trainer.rows_out` lays them out: of three sequences, with 40 trained tokens in the last one."""
    lengths, trained = (3, 2, 41), ([1, 2], [1], [*range(1, 41)])
    trainable = np.concatenate([np.isin(np.arange(n), at) for n, at in zip(lengths, trained, strict=True)])
    tokens = len(trainable)

    def only_trained(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.where(trainable, values, np.nan).astype(np.float32)

    arrays: dict[str, npt.NDArray[Any]] = {
        "row_numbers": np.array([0, 3], np.int32),
        "row_updates": np.array([0, 1], np.int32),
        "row_micro_steps": np.array([0, 1], np.int32),
        "row_ranks": np.array([0, 1], np.int32),
        "row_columns": np.array([0, 4, 45]),
        "row_segments": np.array([0, 2, 3]),
        "row_sequences": np.array([0, 2, 3]),
        "sequence_groups": np.array([0, 0, 1], np.int32),
        "sequence_trajectories": np.array([0, 4, 1], np.int32),
        "sequence_parts": np.array([0, 1, 0], np.int32),
        "sequence_tokens": np.array([0, 3, 5, tokens]),
        "token_ids": np.arange(100, 100 + tokens, dtype=np.int32),
        "position_ids": np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        "trainable": trainable,
        "predictors": np.where(trainable, 0, -1).astype(np.int32),
        "lags": np.where(trainable, 2, -1).astype(np.int32),
        "advantages": only_trained(np.full(tokens, 0.5)),
        "weights": only_trained(np.full(tokens, 0.25)),
        "ratios": only_trained(np.linspace(1, 2, tokens)),
        "behaviour_logprobs": np.full(tokens, np.nan, np.float32),
        "old_logprobs": only_trained(np.full(tokens, -1.5)),
        "new_logprobs": only_trained(np.full(tokens, -1.25)),
    }
    metadata = {"layout": "headrace.rows.v1", "rows": "5", "groups": '["g2", "other"]'}
    return bytes(save(arrays, metadata))


def _group(group_id: str) -> TrajectoryGroup:
    return TrajectoryGroup(trajectories=[Trajectory(messages_and_choices=[], reward=1.0)], group_id=group_id)


def _reported(group_id: str, offset: int) -> ReportedGroup:
    trajectories = tuple(
        ReportedTrajectory(
            index=i, reward=float(i), advantage=i - 0.5, tokens=40 + i, trainable_tokens=8, initial_policy_version=0, final_policy_version=0
        )
        for i in range(2)
    )
    return ReportedGroup(group_id=group_id, offset=offset, producer="agent-1", trajectories=trajectories)


def _state(
    model_id: str,
    name: str,
    *,
    version: int,
    scanned: int = 0,
    pending: Sequence[Pending] = (),
    settings: dict[str, object] | None = None,
) -> ModelState:
    return ModelState(
        model_id=model_id,
        incarnation="new" if name == "solver" else "s",
        account="default",
        project="default",
        name=name,
        worker_group="default",
        settings=ModelSettings.model_validate({"base_model": "tiny", **(settings or {})}),
        policy_version=version,
        scanned=scanned,
        pending=tuple(pending),
    )
