"""A worker on topics of its own: its settings, its base model, and what it wrote."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from tests.consumers.conftest import tiny_model as tiny_model  # noqa: PLC0414 - a fixture, shared
from tests.worker.following import Following
from tests.worker.learners import learner_settings
from tests.worker.stage import stage as stage  # noqa: PLC0414 - a fixture, shared

from headrace.core.kafka import client_options
from headrace.core.models import ModelView, create_model
from headrace.core.settings import BaseModelEntry, KafkaSettings, Settings, StoreSettings, TopicSettings, WorkerSettings
from headrace.core.topic_admin import apply


def settings_of(kafka: str, prefix: str, folder: Path, base: Path) -> Settings:
    """Settings of a worker with two lanes and one base model."""
    return Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka),
        topics=TopicSettings(prefix=prefix, partitions=2),
        store=StoreSettings(url=f"file://{folder}/store"),
        worker=WorkerSettings(
            work_dir=folder / "work",
            threads=1,
            refusal_linger_seconds=0.05,
            session_timeout_ms=6000,
            heartbeat_interval_ms=500,
        ),
        base_models={"tiny": BaseModelEntry(path=str(base))},
    )


@pytest.fixture
def settings(kafka: str, topic_prefix: str, tmp_path: Path, tiny_model: Path) -> Settings:
    """Topics of its own, made, with no worker on them yet."""
    found = settings_of(kafka, topic_prefix, tmp_path, tiny_model)
    asyncio.run(apply(found))
    return found


@pytest.fixture(scope="session")
def shared(kafka: str, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Settings]:
    """Topics with a running worker that many tests share, each with a model of its own: a worker takes seconds to start."""
    folder = tmp_path_factory.mktemp("shared-worker")
    found = settings_of(kafka, f"shared{uuid.uuid4().hex[:8]}.", folder, tiny_model)
    asyncio.run(apply(found))
    worker = WorkerProcess(found, folder / "worker.log")
    yield found
    assert worker.stop() == 0, (folder / "worker.log").read_text()[-4000:]
    worker.close()


async def learner(settings: Settings, name: str = "learner", *, max_policy_lag: int | None = None, **batch: object) -> ModelView:
    """A model that trains all parameters, two groups a step."""
    return await create_model(settings, project="tests", name=name, model=learner_settings(max_policy_lag=max_policy_lag, **batch))


def environment_of(settings: Settings) -> dict[str, str]:
    """The settings as the environment of a process."""
    kafka = settings.kafka
    login = {
        "HEADRACE_KAFKA__SECURITY_PROTOCOL": kafka.security_protocol,
        "HEADRACE_KAFKA__SASL_MECHANISM": kafka.sasl_mechanism,
        "HEADRACE_KAFKA__SASL_USERNAME": kafka.sasl_username,
        "HEADRACE_KAFKA__SASL_PASSWORD": kafka.sasl_password and kafka.sasl_password.get_secret_value(),
    }
    catalogue = {name: entry.model_dump(mode="json") for name, entry in settings.base_models.items()}
    return {name: value for name, value in login.items() if value is not None} | {
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": str(settings.kafka.bootstrap_servers),
        "HEADRACE_TOPICS": settings.topics.model_dump_json(),
        "HEADRACE_STORE": settings.store.model_dump_json(),
        "HEADRACE_S3": orjson.dumps(_s3(settings)).decode(),
        "HEADRACE_WORKER": settings.worker.model_dump_json(),
        "HEADRACE_BASE_MODELS": orjson.dumps(catalogue).decode(),
    }


def _s3(settings: Settings) -> dict[str, str]:
    secret = settings.s3.secret_access_key
    shown = settings.s3.model_dump(exclude={"secret_access_key"}, exclude_none=True)
    return shown if secret is None else shown | {"secret_access_key": secret.get_secret_value()}


class WorkerProcess:
    """`headrace worker` as a process, configured through its environment as a user would."""

    def __init__(self, settings: Settings, log: Path, launcher: Sequence[str] = (sys.executable, "-m", "headrace.cli")) -> None:
        self._log = log.open("ab")
        environment = os.environ | environment_of(settings)
        self.process = subprocess.Popen([*launcher, "worker"], env=environment, stdout=self._log, stderr=self._log, start_new_session=True)

    def kill(self) -> None:
        """SIGKILL, as an out-of-memory killer would."""
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        """Whatever is left; a launcher is asked first, since its workers are in sessions of their own."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        if self.process.poll() is None:
            self.kill()
        self._log.close()


@pytest.fixture
def start_worker(settings: Settings, tmp_path: Path) -> Iterator[object]:
    """Starts workers; the log is shown when the test fails."""
    started: list[WorkerProcess] = []
    log = tmp_path / "worker.log"

    def start(with_settings: Settings = settings) -> WorkerProcess:
        started.append(WorkerProcess(with_settings, log))
        return started[-1]

    yield start
    for worker in started:
        worker.close()
    if log.exists():
        print(log.read_text()[-8000:])  # noqa: T201 - pytest shows it with a failure


@asynccontextmanager
async def following(settings: Settings, model_id: str | None = None) -> AsyncIterator[Following]:
    """A read_committed subscriber of what workers write: all of it, or what one model is about."""
    found = Following(client_options(settings.kafka, "test-following"), settings.topic_names, model_id)
    await found.start()
    try:
        yield found
    finally:
        await asyncio.shield(found.stop())
