"""Seeing the moment between store and commit.

A step's weights are in the store when their `manifest.json` appears under `models/<model>/<incarnation>/weights/<step>-<attempt>/`; its
transaction begins only after that, and after the snapshot's own. So: whose attempt it is is learnt when the folder appears (the attempt's
files still lie in that worker's working folder), the manifest is waited for by looking every half a millisecond, and the process that is
to be struck gets its SIGSTOP in the same thread, with nothing in between. Whether it came in time is not guessed but read, see `adversary`.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.crew import WorkerProcess

Strike = Callable[[WorkerProcess, str], None]
"""Gets the worker of the step, and the model's id."""
_LOOK_SECONDS = 0.0005
_WRITING_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A step whose weights have just been stored."""

    model_id: str
    step: int
    attempt: str
    worker: WorkerProcess


def strike_at_manifest(store: Path, workers: Sequence[WorkerProcess], seconds: float, strike: Strike) -> Stored | None:
    """Wait for the next step's weights, and call `strike` at that moment; blocks. None: no step came."""
    until = time.monotonic() + seconds
    known = {folder: _names(folder) for folder in _weights_folders(store)}
    changed = {folder: folder.stat().st_mtime_ns for folder in known}
    while time.monotonic() < until:
        for folder, before in list(changed.items()):
            now = folder.stat().st_mtime_ns
            if now == before:
                continue
            changed[folder] = now
            for name in _names(folder) - known[folder]:
                known[folder].add(name)
                step, _, attempt = name.partition("-")
                owner = next((worker for worker in workers if worker.holds(attempt)), None)
                if owner is not None and _appears(folder / name / "manifest.json"):
                    model_id = folder.parts[-3]
                    strike(owner, model_id)
                    return Stored(model_id=model_id, step=int(step), attempt=attempt, worker=owner)
        time.sleep(_LOOK_SECONDS)
        if not known:
            known = {folder: set() for folder in _weights_folders(store)}
            changed = dict.fromkeys(known, 0)
    return None


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _weights_folders(store: Path) -> list[Path]:
    return [folder for folder in store.glob("models/*/*/weights") if folder.is_dir()]


def _appears(manifest: Path) -> bool:
    until = time.monotonic() + _WRITING_SECONDS
    while not manifest.exists():
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def stop(worker: WorkerProcess, _model_id: str = "") -> None:
    """SIGSTOP to the worker and its ranks."""
    worker.signal(signal.SIGSTOP)
