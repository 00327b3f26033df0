"""Fetching one jar by its coordinate, through jgo.

Guarantees: the file returned has the locked SHA-256; dropped connections are tried again.
Limitations: mirrors. jgo's default repository is the only source; without it, copy a filled cache folder from elsewhere.
"""

import errno
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.local.distribution import LockedJar
from headrace.core.local.errors import LocalServiceError

if TYPE_CHECKING:
    from jgo.maven import MavenContext

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
            "the local Kafka and S3 servers are fetched by the Python package jgo, which is not installed. "
            "Install the extra `local`: pip install 'headrace[local]'"
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
