"""Compiles `hosted_scan.c`: when the package is built (`hatch_build.py`), or by `python -m headrace.core.hosted_scan_build`.

It is a plain shared library, called by ctypes: one for all versions of Python, without Python's headers. Its name has a digest of its
source, so that one that was made of another source is never loaded.
Guarantees: needs nothing but the standard library; a library is whole or not there, also while others load it; without a C compiler, or
with one that fails, it says so and makes nothing. Gives up: Windows; there and without a compiler numpy reads the entries
(`hosted_columns.py`).
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("hosted_scan.c")
# No -march: the wheel may be installed on another machine.
_OPTIONS = ("-std=c99", "-O3", "-fPIC", "-shared")
_SECONDS = 60


class NotCompiledError(Exception):
    """There is no library; says why."""


def library(folder: Path = SOURCE.parent) -> Path:
    """Where the library of the present source belongs.

    Raises:
        OSError: the source is not there.
    """
    return folder / f"{SOURCE.stem}-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"


def compile_scan(folder: Path = SOURCE.parent) -> Path:
    """Make the library, if it is not there, and take away those of other sources.

    Raises:
        NotCompiledError: no compiler, it fails, or the folder can't be written.
    """
    made = library(folder)
    if not made.exists():
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".hosted_scan") as name:
                new = Path(name, made.name)
                command = [*_compiler(), *_OPTIONS, "-o", str(new), str(SOURCE), "-lm"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603 - our own arguments
                if done.returncode != 0:
                    raise NotCompiledError(f"{shlex.join(command)}: {done.stderr.strip() or done.returncode}")
                new.chmod(0o755)
                new.replace(made)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotCompiledError(f"{type(error).__name__}: {error}") from error
    for other in folder.glob(f"{SOURCE.stem}-*.so"):
        if other != made:
            other.unlink(missing_ok=True)
    return made


def _compiler() -> list[str]:
    """`$CC`, or what Python was built with, or `cc`."""
    for named in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc"):
        command = shlex.split(named or "")
        if command and shutil.which(command[0]):
            return command
    raise NotCompiledError("there is no C compiler (cc)")


if __name__ == "__main__":
    try:
        print(compile_scan())  # noqa: T201 - a command
    except NotCompiledError as problem:
        sys.exit(f"not compiled: {problem}")
