"""When the archive of classes is made, and that nothing depends on it.

A script stands in for Java where only the when matters: the real dump takes 9 s.
"""

import os
from pathlib import Path

import pytest

from headrace.core.local import LocalBroker, cache
from headrace.core.local.class_archive import sharing_options
from headrace.core.local.distribution import KAFKA

DUMPS = '#!/bin/sh\nfor a; do case "$a" in -XX:SharedArchiveFile=*) echo x > "${a#*=}";; esac; done\n'
CANNOT = "#!/bin/sh\necho 'Unrecognized option: -Xshare:dump' >&2\nexit 1\n"


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def jars(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "kafka"
    folder.mkdir()
    (folder / "a.jar").touch()
    return [folder / "a.jar"]


def test_it_is_made_once_and_anew_when_a_jar_or_the_java_changed(tmp_path: Path, jars: list[Path]) -> None:
    recorded: list[str] = []
    java = script(tmp_path / "java", DUMPS)
    first, _ = sharing_options(java, jars, ["-Xmx1m"], recorded.append)
    assert Path(first.partition("=")[2]).exists()
    assert sharing_options(java, jars, ["-Xmx1m"], recorded.append)[0] == first
    assert len(recorded) == 1

    os.utime(jars[0], ns=(1, 1))
    second, _ = sharing_options(java, jars, ["-Xmx1m"], recorded.append)
    third, _ = sharing_options(script(tmp_path / "other", DUMPS), jars, ["-Xmx1m"], recorded.append)
    fourth, _ = sharing_options(script(tmp_path / "another", DUMPS), jars, ["-Xmx1m"], recorded.append)
    assert len({first, second, third, fourth}) == 4
    assert len(recorded) == 4
    kept = {str(path) for path in jars[0].parent.glob("classes-*")}  # they are large: the newest three
    assert kept == {option.partition("=")[2] for option in (second, third, fourth)}
    assert sharing_options(java, jars, ["-Xmx1m"], recorded.append)[0] == second
    assert len(recorded) == 4


def test_a_java_that_cannot_make_one_is_asked_once_and_used_without(
    tmp_path: Path, jars: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    recorded: list[str] = []
    java = script(tmp_path / "java", CANNOT)
    assert sharing_options(java, jars, [], recorded.append) == []
    assert "Unrecognized option: -Xshare:dump" in caplog.text
    assert sharing_options(java, jars, [], recorded.append) == []
    assert len(recorded) == 1


def test_a_corrupt_archive_does_not_keep_the_broker_from_starting(kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache.class_path(KAFKA)[0].parent
    corrupt = tmp_path / "corrupt"  # for whichever Java: the cache keeps one for each of several
    corrupt.mkdir()
    for archive in folder.glob("classes-*.jsa"):
        data = bytearray(archive.read_bytes())
        data[len(data) // 2 : len(data) // 2 + 4096] = os.urandom(4096)
        (corrupt / archive.name).write_bytes(data)
    monkeypatch.setattr(
        "headrace.core.local.broker.sharing_options",
        lambda *_: [option.replace(f"{folder}/classes-", f"{corrupt}/classes-") for option in sharing_options(*_)],
    )
    with LocalBroker(tmp_path):
        text = (tmp_path / "kafka" / "server.out").read_text()
    assert "checksum verification failed" in text.lower()
