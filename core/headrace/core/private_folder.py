"""Folders for data: only the user of the process can enter them.

Guarantees: each folder that `make_private_folder` creates, missing parents too, has mode 700. A folder that exists keeps its mode: an
operator can open one on purpose.
"""

from pathlib import Path

_OWNER_ALONE = 0o700


def make_private_folder(folder: Path) -> None:
    """Create the folder and its missing parents; an existing folder stays as it is.

    Raises:
        OSError: it can't be created, or something else has its name.
    """
    try:
        folder.mkdir(mode=_OWNER_ALONE)
    except FileNotFoundError:
        make_private_folder(folder.parent)
        folder.mkdir(mode=_OWNER_ALONE, exist_ok=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
