"""The user's cache of jars: filled once, checked at every start.

Guarantees: a path handed out is a whole file with the locked digest. Jars are downloaded into a folder aside, checked
and then renamed, under a file lock: neither an interrupt nor a second process leaves half a jar. A jar that changed is
told by size or modification time, hashed in full then, and fetched again if its bytes are other ones.
Limitations: bytes that rot while size and modification time stay are found only by `verify`, which runs when a service
did not come up.

Developer command: write a distribution's lock list again.

`python -m headrace.core.local.cache kafka` resolves the root coordinate and its dependencies with jgo (a minute or
two), downloads each jar, and writes coordinate, SHA-256 and size to the lock list in the source tree. To move to another version, change
`distribution.py` first. Trust is on first use: jgo compares each download with the repository's SHA-1, the lock list
then holds everyone else to the bytes seen here; review its diff.
"""

import argparse
import fcntl
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from headrace.core.local.distribution import KAFKA, S3PROXY, Distribution, LockedJar, fetch, maven_context, sha256_of
from headrace.core.local.errors import LocalServiceError
from headrace.core.local.progress import DownloadProgress, say

log = logging.getLogger(__name__)

DOWNLOADS_AT_ONCE = 8
STAMP = "verified.json"
"""Per jar: [bytes, modification time in ns] of the file whose digest was last found right."""


def cache_dir() -> Path:
    """`HEADRACE_CACHE_DIR`, else `headrace` in `XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("HEADRACE_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "headrace"


def class_path(distribution: Distribution) -> list[Path]:
    """The distribution's jars in the cache, in class-path order; downloads what is missing or changed.

    Raises:
        LocalServiceError: no network, no space, no right to write, or jgo is not installed.
    """
    folder = cache_dir() / distribution.folder_name
    jars = distribution.jars()
    if _unproven(folder, jars):
        with exclusive(folder):
            _repair(distribution, folder, _unproven(folder, jars))  # asked again: another process may have done it
    return [folder / jar.file_name for jar in jars]


def verify(distribution: Distribution) -> list[Path]:
    """Hash every cached jar and forget the stamp of those that are wrong, so the next start fetches them; returns these."""
    folder = cache_dir() / distribution.folder_name
    wrong = [jar for jar in distribution.jars() if not _is_right(folder / jar.file_name, jar)]
    if wrong:
        with exclusive(folder):
            stamps = _read_stamps(folder)
            _write_stamps(folder, {k: v for k, v in stamps.items() if k not in {jar.file_name for jar in wrong}})
    return [folder / jar.file_name for jar in wrong]


def _unproven(folder: Path, jars: tuple[LockedJar, ...]) -> list[LockedJar]:
    """Jars that are missing, or whose file is not the one the stamp speaks of."""
    stamps = _read_stamps(folder)
    return [jar for jar in jars if _stamp_of(folder / jar.file_name) != stamps.get(jar.file_name, [])]


def _repair(distribution: Distribution, folder: Path, unproven: list[LockedJar]) -> None:
    """Hash what is there, download the rest, stamp both. Runs under the lock."""
    stamps = _read_stamps(folder)
    wanted = []
    for jar in unproven:
        path = folder / jar.file_name
        if _is_right(path, jar):
            stamps[jar.file_name] = _stamp_of(path)
            continue
        if path.exists():
            log.warning("%s is corrupt (it does not have the locked SHA-256); downloading it again", path)
        wanted.append(jar)
    try:
        for jar in _download(distribution, folder, wanted):
            stamps[jar.file_name] = _stamp_of(folder / jar.file_name)
    except LocalServiceError as error:
        corrupt = [str(folder / jar.file_name) for jar in wanted if (folder / jar.file_name).exists()]
        if corrupt:
            raise LocalServiceError(f"corrupt jar in the cache: {', '.join(corrupt)}; and {error}") from error
        raise
    finally:  # what did arrive need not arrive again
        _write_stamps(folder, stamps)


def _download(distribution: Distribution, folder: Path, wanted: list[LockedJar]) -> Iterator[LockedJar]:
    """Fetch several at a time; yields each jar once it lies in `folder`, whole."""
    if not wanted:
        return
    needed = sum(jar.size for jar in wanted)
    if (free := shutil.disk_usage(folder).free) < 2 * needed:
        raise LocalServiceError(
            f"no disk space for {distribution.label}: {folder} has {free / 1e6:.0f} MB free, {2 * needed / 1e6:.0f} MB are needed. "
            "Free some, or name a folder elsewhere in HEADRACE_CACHE_DIR"
        )
    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # of a download that was killed; ours alone under the lock
    try:
        with DownloadProgress(distribution.label, files=len(wanted), size=needed) as progress:
            context = maven_context(aside, progress.file)
            with ThreadPoolExecutor(max_workers=DOWNLOADS_AT_ONCE) as pool:
                futures = {pool.submit(fetch, jar, context): jar for jar in wanted}
                try:
                    for future in as_completed(futures):
                        jar = futures[future]
                        future.result().replace(folder / jar.file_name)
                        yield jar
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Make the folder and hold its lock; waits while another process fills it. The kernel frees the lock of a killed one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(f"{folder.name}.flock").open("w")
    except OSError as error:
        raise LocalServiceError(
            f"the cache folder {folder} cannot be written: {error.strerror}. Name another one in HEADRACE_CACHE_DIR"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Waiting for another process that is filling {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_right(path: Path, jar: LockedJar) -> bool:
    return path.is_file() and path.stat().st_size == jar.size and sha256_of(path) == jar.sha256


def _stamp_of(path: Path) -> list[int]:
    """[bytes, modification time], or None's stand-in [-1] for a missing file, which no stamp equals."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return [-1]
    return [status.st_size, status.st_mtime_ns]


