"""What this machine and its settings have, and what is missing: the checks of `headrace doctor` that need no trainer.

Each check answers with one or more findings and raises nothing. Blocks; the Kafka ones run a loop of their own.
"""

import asyncio
import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from headrace.core.durability import durability
from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options
from headrace.core.local.distribution import find_java, major_version
from headrace.core.models import list_models
from headrace.core.settings import BaseModelEntry, Settings
from headrace.core.store import open_store
from headrace.core.topic_admin import partition_counts, show

REQUEST_TIMEOUT_MS = 5000
"""A person waits: shorter than a service would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    name: str
    ok: bool
    detail: str
    advice: str = ""
    """What to do, where it is not ok."""
    needed: bool = True
    """Whether its absence is a fault."""


def check_python() -> list[Finding]:
    """Python 3.11 to 3.13."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return [Finding(name="python", ok=fits, detail=version, advice="" if fits else "use Python 3.11 to 3.13")]


def check_kafka(settings: Settings) -> list[Finding]:
    """Broker reachable; topics there and equal to what they must be."""
    quick = settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"request_timeout_ms": REQUEST_TIMEOUT_MS})})
    try:
        asyncio.run(partition_counts(client_options(quick.kafka, "headrace-doctor")))
        broker = Finding(name="broker", ok=True, detail=f"{settings.kafka.bootstrap_servers} ({settings.kafka.security_protocol})")
    except HeadraceError as error:
        return [
            Finding(name="broker", ok=False, detail=str(error), advice="start it, or correct the settings under kafka"),
            Finding(name="topics", ok=False, detail="not looked at: no broker", advice="then run `headrace doctor` again"),
        ]
    try:
        reports = asyncio.run(show(quick))
    except HeadraceError as error:
        return [broker, Finding(name="topics", ok=False, detail=str(error), advice="see the broker's log and our rights on it")]
    wrong = [f"{report.topic} {report.state}" for report in reports if report.state != "equal"]
    detail = ", ".join(wrong) or f"{len(reports)} topics with prefix {settings.topics.prefix!r}, {settings.topics.partitions} lanes"
    topics = Finding(name="topics", ok=not wrong, detail=detail, advice="run `headrace topics apply`" if wrong else "")
    return [broker, topics, *_power_loss(quick)]


def _power_loss(settings: Settings) -> list[Finding]:
    """Whether the cluster keeps its word without power; a local one need not."""
    try:
        found = asyncio.run(durability(client_options(settings.kafka, "headrace-doctor"), settings.topic_names))
    except HeadraceError:
        return []  # no topics yet, which is said
    advice = "" if found.safe else "topics.replication_factor: 3 before `headrace topics apply`, and min.insync.replicas 2 on the brokers"
    return [Finding(name="power loss", ok=found.safe, detail=found.text, advice=advice, needed=False)]


def check_models(settings: Settings) -> list[Finding]:
    """Every model trains, or says why not; nothing is said of a cluster without topics."""
    quick = settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"request_timeout_ms": REQUEST_TIMEOUT_MS})})
    try:
        views = asyncio.run(list_models(quick))
    except HeadraceError:
        return []  # said with the broker and the topics
    findings = []
    for view in views:
        title, detail = f"model {view.name}", f"{view.status}: {view.status_detail}"
        if view.status == "waiting":
            findings.append(Finding(name=title, ok=False, detail=detail, advice="repair the base model: it continues by itself"))
        elif view.status in {"stopped", "diverged"}:
            advice = f"headrace models resume {view.model_id}"
            findings.append(Finding(name=title, ok=False, detail=detail, advice=advice, needed=False))
        if view.state is not None and view.state.unknown_versions:
            detail = f"published, and not in its ledger, whose end Kafka has lost: {', '.join(view.state.unknown_versions)}"
            advice = "warm-start a model from one of them, or continue without them"
            findings.append(Finding(name=title, ok=False, detail=detail, advice=advice, needed=False))
    return findings


def check_store(settings: Settings) -> list[Finding]:
    """A probe is put, got and deleted."""
    key, probe = f"doctor/{uuid.uuid4().hex}", os.urandom(64)
    try:
        store = open_store(settings.store.url, settings.s3)
        stored = store.put_bytes_if_absent(key, probe)
        try:
            whole = store.get_bytes(key, sha256=stored.sha256) == probe
        finally:
            store.delete(key)
    except HeadraceError as error:
        return [Finding(name="store", ok=False, detail=str(error), advice="correct store.url or the settings under s3")]
    detail = f"{settings.store.url}: put, get and delete work" if whole else f"{settings.store.url} gives other bytes than were put"
    return [Finding(name="store", ok=whole, detail=detail, advice="" if whole else "use another store")]


def check_java(settings: Settings) -> list[Finding]:
    """Java for `headrace up`: needed only where no Kafka is configured."""
    needed = not settings.kafka.bootstrap_servers
    try:
        java = find_java()
        return [Finding(name="java", ok=True, detail=f"{major_version(java)} at {java}", needed=needed)]
    except HeadraceError as error:
        return [Finding(name="java", ok=False, detail=str(error), advice="only `headrace up` needs it", needed=needed)]


def check_base_models(settings: Settings) -> list[Finding]:
    """Every base model of the catalogue is where it is said to be."""
    if not settings.base_models:
        advice = "name some under base_models in the file that HEADRACE_CONFIG names: {base_models: {NAME: {path: FOLDER}}}"
        return [Finding(name="base models", ok=False, detail="the catalogue is empty", advice=advice)]
    return [_base_model(settings, name, entry) for name, entry in settings.base_models.items()]


def _base_model(settings: Settings, name: str, entry: BaseModelEntry) -> Finding:
    title, advice = f"base model {name}", f"correct base_models.{name}.path, or bring the files there"
    trained = " or ".join(entry.trainable)
    if "://" in entry.path:
        try:
            store = open_store(settings.store.url, settings.s3)
            found = next(store.list(store.resolve(entry.path) + "/"), None)
        except HeadraceError as error:
            return Finding(name=title, ok=False, detail=str(error), advice=advice)
        detail = f"{entry.path} ({trained})" if found else f"{entry.path}: no files there"
        return Finding(name=title, ok=found is not None, detail=detail, advice="" if found else advice)
    path = Path(entry.path)
    file = path / (entry.gguf_file or "config.json")
    if path.is_file() or file.is_file():
        return Finding(name=title, ok=True, detail=f"{path} ({trained})")
    return Finding(name=title, ok=False, detail=f"{file if path.is_dir() else path} does not exist", advice=advice)
