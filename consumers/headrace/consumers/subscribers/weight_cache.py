"""Downloaded weights on the local disk: verified, resumable, bounded.

Guarantees: a folder that `fetch` returns has exactly the files of its manifest, each checked by SHA-256, and the manifest checked by the
digest that was published; what a former process had downloaded is used again if it is still right. `prune` keeps the latest `keep`
folders and whatever it is told to spare. Limitations: sharing; one engine has one folder of its own.
"""

import shutil
from pathlib import Path
from urllib.parse import quote

from headrace.core.private_folder import make_private_folder
from headrace.core.store import ObjectStore, fetch_folder
from headrace.schemas.weights import WeightsPublished


class WeightCache:
    """Folders of weights under `root`, which belongs to this cache alone.

    Args:
        store: Where versions are.
        root: Made at the first download.
        keep: Versions kept after `prune`, at least 1.
    """

    def __init__(self, store: ObjectStore, root: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self._store = store
        self._root = root
        self._keep = keep

    def fetch(self, published: WeightsPublished) -> Path:
        """Download a version, or continue where a download stopped. Blocks.

        Raises:
            StoreError: see `fetch_folder`.
        """
        make_private_folder(self._root)
        folder = self.folder(published)
        fetch_folder(self._store, published.uri, published.digest, folder)
        folder.touch()  # `prune` goes by the last use
        return folder

    def folder(self, published: WeightsPublished) -> Path:
        """Where a version is or will be. Incarnation and digest come from a message: quoted, they name nothing outside `root`."""
        name = f"{published.incarnation}-v{published.policy_version}-{published.digest[:16]}"
        return self._root / f"weights-{quote(name, safe='')}"

    def remove(self) -> None:
        """Remove all of it: the model is gone. Blocks."""
        shutil.rmtree(self._root, ignore_errors=True)

    def prune(self, current: WeightsPublished) -> None:
        """Remove all but the latest versions; `current` stays in any case. Blocks."""
        spared = self.folder(current)
        others = [path for path in self._root.glob("*weights-*") if path != spared]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[self._keep - 1 :]:
            shutil.rmtree(path, ignore_errors=True)  # a file held open elsewhere goes the next time