def _read_stamps(folder: Path) -> dict[str, list[int]]:
    """The stamps; none if the file cannot be read or is no JSON, which only costs hashing all jars."""
    try:
        stamps: dict[str, list[int]] = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamps


def _write_stamps(folder: Path, stamps: dict[str, list[int]]) -> None:
    new = folder / f"{STAMP}.new"
    try:
        new.write_text(json.dumps(stamps, indent=0), encoding="utf-8")
        new.replace(folder / STAMP)
    except OSError as error:
        raise LocalServiceError(f"cannot write {new}: {error.strerror}") from error


def resolve(distribution: Distribution, repository: Path) -> list[LockedJar]:
    """Resolve and download all of `distribution` into `repository`; class-path order, the root's own jar first."""
    context = maven_context(repository)
    roots, transitive = context.resolver.resolve([context.create_dependency(distribution.root)])
    extras = [context.create_dependency(coordinate) for coordinate in distribution.extras]
    wanted = [dependency.artifact for dependency in [*roots, *transitive, *extras]]
    if odd := [str(artifact) for artifact in wanted if artifact.classifier or artifact.packaging != "jar"]:
        raise LocalServiceError(f"the lock list holds plain jars only, and these are something else: {odd}")
    with ThreadPoolExecutor(max_workers=8) as pool:
        paths = list(pool.map(lambda artifact: artifact.resolve(), wanted))
    jars = [
        LockedJar(
            coordinate=f"{artifact.groupId}:{artifact.artifactId}:{artifact.version}",
            sha256=sha256_of(path),
            size=path.stat().st_size,
        )
        for artifact, path in zip(wanted, paths, strict=True)
    ]
    names = [jar.file_name for jar in jars]
    if clash := {name for name in names if names.count(name) > 1}:
        raise LocalServiceError(f"two jars of one file name, which one cache folder cannot hold: {sorted(clash)}")
    return jars


def main() -> None:
    """Entry point of `python -m headrace.core.local.cache`."""
    parser = argparse.ArgumentParser(description="Write the lock list of a local service again.")
    parser.add_argument("distribution", choices=[KAFKA.name, S3PROXY.name])
    name = parser.parse_args().distribution
    distribution = {d.name: d for d in (KAFKA, S3PROXY)}[name]
    logging.basicConfig(level=logging.WARNING)  # jgo's word on a SHA-1 that does not fit
    with tempfile.TemporaryDirectory() as folder:
        jars = resolve(distribution, Path(folder))
    header = f"# {distribution.label}: coordinate, SHA-256, bytes. Made by `python -m headrace.core.local.cache {name}`."
    lines = [header, *(f"{jar.coordinate} {jar.sha256} {jar.size}" for jar in jars)]
    distribution.lock_list().write_text("\n".join(lines) + "\n", encoding="ascii")
    megabytes = sum(jar.size for jar in jars) / 1e6
    sys.stdout.write(f"{distribution.lock_list().name}: {len(jars)} jars, {megabytes:.0f} MB\n")


if __name__ == "__main__":
    main()
