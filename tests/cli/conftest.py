"""Running the command line in this process, with an environment of its own."""

import asyncio
import os
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.cli.recorded import Recorded, write_recorded

from headrace.cli.main import main
from headrace.core.settings import KafkaSettings, Settings, TopicSettings


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return orjson.loads(self.out)


Headrace = Callable[..., Ran]


@pytest.fixture
def headrace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Headrace:
    """`headrace("topics", "show", HEADRACE_X="…")` in an empty folder, with no other settings than those given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    for name in os.environ:
        if name.upper().startswith("HEADRACE_"):
            monkeypatch.delenv(name)

    def run(*arguments: str, **environment: str) -> Ran:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def recorded(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A ledger with reports, states and events under topics of its own; its environment is for `headrace(…)`."""
    settings = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka), topics=TopicSettings(prefix=f"t{uuid.uuid4().hex[:10]}.", partitions=2)
    )
    return asyncio.run(write_recorded(settings, tmp_path_factory.mktemp("recorded")))
