"""A worker starts fast: what takes seconds to import is imported in the processes that use it, and nowhere else."""

import subprocess
import sys


def _imported(code: str, modules: tuple[str, ...]) -> str:
    """Which of the modules a process has after running the code."""
    program = f"import sys\n{code}\nprint([name for name in {modules} if sys.modules.get(name) is not None])"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_the_worker_imports_neither_torch_nor_transformers() -> None:
    assert _imported("import headrace.consumers.worker", ("torch", "transformers", "deepspeed", "fastapi")) == "[]"


def test_a_child_of_the_headrace_script_which_imports_it_again_imports_no_command() -> None:
    assert _imported("import headrace.cli.main", ("headrace.cli.app", "typer", "pydantic", "aiokafka")) == "[]"
