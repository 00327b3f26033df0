"""The pinned Java programs: which ones, which versions, and the digest of every jar.

Guarantees: what runs is byte for byte what was locked. The lock lists next to this module (`kafka-4.4.0.lock`,
`s3proxy-4.1.0.lock`) name each jar's Maven coordinate, SHA-256 and size; nothing is resolved at run time.
Limitations: security fixes of a dependency arrive only when someone locks again (`python -m headrace.core.local.lock`).
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path


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
