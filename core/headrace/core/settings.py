"""Settings of every process, from the environment (`HEADRACE_…`, nested with `__`) or one YAML file.

`HEADRACE_CONFIG` names the file; without it `headrace.yaml` in the working directory is read if it exists. The environment wins over the
file. Guarantees: unknown or contradictory settings are rejected at start with the field's path; secrets are `SecretStr` and never printed.
Limitations: a process reads its settings once.

The effective settings, flat, each with where it comes from; secrets are masked.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from headrace.core.errors import HeadraceError
from headrace.schemas.claim import INLINE_LIMIT
from headrace.schemas.state import RowsKept
from headrace.schemas.topics import Topics

DEFAULT_FILE = "headrace.yaml"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class KafkaSettings(_Section):
    """How to reach Kafka. Without `bootstrap_servers` the local broker is used where one may be started."""

    bootstrap_servers: str | None = None
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    ssl_cafile: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_keyfile_password: SecretStr | None = None
    ssl_check_hostname: bool = True
    request_timeout_ms: int = Field(default=40_000, ge=1000)

    @model_validator(mode="after")
    def _sasl_is_whole(self) -> Self:
        if self.security_protocol.startswith("SASL") and not (self.sasl_mechanism and self.sasl_username and self.sasl_password):
            raise ValueError(f"security_protocol={self.security_protocol} needs sasl_mechanism, sasl_username and sasl_password")
        if self.ssl_certfile is not None and self.ssl_keyfile is None:
            raise ValueError("ssl_certfile needs ssl_keyfile")
        return self


class TopicSettings(_Section):
    """Names and shape of the topics."""

    prefix: str = Field(default="headrace.", pattern=r"^[a-zA-Z0-9._-]*$", max_length=200)
    partitions: int = Field(default=12, ge=1, le=4096)
    """Lanes; fixed when the topics are created."""
    replication_factor: int = Field(default=-1, ge=-1)
    """-1: the broker's default."""


class StoreSettings(_Section):
    """Where large things are: payloads, weights, snapshots."""

    url: str = Field(default="file://.headrace/store", pattern=r"^(file|s3)://.+")


class S3Settings(_Section):
    """How to reach S3; empty fields fall back to boto3's own chain."""

    endpoint_url: str | None = None
    region: str | None = None
    access_key_id: str | None = None
    secret_access_key: SecretStr | None = None


class ProducerSettings(_Section):
    """The producer embedded in agent runtimes."""

    compression: Literal["none", "lz4", "zstd"] = "zstd"
    """Of batches, on the event loop: zstd takes 0.4 ms for 100 KB of tokens, lz4 (at the level that aiokafka uses) 7 ms."""
    linger_ms: int = Field(default=5, ge=0)
    buffer_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Bytes of encoded groups that wait for their acknowledgement; beyond that, `send` waits."""
    inline_limit_bytes: int = Field(default=INLINE_LIMIT, ge=1024, le=900_000)
    encoding: Literal["safetensors", "json"] = "safetensors"


class WorkerSettings(_Section):
    """A trainer worker."""

    group: str = Field(default="default", pattern=r"^[a-zA-Z0-9._-]+$")
    instance: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9._-]+$")
    """A stable name of this worker (a StatefulSet's ordinal): it gets its lanes back after a restart. Must be unique in the group."""
    session_timeout_ms: int = Field(default=10_000, ge=1000)
    heartbeat_interval_ms: int = Field(default=3_000, ge=100)
    transaction_timeout_ms: int = Field(default=60_000, ge=1000)
    read_ahead_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    refusal_linger_seconds: float = Field(default=1.0, ge=0)
    """Refusals and dead letters that no step carries are committed after this."""
    duplicate_window: int = Field(default=100_000, ge=1)
    """A group id is a duplicate if it was admitted among the model's last so many groups."""
    threads: int = Field(default=0, ge=0)
    """Torch threads of a rank; 0: all cores, shared among the ranks of this machine."""
    ranks: int = Field(default=1, ge=1, le=1024)
    """Data-parallel ranks on this machine. Under torchrun or deepspeed the launcher's WORLD_SIZE counts instead."""
    zero_stage: int = Field(default=0, ge=0, le=3)
    """DeepSpeed ZeRO: what is sharded over the ranks (1: optimizer, 2: and gradients, 3: and parameters)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory (ZeRO 1 to 3)."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    tokens_per_pass: int = Field(default=0, ge=0)
    """Tokens of one packed row where a config does not say `packed_sequence_length`; 0: 2,048 on a CPU, 16,384 on a GPU."""
    rank_silence_seconds: float = Field(default=60.0, gt=1)
    """A rank that gives no sign of life for so long is hung: the world is ended and restarted."""
    collective_timeout_seconds: float = Field(default=1800.0, gt=1)
    """A rank that waits so long for the others fails the step."""
    snapshot_every: int = Field(default=4, ge=1, le=1000)
    """Steps between two snapshots of a model: what recovery runs again at most, and what one costs less often."""
    settle_seconds: float = Field(default=60, gt=0)
    """A model without a step for so long gets a snapshot, wherever it stands between two."""
    keep_snapshots: int = Field(default=2, ge=1)
    """Snapshots kept of each model: the last, and those before it that a replay may start from."""
    orphan_grace_seconds: float = Field(default=86_400, ge=0)
    """Files of steps that were never committed are deleted when they are older than this."""
    max_step_attempts: int = Field(default=4, ge=1)
    """A batch whose step fails in its ranks, or ends its worker, so many times is refused as `step_failed`; a committed step that is run
    again for recovery, and whose rank dies so many times, stops its model as diverged."""
    job_timeout_seconds: float = Field(default=3600, gt=0)
    """A job that lacks groups so long after its first record came fails."""
    starved_after_seconds: float = Field(default=300, gt=0)
    """A model without a step for so long is reported as starved."""
    release_seconds: float = Field(default=20, ge=0)
    """After SIGTERM a worker lets a running step end and stores a snapshot, for so long at most."""
    report_rows: RowsKept = "none"
    """How many of a step's packed rows (tokens, mask, advantages, ratios) are kept in its report; `sample`: 8."""
    shadow_prefix: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9._-]*$", max_length=200)
    """This worker group shadows: it reads `trajectory-groups` under this prefix and writes only under its own."""
    work_dir: Path = Path(".headrace/worker")
    """Local files of a step before they are stored."""

    @model_validator(mode="after")
    def _offload_needs_zero(self) -> Self:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3; zero_stage is 0")
        return self


