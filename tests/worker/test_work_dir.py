"""A worker's local folder: its own, whatever others on the machine do."""

import os
import subprocess
import sys
from pathlib import Path

from headrace.consumers.worker import make_work_dir


def test_folders_of_killed_workers_are_cleared_and_those_of_running_ones_and_of_others_stay(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    kept = [tmp_path / f"worker-{os.getppid()}", tmp_path / "somebody elses", tmp_path / "worker-notes"]
    for folder in [*kept, tmp_path / f"worker-{gone.pid}"]:
        folder.mkdir()
    own = tmp_path / f"worker-{os.getpid()}"
    make_work_dir(own)
    assert sorted(tmp_path.iterdir()) == sorted([*kept, own])
