"""The worker's event loop starts fast: what takes seconds to import is imported in the processes that use it."""

import subprocess
import sys


def test_the_worker_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, headrace.consumers.worker; print([m for m in ('torch', 'transformers', 'deepspeed', 'fastapi') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
