"""A table is whole in a pipe, and fits a terminal."""

import re

import pytest

from headrace.cli.arguments import print_table

COLUMNS = ("step", "reward", "note", "committed at", "detail")
ROWS = [["1", "0.5", "x" * 20, "2026-11-30T08:00:01Z", "word " * 30], ["2", "0.75", "y", "2026-11-30T08:00:02Z", "-"]]


def test_a_pipe_gets_every_column_on_one_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(COLUMNS, ROWS, important=("step", "reward", "detail"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(name in lines[0] for name in COLUMNS)
    assert ("word " * 30).strip() in lines[1]


def test_a_terminal_of_60_columns_keeps_the_important_ones_and_names_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    print_table(COLUMNS, ROWS, important=("step", "reward", "detail", "note"))
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= 60
    assert "committed at" not in out.splitlines()[0]
    assert "committed at" in out.splitlines()[-1]
    assert out.count("word") == 30
