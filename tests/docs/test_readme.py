"""README and tutorial: every command works as it is written, and every link leads somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.app import command_names, load_command

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()


def commands(page: str) -> list[str]:
    """Lines of the page's bash blocks without their comments."""
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    return [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_the_readme_is_short_and_quotes_the_quick_start() -> None:
    assert len(README.splitlines()) <= 120
    assert (ROOT / "docs" / "snippets" / "quick-start.sh").read_text() in README


@pytest.mark.parametrize(("page", "snippet"), [("training-jobs.md", "training-job.sh"), ("agents.md", "producer.py")])
def test_a_page_quotes_its_snippet(page: str, snippet: str) -> None:
    """`tests/gateway/test_training_jobs_e2e.py` runs the first; the second is the producer of the agents' guide."""
    assert (ROOT / "docs" / "snippets" / snippet).read_text() in (ROOT / "docs" / page).read_text()


def test_the_glossary_has_at_most_forty_words() -> None:
    rows = re.findall(r"^\| ([a-z, -]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)[1:]
    words = [word for row in rows for word in row.split(", ")]
    assert 30 <= len(words) <= 40
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_every_file_that_a_page_links_is_there(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        assert link.startswith("http") or (ROOT / link).exists(), link


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_every_command_that_a_page_shows_exists_with_its_options(page: str) -> None:
    text = (ROOT / "docs" / page).read_text().replace("\\\n", " ")
    for line in re.findall(r"^(?:\.venv/bin/)?headrace (.+)$", text, re.MULTILINE):
        words = line.partition(" #")[0].partition(" | ")[0].split()
        assert words[0] in command_names(), line
        command = load_command(words.pop(0))
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, line


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_tutorial_runs_as_it_is_written_and_holds_the_quick_start(tmp_path: Path) -> None:
    """From an empty folder to a served, replayed and exported model, with Kafka and S3 of its own."""
    lines = commands(TUTORIAL)
    missing = [line for line in commands(README.split("## Connect")[0]) if line not in lines]
    assert missing == []
    script = "\n".join(line for line in lines if not line.startswith("source ")).replace("8100", "0")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "80"}
    with (tmp_path / "output.txt").open("wb") as out:  # not a pipe: what runs in the background would hold it open
        ran = subprocess.Popen(
            ["bash", "-m", "-e", "-o", "pipefail", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ran.wait(timeout=300)
        finally:
            subprocess.run(["pkill", "-TERM", "-s", str(ran.pid)], check=False)
            ran.kill()
    output = (tmp_path / "output.txt").read_text()
    for log in sorted((tmp_path / "first").glob("*.log")):
        sys.stdout.write(f"--- {log.name}\n{log.read_text()[-3000:]}\n")
    assert ran.returncode == 0, output
    assert '"policy_version":1' in output.replace(" ", "")
    assert "equal to the ledger, bit for bit" in output
    assert (tmp_path / "first" / "exported" / "model.safetensors").is_file()
    assert not (tmp_path / "first" / "exported" / "adapter_model.safetensors").exists()
