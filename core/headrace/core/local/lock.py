"""Developer command: write a distribution's lock list again.

`python -m headrace.core.local.lock kafka` resolves the root coordinate and its dependencies with jgo (a minute or
two), downloads each jar, and writes coordinate, SHA-256 and size to the lock list in the source tree. To move to another version, change
`distribution.py` first. Trust is on first use: jgo compares each download with the repository's SHA-1, the lock list
then holds everyone else to the bytes seen here; review its diff.
"""

import argparse
import logging
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.core.local.distribution import KAFKA, S3PROXY, Distribution, LockedJar
from headrace.core.local.errors import LocalServiceError
from headrace.core.local.maven import maven_context, sha256_of


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
    """Entry point of `python -m headrace.core.local.lock`."""
    parser = argparse.ArgumentParser(description="Write the lock list of a local service again.")
    parser.add_argument("distribution", choices=[KAFKA.name, S3PROXY.name])
    name = parser.parse_args().distribution
    distribution = {d.name: d for d in (KAFKA, S3PROXY)}[name]
    logging.basicConfig(level=logging.WARNING)  # jgo's word on a SHA-1 that does not fit
    with tempfile.TemporaryDirectory() as folder:
        jars = resolve(distribution, Path(folder))
    header = f"# {distribution.label}: coordinate, SHA-256, bytes. Made by `python -m headrace.core.local.lock {name}`."
    lines = [header, *(f"{jar.coordinate} {jar.sha256} {jar.size}" for jar in jars)]
    distribution.lock_list().write_text("\n".join(lines) + "\n", encoding="ascii")
    megabytes = sum(jar.size for jar in jars) / 1e6
    sys.stdout.write(f"{distribution.lock_list().name}: {len(jars)} jars, {megabytes:.0f} MB\n")


if __name__ == "__main__":
    main()
