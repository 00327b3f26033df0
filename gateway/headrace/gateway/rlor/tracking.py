"""Metrics of RLOR jobs that ask for it (`wandbConfig.enabled`), written to a Weights & Biases run. Needs the extra `wandb`.

All gateways follow the step ledger as one consumer group, so each step is written by one of them, and all steps of a job by the same one as
long as it runs. Guarantees: a step is written after its commit, in order; a gateway that ends is taken over from its last written step.
Whatever fails for one job is that job's: its `status` says it, its run is tried again after `_AGAIN_SECONDS`, and the others go on. A job
without a key of its own is not tracked: the gateway's own key, wherever it lies, is never used for it.
Limitations: not exactly once. After a crash a step may be written again, which wandb passes over, as it takes steps in rising order only; a
service that can't be reached costs metrics of the run, never a step: the ledger has them all.

One run a job, with the id `wandbConfig.runId` or `<job>-<8 hex>`; where it is known to the service it goes on. Its address is noted in the
log, so that every gateway shows it (`wandbConfig.url`). `WANDB_MODE=offline` in the gateway's environment writes to `gateway.wandb_dir`
only. The key is handed to wandb in memory, and stands in no file of its own.
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
from headrace.core.private_folder import make_private_folder
from headrace.gateway.facts import write_fact
from headrace.gateway.gate import Gate
from headrace.gateway.rlor.job_facts import job_of
from headrace.gateway.rlor.job_fields import JobFields, WandbConfig
from headrace.gateway.rlor.job_state import OVER
from headrace.gateway.secret_box import SecretBox
from headrace.schemas.rlor import RlorJob, RlorRun, rlor_run_key
from headrace.schemas.state import StepRecord

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

_KEY = "wandbConfig.apiKey"
_RETRY_SECONDS = 5.0
_AGAIN_SECONDS = 300.0
_SERVICE_SECONDS = 30.0
"""For the service to answer when a run is opened: the runs of other jobs wait meanwhile."""
NO_KEY = "it has no apiKey, and the gateway's own key is used for no job"


def can_track() -> bool:
    """Whether wandb is installed."""
    return find_spec("wandb") is not None


def is_offline() -> bool:
    """Whether runs stay in `gateway.wandb_dir`: they need no key."""
    return os.environ.get("WANDB_MODE") == "offline"


@asynccontextmanager
async def tracking(gate: Gate) -> AsyncIterator[None]:
    """Track meanwhile, once a job asks for it."""
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
    """Have every gateway show where a job's metrics are, or why they are nowhere. Raises KafkaUnavailableError."""
    known = gate.view.tables.facts.get(rlor_run_key(job.account, job.id))
    before = known if isinstance(known, RlorRun) and known.nonce == job.nonce else None
    run = RlorRun(account=job.account, job=job.id, nonce=job.nonce, url=url or (before.url if before else ""), fault=fault)
    if (run.url, run.fault) != ((before.url, before.fault) if before else ("", None)):
        await write_fact(gate, run)


class _NotTrackedError(Exception):
    """A job can't be tracked; says why."""


class _Tracker:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._runs: dict[str, wandb.Run] = {}
        """Open ones, by the id of the model."""
        self._of: dict[str, RlorJob] = {}
        self._news: list[tuple[RlorJob, str, str | None]] = []
        """What is to be noted: the address of a run, or a fault."""
        self._failed: dict[str, tuple[str, float]] = {}
        """Jobs whose run failed (nonce), by the id of the model, and when it is tried again."""

    async def run(self) -> None:
        view = self._gate.view
        while not any(_asks(job) for job in self._jobs()):
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
                        while self._news:
                            await note_run(self._gate, *self._news[0])
                            del self._news[0]
                        await consumer.commit()
                    if over := [key for key, job in self._of.items() if job_of(view.tables, job).stands.state in OVER]:
                        await asyncio.to_thread(self._close, over)
            except (KafkaError, HeadraceError) as error:
                log_trouble(logger, logging.WARNING, error, "steps can't be tracked now: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
                await kafka_back()
            except Exception:  # the tracking of all jobs must not end with it
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
            job = self._of.pop(model_id, None)
            if (run := self._runs.pop(model_id, None)) is not None:
                try:
                    run.finish()
                except Exception as error:  # noqa: BLE001 - whatever it is, it is this run's
                    logger.warning("the wandb run of job %s may lack its end: %s", job.id if job else model_id, _text_of(error))

    def _jobs(self) -> Iterable[RlorJob]:
        return [fact for fact in self._gate.view.tables.facts_under("rlor-job/") if isinstance(fact, RlorJob)]

    def _write(self, records: Iterable[ConsumerRecord]) -> None:
        jobs = {job.model_id: job for job in self._jobs() if _asks(job)}
        for record in records:
            step = kept_or_none(record, (StepRecord,))
            job = jobs.get(step.model_id) if isinstance(step, StepRecord) else None
            if job is not None and isinstance(step, StepRecord) and step.committed_at >= job.created_at:
                self._log(job, step)

    def _log(self, job: RlorJob, step: StepRecord) -> None:
        nonce, again = self._failed.get(job.model_id, ("", 0.0))
        if nonce == job.nonce and time.monotonic() < again:
            return
        try:
            if job.model_id in self._of and self._of[job.model_id].nonce != job.nonce:
                self._close([job.model_id])
            if job.model_id not in self._runs:
                run = self._runs[job.model_id] = self._open(job)
                self._news.append((job, "" if run.offline else run.url or "", None))
            self._of[job.model_id] = job
            self._runs[job.model_id].log({**step.metrics, "policy_version": step.policy_version_after}, step=step.step)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's, and the others go on
            fault = f"wandbConfig: metrics are not written: {_text_of(error)}"
            logger.warning("step %d of job %s is not in its wandb run: %s", step.step, job.id, _text_of(error))
            self._failed[job.model_id] = (job.nonce, time.monotonic() + _AGAIN_SECONDS)
            self._news.append((job, "", fault))
            self._close([job.model_id])

    def _open(self, job: RlorJob) -> "wandb.Run":
        import wandb  # noqa: PLC0415 - as above

        fields = JobFields.model_validate(job.request)
        said = fields.wandb_config or WandbConfig()
        gateway = self._gate.settings.gateway
        sealed = job.secrets.get(_KEY)
        if sealed is None and not is_offline():
            raise _NotTrackedError(NO_KEY)
        make_private_folder(gateway.wandb_dir)
        return wandb.init(
            entity=said.entity or None,
            project=said.project or "headrace",
            id=said.run_id or f"{job.id}-{job.nonce[:8]}",
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


def _asks(job: RlorJob) -> bool:
    config = job.request.get("wandbConfig")
    return isinstance(config, dict) and config.get("enabled") is True


def _text_of(error: Exception) -> str:
    said = " ".join(str(error).split())[:300] or type(error).__name__
    return "".join(char if char.isprintable() else "?" for char in said)
