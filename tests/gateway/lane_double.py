"""What a worker would write, without training: for tests of what the gateway makes of it."""

import uuid

from headrace.core.lanes import lane_of
from headrace.core.model_views import open_state
from headrace.gateway.gate import Gate
from headrace.gateway.log_writer import Sealed, sealed
from headrace.schemas.base import utc_now
from headrace.schemas.jobs import JobState
from headrace.schemas.state import Fingerprint, LaneState, ModelState, StepRecord
from headrace.schemas.topics import lane_key
from headrace.schemas.training import TrainConfig
from headrace.schemas.weights import WeightsRef

FINGERPRINT = Fingerprint(headrace="1", torch="2", transformers="5", deepspeed="0", python="3", device="cpu", world_size=1, threads=1)


class LaneDouble:
    """Writes as the owner of a model's lane does.

    Args:
        gate: Of a gateway that runs.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._topics = gate.settings.topic_names

    async def take_up(self, model_id: str, **changes: object) -> ModelState:
        """Read the commands of a lane up to this model's last one, and do what it says."""
        tables = await self._gate.view.fresh()
        view = tables.model(model_id)
        assert view is not None
        lane = lane_of(model_id, self._gate.view.lanes)
        owner = tables.states.get(lane_key(lane))
        known = open_state(owner) if owner is not None else None
        through = max(known.commands_through if isinstance(known, LaneState) else 0, view.command[1] + 1 if view.command else 0)
        before = view.state if view.state is not None and view.status != "creating" else None
        state = before or ModelState(
            model_id=model_id,
            incarnation=uuid.uuid4().hex,
            account=view.account,
            project=view.project,
            name=view.name,
            worker_group=view.worker_group,
            settings=view.settings,
            start_weights=view.start_weights,
            scanned=0,
        )
        if view.status == "deleting":
            changes = {"status": "deleted", **changes}
        state = state.model_copy(update={"updated_at": utc_now(), **changes})
        read = LaneState(lane=lane, commands_through=through, partitions=self._gate.view.lanes)
        await self._write(
            sealed(state, topic=self._topics.models, key=model_id, partition=lane),
            sealed(read, topic=self._topics.models, key=lane_key(lane), partition=lane),
        )
        return state

    async def move(self, job_id: str, state: JobState, **changes: object) -> None:
        """Write a job's document."""
        view = (await self._gate.view.fresh()).job(job_id)
        assert view is not None
        assert view.document is not None
        ended = {"completed_at": utc_now()} if state in {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED} else {}
        document = view.document.model_copy(update={"state": state, "updated_at": utc_now(), **ended, **changes})
        await self._write(sealed(document, topic=self._topics.jobs, key=job_id))

    async def train(self, job_id: str, identity: str | None = None, **changes: object) -> WeightsRef:
        """Commit a job's step; with an identity it has written a snapshot."""
        tables = await self._gate.view.fresh()
        view = tables.job(job_id)
        assert view is not None
        assert view.document is not None
        model = tables.model(view.model_id)
        assert model is not None
        assert model.state is not None
        step = model.state.policy_version + 1
        weights = WeightsRef(uri=f"file:///nowhere/{view.model_id}/{step}", digest="0" * 64)
        lane = lane_of(view.model_id, self._gate.view.lanes)
        record = StepRecord(
            model_id=view.model_id,
            incarnation=model.state.incarnation,
            step=step,
            attempt=uuid.uuid4().hex,
            policy_version_before=step - 1,
            policy_version_after=step,
            job_id=job_id,
            lane=lane,
            offsets=(),
            groups=1,
            cut="job",
            config=TrainConfig(),
            config_digest="",
            plan_digest="",
            seed=0,
            updates=1,
            loss=0.5,
            grad_norm=0.1,
            metrics={"loss": 0.5},
            weights=weights,
            options=view.document.options,
            hot_load_identity=identity,
            fingerprint=FINGERPRINT,
        )
        state = model.state.model_copy(update={"policy_version": step, "weights": weights, "updated_at": utc_now()})
        await self._write(
            sealed(record, topic=self._topics.steps, key=view.model_id, partition=lane),
            sealed(state, topic=self._topics.models, key=view.model_id, partition=lane),
        )
        await self.move(
            job_id,
            JobState.COMPLETED,
            step=step,
            metrics={"loss": 0.5},
            accelerator_seconds={"CPU": 1.5},
            hot_load_identity=identity,
            **changes,
        )
        return weights

    async def _write(self, *records: Sealed) -> None:
        await self._gate.writer.commit(records, is_in=lambda: True)
