"""`headrace worker` that ends with the process that started it, and, if asked to, with one of its guarantees broken on purpose.

Usage: python -m tests.chaos.worker_main PARENT_PID [SABOTAGE]
"""

import sys
from pathlib import Path

from tests.chaos.store_fault import install

from headrace.cli.main import main
from headrace.core.processes import die_with
from headrace.core.settings import Settings


def work(sabotage: str | None) -> None:
    """Be a worker until SIGTERM."""
    if sabotage is not None:
        from tests.chaos.sabotage import SABOTAGES  # noqa: PLC0415 - imports what it breaks

        SABOTAGES[sabotage]()
    store = Settings().store.url
    if store.startswith("file://"):
        install(Path(store.removeprefix("file://")))
    sys.argv = ["headrace", "worker"]
    main()


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    work(sys.argv[2] if len(sys.argv) > 2 else None)
