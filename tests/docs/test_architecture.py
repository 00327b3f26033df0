"""The architecture page names every file of the worker and of the trainer, and no file that is gone."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("part", ["trainer", "consumers"])
def test_every_file_of_a_part_is_named_and_no_other(part: str):
    folder = ROOT / part / "headrace" / part
    heading = {"trainer": "The trainer, file by file", "consumers": "The worker, file by file"}[part]
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.name != "__init__.py"}
    assert set(re.findall(r"`([\w/]+\.py)`", section)) == files


def test_every_file_of_the_gateway_is_named():
    files = {path.name for path in (ROOT / "gateway" / "headrace" / "gateway").rglob("*.py")}
    assert len(files) > 60
    assert sorted(name for name in files if f"`{name}`" not in PAGE) == []


def test_every_file_that_the_page_links_is_there():
    for link in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
