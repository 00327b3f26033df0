"""Metrics of RLOR jobs with `wandbConfig.enabled`, written to a Weights & Biases run. Needs the extra `wandb`.

All gateways follow the step ledger as one consumer group, so one of them writes each step. A job has one run, `wandbConfig.runId` or
`<job>-<8 hex>`; a run that the service knows is resumed. The run's address goes into the log, so that every gateway shows it
(`wandbConfig.url`). With `WANDB_MODE=offline` in the gateway's environment, runs stay in `gateway.wandb_dir`.
Guarantees: a step is written after its commit, in order; when a gateway ends, another one continues from its last written step. A fault of
one job is shown in its `status`, its run is tried again after `_FAULT_SECONDS`, and other jobs are not affected. A job without a key is not
tracked: the gateway's own key is never used. The job's key is given to wandb in memory, never in a file.
Limitations: not exactly once. After a crash a step may be written again; wandb ignores it, since it accepts steps in rising order only.
When the service does not answer, the run lacks metrics; the ledger has them all.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from aiokafka import AIOKafkaConsumer, ConsumerRecord
from aiokafka.errors import KafkaError

from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options
from headrace.core.kafka_outage import kafka_back, log_trouble
from headrace.core.kept import kept_or_none
from headrace.core.polling import poll, readable
from headrace.core.processes import make_private_folder
from headrace.gateway.facts import write_fact
from headrace.gateway.gate import Gate
from headrace.gateway.rlor.job_fields import JobFields, WandbConfig
from headrace.gateway.rlor.job_status import FINISHED, job_from_record
from headrace.gateway.rlor.resources import records_under
from headrace.gateway.tokens import SecretBox
from headrace.schemas.rlor import RlorJob, RlorRun, rlor_run_key
from headrace.schemas.state import StepRecord

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

_KEY = "wandbConfig.apiKey"
_RETRY_SECONDS = 5.0
_FAULT_SECONDS = 300.0
_SERVICE_SECONDS = 30.0
"""For the service to answer when a run is opened; the runs of other jobs wait for it."""
NO_KEY = "it has no apiKey, and the gateway's own key is used for no job"


def can_track() -> bool:
    """Whether wandb is installed."""
    return find_spec("wandb") is not None


def is_offline() -> bool:
    """Whether runs stay in `gateway.wandb_dir`, without a key."""
    return os.environ.get("WANDB_MODE") == "offline"


@asynccontextmanager
async def tracking(gate: Gate) -> AsyncIterator[None]:
    """Track jobs inside the context, from the first job with `wandbConfig.enabled` on."""
    if not can_track():
        yield
        return
    tracker = _Tracker(gate)
    task = asyncio.create_task(tracker.run(), name="tracking")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(tracker.finish)


async def note_run(gate: Gate, job: RlorJob, url: str, fault: str | None = None) -> None:
    """Record the address of a job's run, or why there is none, for all gateways. Raises KafkaUnavailableError."""
    known = gate.view.tables.facts.get(rlor_run_key(job.account, job.id))
    before = known if isinstance(known, RlorRun) and known.nonce == job.nonce else None
    run = RlorRun(account=job.account, job=job.id, nonce=job.nonce, url=url or (before.url if before else ""), fault=fault)
    if (run.url, run.fault) != ((before.url, before.fault) if before else ("", None)):
        await write_fact(gate, run)


class _NotTrackedError(Exception):
    """A job cannot be tracked; the message has the reason."""


