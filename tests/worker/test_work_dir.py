"""A worker's local folder: its own, whatever others on the machine do."""

import os
import subprocess
import sys
from pathlib import Path

from headrace.consumers.worker.work_folder import WorkFolder

HOLDING = (
    "import sys; from pathlib import Path; from headrace.consumers.worker.work_folder import WorkFolder as W; w = W(Path(sys.argv[1])); "
)


def test_folders_of_killed_workers_are_cleared_and_those_of_running_ones_and_of_others_stay(tmp_path: Path) -> None:
    script = HOLDING + "(w.path / 'file').touch(); print(w.path, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        running = Path(other.stdout.readline().strip())
        kept = [running, tmp_path / "somebody elses", tmp_path / "worker-notes"]
        for folder in kept[1:]:
            folder.mkdir()
        reused = tmp_path / f"worker-{os.getppid()}"  # a dead worker's, whose number another process has by now
        reused.mkdir()
        own = WorkFolder(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([*kept, own.path])
        assert (running / "file").exists()
        other.kill()
        other.wait()
    second = WorkFolder(tmp_path)
    assert not running.exists()
    assert sorted(tmp_path.iterdir()) == sorted([*kept[1:], own.path, second.path])
    own.remove()
    second.remove()
    assert sorted(tmp_path.iterdir()) == sorted(kept[1:])


def test_workers_with_one_process_id_in_two_containers_have_folders_of_their_own(tmp_path: Path) -> None:
    first = WorkFolder(tmp_path)
    (first.path / "file").touch()
    second = WorkFolder(tmp_path)
    assert (first.path.name, second.path.name) == (f"worker-{os.getpid()}", f"worker-{os.getpid()}-2")
    assert (first.path / "file").exists()
    first.remove()
    second.remove()
