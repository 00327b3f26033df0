"""Environments of the hosted services' own clients: what they pin contradicts what Headrace needs, so each has one of its own.

They lie under `.conformance/` (not in git), made once and again when what they should hold changes. Guarantees: a made one is whole; two
that make the same wait for each other.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HOME = Path(__file__).parents[2] / ".conformance"

ART_0518 = (
    ("--no-deps", "openpipe-art==0.5.18"),
    ("openai>=2.14,<3", "litellm<=1.82.0", "polars", "tqdm", "python-dotenv", "numpy", "pyarrow", "httpx", "pydantic"),
)
"""Its training half (torch and unsloth) is not needed to call a service: so without its dependencies, and then those that it imports."""

ART = (("openpipe-art==0.5.23", "pyarrow"),)
"""With all that it depends on, and what `model.log` imports; it needs Python 3.12."""

FIREWORKS_SDK = (("fireworks-ai[training-sdk]==1.2.30",),)
"""With what its deployment manager imports; no torch."""


def newer_python() -> str | None:
    """A Python of at least 3.12 on this machine: ours, one of the path, or one of pyenv's; None where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    named = [found for minor in (12, 13) if (found := shutil.which(f"python3.{minor}")) is not None]
    installed = [str(found) for minor in (12, 13) for found in sorted(pyenv.glob(f"3.{minor}.*/bin/python"), reverse=True)]
    for candidate in (sys.executable, *named, *installed):
        asked = [candidate, "-c", "import sys; sys.exit(sys.version_info < (3, 12))"]  # a pyenv shim may name a version that is not there
        if subprocess.run(asked, capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def client_python(name: str, installs: Sequence[Sequence[str]], python: str = sys.executable) -> Path:
    """The Python of an environment that holds these packages; made if it is not there.

    Args:
        name: Of the environment.
        installs: Arguments of one `uv pip install` each, in order.
        python: That the environment is made with.
    """
    HOME.mkdir(exist_ok=True)
    folder, stamp = HOME / name, repr((installs, python))
    with (HOME / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "installed"
        if not made.exists() or made.read_text(encoding="utf-8") != stamp:
            shutil.rmtree(folder, ignore_errors=True)
            uv = Path(sys.executable).with_name("uv")
            subprocess.run([uv, "venv", "--quiet", "--python", python, folder], check=True)
            for arguments in installs:
                subprocess.run([uv, "pip", "install", "--quiet", "--python", folder / "bin" / "python", *arguments], check=True)
            made.write_text(stamp, encoding="utf-8")
    return folder / "bin" / "python"


def run_client(python: Path, script: Path, *arguments: str, seconds: float, cwd: Path) -> str:
    """Run a script of a client to its end; returns what it printed, which is in the error where it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "WANDB_", "PYTHON"))}
    done = subprocess.run(
        [python, script, *arguments], capture_output=True, text=True, timeout=seconds, cwd=cwd, env=environment, check=False
    )
    assert done.returncode == 0, f"{script.name} ended with {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout
