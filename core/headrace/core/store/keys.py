"""Keys of objects and their URIs. Both come out of messages, so nothing is taken on trust.

A key is `a/b/c`: 1 to 900 bytes of UTF-8, components of 1 to 255 bytes. Refused: absolute paths, empty components, `.` and `..`,
control characters, backslashes, and the names that file stores use for files that are being written.
"""

from headrace.core.store.interface import InvalidKeyError

MAX_KEY_BYTES = 900
"""S3 takes 1,024 with the store's prefix."""
TEMPORARY_PREFIX = ".headrace-partial-"
STORE_FILE = ".headrace-store"
"""In the folder of a file store: it is one, also when it has no object."""


def check_key(key: str) -> str:
    """The key, if it is one.

    Raises:
        InvalidKeyError: says what is wrong with it.
    """
    if fault := _fault(key):
        raise InvalidKeyError(f"{key[:200]!r} is no object key: {fault}")
    return key


def check_prefix(prefix: str) -> str:
    """A prefix for `list`: the beginning of a key."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def key_of(uri: str, base: str) -> str:
    """The key of a URI under `base` (the store's URL without a slash at its end).

    Raises:
        InvalidKeyError: the URI is outside of this store, or its key is none.
    """
    if not uri.startswith(base + "/"):
        raise InvalidKeyError(f"{uri[:200]!r} is not in this object store ({base}): every process must have the same store.url")
    return check_key(uri[len(base) + 1 :])


def _fault(key: str) -> str | None:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "it is not UTF-8"
    if not 1 <= size <= MAX_KEY_BYTES:
        return f"it has {size} bytes, allowed are 1 to {MAX_KEY_BYTES}"
    if "\\" in key or not key.isprintable():
        return "it has a backslash or a control character"
    return next(filter(None, map(_part_fault, key.split("/"))), None)


def _part_fault(part: str) -> str | None:
    if part in {"", ".", ".."}:
        return "it has an empty component, '.' or '..'"
    if len(part.encode()) > 255:
        return "a component is longer than 255 bytes"
    if reserved := next((prefix for prefix in (TEMPORARY_PREFIX, STORE_FILE) if part.startswith(prefix)), None):
        return f"{reserved} is reserved"
    return None
