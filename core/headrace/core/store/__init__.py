"""The object store: large, immutable things by name, in a folder (`file://`) or in S3 (`s3://`), behind one small interface.

    store = open_store(settings.store.url, settings.s3)
    manifest, ref = store_folder(store, "models/m/weights/1", folder, kind="weights", ...)
    fetch_folder(store, ref.uri, ref.digest, Path("weights"))

All calls block; from an event loop use `asyncio.to_thread`. A store may be used by many threads at once.
"""

from headrace.core.store.folders import fetch_folder, read_manifest, store_folder
from headrace.core.store.interface import (
    DigestMismatchError,
    InvalidKeyError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStore,
    StoredObject,
    StoreError,
    StoreFullError,
    StoreMisconfiguredError,
    StoreUnavailableError,
)
from headrace.core.store.opening import open_store

__all__ = [
    "DigestMismatchError",
    "InvalidKeyError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "ObjectStore",
    "StoreError",
    "StoreFullError",
    "StoreMisconfiguredError",
    "StoreUnavailableError",
    "StoredObject",
    "fetch_folder",
    "open_store",
    "read_manifest",
    "store_folder",
]