class _Tracker:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._runs: dict[str, wandb.Run] = {}
        """Open runs by model id."""
        self._tracked: dict[str, RlorJob] = {}
        self._notes: list[tuple[RlorJob, str, str | None]] = []
        """Addresses of runs, and faults, that are not recorded yet."""
        self._failed: dict[str, tuple[str, float]] = {}
        """By model id: the nonce of a job whose run failed, and the time of the next try."""

    async def run(self) -> None:
        view = self._gate.view
        while not any(_is_tracked(job) for job in self._jobs()):
            await view.news()
        settings = self._gate.settings
        options = client_options(settings.kafka, "headrace-gateway-tracking")
        group = f"{settings.topics.prefix.rstrip('.-_') or 'headrace'}-gateway-tracking"
        while True:
            consumer = AIOKafkaConsumer(
                settings.topic_names.steps,
                **options,
                group_id=group,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                isolation_level="read_committed",
            )
            try:
                await consumer.start()
                while True:
                    batches = await poll(consumer, timeout_ms=1000)
                    if batches:
                        await view.fresh()
                        await asyncio.to_thread(self._write, [record for records in batches.values() for record in readable(records)])
                        while self._notes:
                            await note_run(self._gate, *self._notes[0])
                            del self._notes[0]
                        await consumer.commit()
                    if finished := [
                        key for key, job in self._tracked.items() if job_from_record(view.tables, job).status.state in FINISHED
                    ]:
                        await asyncio.to_thread(self._close, finished)
            except (KafkaError, HeadraceError) as error:
                log_trouble(logger, logging.WARNING, error, "steps can't be tracked now: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
                await kafka_back()
            except Exception:  # the tracking of other jobs continues
                logger.exception("steps can't be tracked now")
                await asyncio.sleep(_RETRY_SECONDS)
            finally:
                with suppress(KafkaError):
                    await consumer.stop()

    def finish(self) -> None:
        """Close all runs; blocks until wandb has written them."""
        self._close([*self._runs])

    def _close(self, models: Iterable[str]) -> None:
        for model_id in models:
            job = self._tracked.pop(model_id, None)
            if (run := self._runs.pop(model_id, None)) is not None:
                try:
                    run.finish()
                except Exception as error:  # noqa: BLE001 - any fault is of this run only
                    logger.warning("the wandb run of job %s may lack its end: %s", job.id if job else model_id, _error_text(error))

    def _jobs(self) -> list[RlorJob]:
        return records_under(self._gate.view.tables, "rlor-job/", RlorJob)

    def _write(self, records: Iterable[ConsumerRecord]) -> None:
        jobs = {job.model_id: job for job in self._jobs() if _is_tracked(job)}
        for record in records:
            step = kept_or_none(record, (StepRecord,))
            job = jobs.get(step.model_id) if isinstance(step, StepRecord) else None
            if job is not None and isinstance(step, StepRecord) and step.committed_at >= job.created_at:
                self._log(job, step)

    def _log(self, job: RlorJob, step: StepRecord) -> None:
        nonce, next_try = self._failed.get(job.model_id, ("", 0.0))
        if nonce == job.nonce and time.monotonic() < next_try:
            return
        try:
            if job.model_id in self._tracked and self._tracked[job.model_id].nonce != job.nonce:
                self._close([job.model_id])
            if job.model_id not in self._runs:
                run = self._runs[job.model_id] = self._open(job)
                self._notes.append((job, "" if run.offline else run.url or "", None))
            self._tracked[job.model_id] = job
            self._runs[job.model_id].log({**step.metrics, "policy_version": step.policy_version_after}, step=step.step)
        except Exception as error:  # noqa: BLE001 - any fault is of this job only
            fault = f"wandbConfig: metrics are not written: {_error_text(error)}"
            logger.warning("step %d of job %s is not in its wandb run: %s", step.step, job.id, _error_text(error))
            self._failed[job.model_id] = (job.nonce, time.monotonic() + _FAULT_SECONDS)
            self._notes.append((job, "", fault))
            self._close([job.model_id])

    def _open(self, job: RlorJob) -> "wandb.Run":
        import wandb  # noqa: PLC0415 - an extra that few gateways have

        fields = JobFields.model_validate(job.request)
        config = fields.wandb_config or WandbConfig()
        gateway = self._gate.settings.gateway
        sealed = job.secrets.get(_KEY)
        if sealed is None and not is_offline():
            raise _NotTrackedError(NO_KEY)
        make_private_folder(gateway.wandb_dir)
        return wandb.init(
            entity=config.entity or None,
            project=config.project or "headrace",
            id=config.run_id or f"{job.id}-{job.nonce[:8]}",
            name="".join(char if char.isprintable() else " " for char in fields.display_name) or job.id,
            config=job.request,
            dir=str(gateway.wandb_dir),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                api_key=None if sealed is None else SecretBox(gateway.secrets_key).open(_KEY, sealed),
                init_timeout=_SERVICE_SECONDS,
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )


def _is_tracked(job: RlorJob) -> bool:
    config = job.request.get("wandbConfig")
    return isinstance(config, dict) and config.get("enabled") is True


def _error_text(error: Exception) -> str:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return "".join(char if char.isprintable() else "?" for char in text)