class GatewaySettings(_Section):
    """The HTTP front door."""

    host: str = "127.0.0.1"
    """Where it listens; anything but loopback needs tokens."""
    port: int = Field(default=8100, ge=0, le=65535)
    """0: any free one."""
    instance: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9._-]+$")
    """A stable name of this gateway, unique among those of one Kafka; null: host name and port."""
    tokens_file: Path | None = None
    """Tokens as salted digests (`headrace tokens create`); read again when it changes."""
    tokens: tuple[str, ...] = ()
    """The lines of such a file, for who configures by environment."""
    secrets_key: SecretStr | None = None
    """Encrypts keys that requests hold; null: such requests are refused. Any text of 32 characters or more."""
    slots: int = Field(default=2, ge=1, le=16)
    """Transactions at a time."""
    max_body_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    """Of a request that brings groups of trajectories; files of datasets are streamed and have a limit of their own."""
    max_inference_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Of a request that continues to an engine."""
    max_upload_bytes: int = Field(default=8 * 1024 * 1024 * 1024, ge=1024)
    """Of one file of a dataset."""
    max_groups: int = Field(default=5_000, ge=1)
    """Groups of one job, or of one call that keeps groups."""
    held_body_bytes: int = Field(default=1024 * 1024 * 1024, ge=64 * 1024)
    """Bodies of all requests under way, in memory or in temporary files; one account has half of it at most. Beyond it 429."""
    readers: int = Field(default=2, ge=1, le=64)
    """Processes that read large JSON."""
    reader_memory_bytes: int = Field(default=1024 * 1024 * 1024, ge=256 * 1024 * 1024)
    """Memory of each of them; a body that needs more is refused (413). On Linux."""
    requests_per_minute: int = Field(default=6_000, ge=1)
    """Of one token; beyond it 429."""
    request_timeout_seconds: float = Field(default=60, gt=0)
    """For a request to come in whole."""
    kafka_timeout_seconds: float = Field(default=10, gt=0)
    """For Kafka to answer; then 503."""
    inference_timeout_seconds: float = Field(default=1200, gt=0)
    inference_wait_seconds: float = Field(default=60, ge=0)
    """The longest wait of a request for an engine to load the version that its model name means; then 503."""
    engine_silence_seconds: float = Field(default=60, gt=0)
    """An engine that said it would say that it lives, and has not for so long, counts no more; requests go to others first."""
    wandb_dir: Path = Path(".headrace/wandb")
    """Where runs lie that jobs ask for (`wandbConfig`), until wandb has sent them."""
    shared_folders: tuple[Annotated[str, Field(pattern=r"^[^/\\]+(/[^/\\]+)*$")], ...] = ()
    """Folders of the object store (`shared/adapters`) whose objects every account may name by their URIs."""
    training_data: dict[str, str] = Field(default_factory=dict)
    """`wandb-artifact:///entity/project/name:version` to the URI in the object store where it lies."""


class BaseModelEntry(_Section):
    """A base model of the catalogue: a folder, a GGUF file, or a store URI; and what of it may be trained."""

    path: str
    trainable: tuple[Literal["lora", "full"], ...] = ("lora", "full")
    gguf_file: str | None = None
    """File name inside `path` when the weights are GGUF."""


class Settings(BaseSettings):
    """All settings. `HEADRACE_KAFKA__BOOTSTRAP_SERVERS=host:9092` sets `kafka.bootstrap_servers`."""

    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_", env_nested_delimiter="__", extra="ignore", frozen=True, use_attribute_docstrings=True
    )

    kafka: KafkaSettings = KafkaSettings()
    topics: TopicSettings = TopicSettings()
    store: StoreSettings = StoreSettings()
    s3: S3Settings = S3Settings()
    producer: ProducerSettings = ProducerSettings()
    worker: WorkerSettings = WorkerSettings()
    gateway: GatewaySettings = GatewaySettings()
    base_models: dict[str, BaseModelEntry] = Field(default_factory=dict)
    account: str = "default"
    """Owner of the models that the command line creates."""

    @model_validator(mode="after")
    def _a_shadow_has_topics_of_its_own(self) -> Self:
        shadowed = self.worker.shadow_prefix
        if shadowed is not None and _stem(shadowed) == _stem(self.topics.prefix):
            # Consumer groups and transactional ids carry the stem: an equal one would fence the lanes of the group that is shadowed.
            raise ValueError(
                f"worker.shadow_prefix={shadowed!r} and topics.prefix={self.topics.prefix!r} are the same, or differ only in dots, dashes "
                "and underscores at their end: a shadow needs topics of its own. Set topics.prefix to another name"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is pydantic's; .env files belong to the agent's project
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the environment, then secret files, then the YAML file."""
        sources = (init_settings, env_settings, file_secret_settings)
        return (*sources, InitSettingsSource(settings_cls, init_kwargs=read_settings_file(os.environ)))

    @property
    def topic_names(self) -> Topics:
        """Full topic names under the prefix."""
        return Topics(prefix=self.topics.prefix)

    @property
    def groups_topic(self) -> str:
        """The topic that this worker group trains on: its own `trajectory-groups`, or that of the group which it shadows."""
        shadowed = self.worker.shadow_prefix
        return (self.topic_names if shadowed is None else Topics(prefix=shadowed)).trajectory_groups

    @property
    def worker_group_id(self) -> str:
        """Consumer group of the worker group, and stem of its transactional ids: `headrace-default` under the default prefix.

        It carries the topic prefix: the same group name under two prefixes must not fence each other's lanes.
        """
        return f"{_stem(self.topics.prefix)}-{self.worker.group}"


