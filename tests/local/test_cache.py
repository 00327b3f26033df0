"""The cache of jars, filled by jgo from a real HTTP server on this machine that hands out the user cache's jars as Maven would.

Only the address is another one than in use: jgo has no setting for its default repository, so the tests change it there.
"""

import http.server
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jgo.maven._core
import pytest

from headrace.core.local import LocalServiceError, cache
from headrace.core.local.distribution import KAFKA, LockedJar

SMALL = "slf4j-api-1.7.36.jar"


@dataclass
class Repository:
    """A Maven repository over HTTP, and what to do wrong."""

    folder: Path
    url: str = ""
    requested: list[str] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    """File names that are sent in half, once."""
    stall: threading.Event | None = None
    """Until it is set, no file is sent."""


def jar_path(jar: LockedJar) -> str:
    group, artifact, version = jar.coordinate.split(":")
    return f"/{group.replace('.', '/')}/{artifact}/{version}/{jar.file_name}"


@pytest.fixture(scope="module")
def jars(request: pytest.FixtureRequest) -> Path:
    """The folder with all jars of the user's cache, filled by the real source if need be."""
    return cache.class_path(KAFKA)[0].parent


@pytest.fixture
def repository(jars: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    files = {jar_path(jar): jar.file_name for jar in KAFKA.jars()}
    state = Repository(folder=jars)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = files.get(self.path)
            if name is None or not (state.folder / name).exists():
                self.send_error(404)
                return
            state.requested.append(name)
            if state.stall is not None:
                state.stall.wait(30)
            body = (state.folder / name).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if name in state.cut:
                state.cut.remove(name)
                body = body[: len(body) // 2]
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setitem(jgo.maven._core.DEFAULT_REMOTE_REPOS, "central", state.url)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield state
        if state.stall is not None:
            state.stall.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the folder of Kafka in it."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / KAFKA.folder_name


@pytest.fixture
def filled_cache(own_cache: Path, jars: Path) -> Path:
    shutil.copytree(jars, own_cache)
    return own_cache


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setitem(jgo.maven._core.DEFAULT_REMOTE_REPOS, "central", f"http://127.0.0.1:{closed.getsockname()[1]}")


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def test_an_empty_cache_is_filled_with_exactly_the_locked_jars_and_left_alone_after(
    own_cache: Path, repository: Repository, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = cache.class_path(KAFKA)
    assert [path.name for path in paths] == [jar.file_name for jar in KAFKA.jars()]
    assert all(path.stat().st_size == jar.size for path, jar in zip(paths, KAFKA.jars(), strict=True))
    assert sorted(repository.requested) == sorted(path.name for path in paths)
    assert capfd.readouterr().err.startswith("Downloading Apache Kafka 4.4.0 (45 files, 45 MB; only the first time)\nDownloaded")
    assert sorted(p.name for p in own_cache.parent.iterdir()) == [KAFKA.folder_name, f"{KAFKA.folder_name}.flock"]

    repository.requested.clear()
    assert cache.class_path(KAFKA) == paths
    assert repository.requested == []


def test_a_connection_that_breaks_in_the_middle_is_tried_again(own_cache: Path, repository: Repository) -> None:
    repository.cut = {SMALL, KAFKA.jars()[0].file_name}
    cache.class_path(KAFKA)
    assert repository.requested.count(SMALL) == 2
    assert cache.verify(KAFKA) == []


def test_a_corrupt_jar_is_named_and_fetched_again(filled_cache: Path, repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    flip_a_byte(filled_cache / SMALL)
    cache.class_path(KAFKA)
    assert f"{filled_cache / SMALL} is corrupt" in caplog.text
    assert repository.requested == [SMALL]
    assert cache.verify(KAFKA) == []


def test_a_jar_that_only_got_another_time_is_hashed_not_fetched(filled_cache: Path, repository: Repository) -> None:
    os.utime(filled_cache / SMALL)
    cache.class_path(KAFKA)
    assert repository.requested == []


def test_verify_finds_a_jar_that_rotted_under_its_old_time_and_the_next_start_fetches_it(
    filled_cache: Path, repository: Repository
) -> None:
    cache.class_path(KAFKA)
    path = filled_cache / SMALL
    before = path.stat()
    flip_a_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cache.class_path(KAFKA)  # nothing to see at a glance
    assert cache.verify(KAFKA) == [path]
    cache.class_path(KAFKA)
    assert repository.requested == [SMALL]
    assert cache.verify(KAFKA) == []


def test_other_bytes_than_the_locked_ones_are_refused(own_cache: Path, repository: Repository, jars: Path, tmp_path: Path) -> None:
    repository.folder = shutil.copytree(jars, tmp_path / "forged")
    flip_a_byte(repository.folder / SMALL)
    with pytest.raises(LocalServiceError, match=r"org.slf4j:slf4j-api:1.7.36 .*another SHA-256 than the locked one"):
        cache.class_path(KAFKA)
    assert not (own_cache / SMALL).exists()


def test_a_jar_the_repository_does_not_have_is_named(own_cache: Path, repository: Repository, jars: Path, tmp_path: Path) -> None:
    repository.folder = shutil.copytree(jars, tmp_path / "lacking")
    (repository.folder / SMALL).unlink()
    with pytest.raises(LocalServiceError, match=r"does not hand out org.slf4j:slf4j-api:1.7.36"):
        cache.class_path(KAFKA)


def test_what_arrived_before_a_failure_does_not_have_to_arrive_again(
    own_cache: Path, repository: Repository, jars: Path, tmp_path: Path
) -> None:
    repository.folder = shutil.copytree(jars, tmp_path / "lacking")
    last = KAFKA.jars()[-1].file_name
    (repository.folder / last).unlink()
    with pytest.raises(LocalServiceError):
        cache.class_path(KAFKA)
    there = {path.name for path in own_cache.glob("*.jar")}
    repository.requested.clear()
    repository.folder = jars
    cache.class_path(KAFKA)
    assert len(there) > 20
    assert not there & set(repository.requested)


@pytest.mark.usefixtures("no_network")
def test_without_a_network_the_error_says_so_and_what_to_do(own_cache: Path) -> None:
    with pytest.raises(LocalServiceError, match=r"could not download .*Is there a network.*HEADRACE_CACHE_DIR"):
        cache.class_path(KAFKA)


@pytest.mark.usefixtures("no_network")
def test_a_corrupt_jar_without_a_network_is_named(filled_cache: Path) -> None:
    flip_a_byte(filled_cache / SMALL)
    with pytest.raises(LocalServiceError, match=rf"corrupt jar in the cache: {filled_cache / SMALL}; and could not download"):
        cache.class_path(KAFKA)


def test_with_jgo_hidden_the_error_names_the_extra(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jgo.maven", None)
    with pytest.raises(LocalServiceError, match=r"jgo, which is not installed\. Install the extra `local`"):
        cache.class_path(KAFKA)


@pytest.mark.usefixtures("no_network")
def test_a_full_cache_needs_no_network(filled_cache: Path) -> None:
    assert len(cache.class_path(KAFKA)) == len(KAFKA.jars())


def test_too_little_space_by_a_pretended_disk_usage_is_told_before_anything_is_downloaded(
    own_cache: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = type(shutil.disk_usage(own_cache.parent.parent))(100, 99, 1_000_000)  # a full disk cannot be had here
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(LocalServiceError, match=r"no disk space.*1 MB free, 89 MB are needed"):
        cache.class_path(KAFKA)
    assert repository.requested == []


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(LocalServiceError, match=r"cache folder .*/file/cache/kafka-4.4.0 cannot be written: Not a directory"):
        cache.class_path(KAFKA)


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("HEADRACE_CACHE_DIR")
    assert cache.cache_dir() == tmp_path / "xdg" / "headrace"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "headrace"


def test_two_processes_at_once_fetch_each_jar_once_and_both_get_a_whole_cache(own_cache: Path, repository: Repository) -> None:
    repository.stall = threading.Event()
    fork = multiprocessing.get_context("fork")  # keeps the address of the repository changed
    both = [fork.Process(target=cache.class_path, args=(KAFKA,)) for _ in range(2)]
    for process in both:
        process.start()
    while not repository.requested:
        time.sleep(0.01)
    repository.stall.set()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert sorted(repository.requested) == sorted(jar.file_name for jar in KAFKA.jars())
    assert cache.verify(KAFKA) == []


def test_a_download_that_was_killed_leaves_nothing_that_the_next_one_stumbles_over(own_cache: Path, repository: Repository) -> None:
    repository.stall = threading.Event()
    process = multiprocessing.get_context("fork").Process(target=cache.class_path, args=(KAFKA,))
    process.start()
    while not repository.requested:
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    repository.stall.set()
    assert json.loads((own_cache / cache.STAMP).read_text() if (own_cache / cache.STAMP).exists() else "{}") == {}
    cache.class_path(KAFKA)
    assert cache.verify(KAFKA) == []
    assert not list(own_cache.parent.glob("*.partial"))
