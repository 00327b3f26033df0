"""A real S3 server on this machine: S3Proxy over a folder, run the way of the local broker.

    with LocalS3(".headrace", bucket="weights") as s3:
        boto3.client("s3", endpoint_url=s3.endpoint_url, aws_access_key_id=s3.access_key, ...)

Guarantees: signatures are checked; multipart, ranges and `If-None-Match: *` (412 the second time) work; objects, keys
and, if free, the port survive a restart on the same folder; the server ends with this process, however that ends.
Limitations: other machines, TLS, versions, and speed: it is for tests and demos.
Blocks: everything here is synchronous, as in `broker`.

The configuration of the local S3 server: S3Proxy over a folder.
"""

import json
import secrets
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from headrace.core.local.distribution import S3PROXY
from headrace.core.local.errors import LocalServiceError
from headrace.core.local.folder import ServiceFolder
from headrace.core.local.launch import Program, Running, launch
from headrace.core.local.probe import HOST

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


JVM_OPTIONS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true")
"""125 MB resident after a start, 310 MB after multipart uploads."""

LOGBACK = """\
<configuration>
  <statusListener class="ch.qos.logback.core.status.NopStatusListener"/>
  <appender name="file" class="ch.qos.logback.core.rolling.RollingFileAppender">
    <file>{log}</file>
    <rollingPolicy class="ch.qos.logback.core.rolling.FixedWindowRollingPolicy">
      <fileNamePattern>{log}.%i</fileNamePattern>
      <maxIndex>3</maxIndex>
    </rollingPolicy>
    <triggeringPolicy class="ch.qos.logback.core.rolling.SizeBasedTriggeringPolicy"><maxFileSize>10MB</maxFileSize></triggeringPolicy>
    <encoder><pattern>%d %-5level %msg \\(%logger{{20}}\\)%n</pattern></encoder>
  </appender>
  <root level="warn"><appender-ref ref="file"/></root>
</configuration>
"""
"""At debug, logback's own default, the server is several times slower."""


def s3proxy_properties(*, data: Path, port: int, access_key: str, secret_key: str) -> str:
    """The text of `s3proxy.properties`; it holds the secret."""
    settings = {
        "s3proxy.endpoint": f"http://{HOST}:{port}",
        "s3proxy.authorization": "aws-v2-or-v4",
        "s3proxy.identity": access_key,
        "s3proxy.credential": secret_key,
        "jclouds.provider": "filesystem-nio2",
        "jclouds.filesystem.basedir": str(data),
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


REGION = "us-east-1"
"""S3Proxy takes any; boto3 wants one for signing."""
SHORTEST_BUCKET_NAME = 3


class LocalS3:
    """One S3 server with its objects under `data_dir`/s3.

    Args:
        data_dir: Folder for objects, keys, configuration and log (`s3/server.log`); made if missing.
        port: Port; None or 0 takes the one of the last start if it is free, else any free one.
        bucket: Bucket to make unless it exists; at least 3 characters.
    """

    label = S3PROXY.label
    """Name and version for people."""

    def __init__(self, data_dir: Path | str, port: int | None = None, *, bucket: str | None = None) -> None:
        if bucket is not None and len(bucket) < SHORTEST_BUCKET_NAME:
            raise ValueError(f"bucket name {bucket!r} is too short: S3 wants at least {SHORTEST_BUCKET_NAME} characters")
        self._path = Path(data_dir).absolute() / "s3"
        self._port = port or None
        self.bucket = bucket
        self.access_key = ""
        """Access key id; made at the first start, kept in the folder (readable by its owner only)."""
        self.secret_key = ""
        """The secret that belongs to it."""
        self._service: Running | None = None
        self._client: S3Client | None = None

    def start(self) -> Self:
        """Fetch what is missing (only the first time), start, wait until a signed request is answered, make the bucket.

        Raises:
            LocalServiceError: as `LocalBroker.start`.
        """
        if self._service is not None:
            raise LocalServiceError(f"this S3 server was started already, at {self._service.address}")
        program = Program(distribution=S3PROXY, port_count=1, address=_url, prepare=self._prepare, is_ready=self._is_ready)
        self._service = launch(program, self._path, self._port)
        if self.bucket is not None:
            self._make_bucket(self.bucket)
        return self

    def stop(self) -> None:
        """Shut down and return when the process is gone; nothing if it does not run."""
        if self._service is not None:
            self._service.process.stop()
            self._service = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the server ends by itself and give its exit status.

        Raises:
            TimeoutError: it still runs.
            LocalServiceError: it was not started.
        """
        return self._running().process.wait(timeout)

    @property
    def endpoint_url(self) -> str:
        """URL for clients. Raises LocalServiceError if the server was not started."""
        return self._running().address

    @property
    def log_file(self) -> Path:
        """The server's log; older ones lie next to it."""
        return self._path / "server.log"

    @property
    def pid(self) -> int:
        """Process id of the server's Java. Raises LocalServiceError if the server was not started."""
        return self._running().process.pid

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _running(self) -> Running:
        if self._service is None:
            raise LocalServiceError("this S3 server is not running; call start() or use it as a context manager")
        return self._service

    def _prepare(self, _java: Path, _jars: list[Path], ports: list[int]) -> list[str]:
        folder = ServiceFolder(self._path, S3PROXY.label)
        self.access_key, self.secret_key = _keys(folder)
        self._client = _client(_url(ports[0]), self.access_key, self.secret_key)
        folder.data.mkdir(mode=0o700, exist_ok=True)
        logback = folder.write("logback.xml", LOGBACK.format(log=folder.log_file))
        text = s3proxy_properties(data=folder.data, port=ports[0], access_key=self.access_key, secret_key=self.secret_key)
        properties = folder.write("s3proxy.properties", text)
        options = [*JVM_OPTIONS, f"-Dlogback.configurationFile={logback}"]
        return [*options, "org.gaul.s3proxy.Main", "--properties", str(properties)]

    def _is_ready(self, _port: int) -> bool:
        """Whether the server with our keys answers: no one else accepts them."""
        try:
            self._asking().list_buckets()
        except (BotoCoreError, ClientError):
            return False
        return True

    def _asking(self) -> "S3Client":
        if self._client is None:
            raise LocalServiceError("this S3 server is not running; call start() or use it as a context manager")
        return self._client

    def _make_bucket(self, name: str) -> None:
        client = self._asking()
        try:
            client.create_bucket(Bucket=name)
        except client.exceptions.BucketAlreadyOwnedByYou:
            return
        except (BotoCoreError, ClientError) as error:
            self.stop()
            raise LocalServiceError(f"{S3PROXY.label} could not make the bucket {name!r}: {error}") from error


def _url(port: int) -> str:
    return f"http://{HOST}:{port}"


def _client(url: str, access_key: str, secret_key: str) -> "S3Client":
    """A client that asks once: the caller asks again."""
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10),
    )


def _keys(folder: ServiceFolder) -> tuple[str, str]:
    """The folder's (access key, secret key); made once."""
    path = folder.path / "credentials.json"
    if not path.exists():
        keys = {"access_key": f"headrace-{secrets.token_hex(6)}", "secret_key": secrets.token_urlsafe(30)}
        folder.write(path.name, json.dumps(keys))
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
        return keys["access_key"], keys["secret_key"]
    except (ValueError, KeyError, TypeError) as error:
        raise LocalServiceError(f"{path} is damaged ({error!r}); delete it to have new keys made") from error