def read_settings_file(environment: Mapping[str, str]) -> dict[str, Any]:
    """What the file that HEADRACE_CONFIG names says, else `headrace.yaml` in the working directory; empty without a file.

    Raises:
        HeadraceError: the named file does not exist, or a file is no YAML mapping.
    """
    named = environment.get("HEADRACE_CONFIG")
    file = Path(named or DEFAULT_FILE)
    if not file.is_file():
        if named:
            raise HeadraceError(f"HEADRACE_CONFIG names {named!r}, which is no file")
        return {}
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise HeadraceError(f"{file} is no readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict | None):
        raise HeadraceError(f"{file} must hold sections such as `kafka:` and `worker:`, not {type(content).__name__}")
    return content or {}


def _stem(prefix: str) -> str:
    return prefix.rstrip(".-_") or "headrace"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """One setting."""

    path: str
    """As in `kafka.bootstrap_servers`."""
    value: Any
    """JSON-like; a secret is asterisks."""
    source: Literal["environment", "file", "default"]


def setting_rows(settings: Settings, environment: Mapping[str, str] = os.environ) -> list[SettingRow]:
    """Every setting, in the order of the sections."""
    in_file = read_settings_file(environment)
    set_by_environment = {name.upper() for name in environment}
    return [
        SettingRow(path=".".join(path), value=value, source=_source(path, set_by_environment, in_file))
        for path, value in _leaves(settings.model_dump(mode="json"))
    ]


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401 - JSON-like
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _source(path: tuple[str, ...], variables: set[str], in_file: Any) -> Literal["environment", "file", "default"]:  # noqa: ANN401 - YAML
    # A whole section can be given as JSON: HEADRACE_KAFKA='{"bootstrap_servers": …}'.
    if any("HEADRACE_" + "__".join(path[:depth]).upper() in variables for depth in range(1, len(path) + 1)):
        return "environment"
    for key in path:
        if not isinstance(in_file, dict) or key not in in_file:
            return "default"
        in_file = in_file[key]
    return "file"
