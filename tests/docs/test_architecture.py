"""The architecture page names every file of the worker and of the trainer, and no file that is gone."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("part", ["trainer", "consumers", "gateway"])
def test_every_file_of_a_part_is_named(part: str) -> None:
    folder = ROOT / part / "headrace" / part
    files = {path.name for path in folder.rglob("*.py") if path.name != "__init__.py"}
    assert len(files) > 30
    assert sorted(name for name in files if f"`{name}`" not in PAGE and not re.search(rf"`[\w/]+/{re.escape(name)}`", PAGE)) == []


def test_no_file_is_named_that_does_not_exist() -> None:
    names = {path.name for path in ROOT.glob("*/headrace/**/*.py")}
    named = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+\.py)`", PAGE)}
    assert sorted(named - names - {"__init__.py"}) == []


def test_every_file_that_the_page_links_is_there():
    for link in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
