"""What a store can say no with. Missing, different and unavailable are told apart: only the first two refuse a group (rule 13)."""

import errno

from headrace.core.errors import HeadraceError


class StoreError(HeadraceError):
    """Base of all errors of the object store."""


class InvalidKeyError(StoreError):
    """A key or URI that names nothing in this store; URIs come from messages, so this is said before anything is touched."""


class ObjectNotFoundError(StoreError):
    """The store answered: there is no such object."""


class ObjectExistsError(StoreError):
    """The name is taken by an object with other content. Nothing was changed."""


class DigestMismatchError(StoreError):
    """Content that differs from the SHA-256 it must have: changed, truncated, or too long."""


class StoreUnavailableError(StoreError):
    """The store could not answer: network, server error, credentials, no bucket, no permission. Trying later may help."""


class StoreFullError(StoreUnavailableError):
    """No space, or no quota, for the object. Nothing of it was left behind."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def plain_os_error(error: OSError, where: str) -> StoreUnavailableError:
    """An operating system's error as ours, with the place; a full disk is told apart."""
    if error.errno in _FULL:
        return StoreFullError(f"no space for {where} ({error.strerror}): make room there, or set another place for it")
    named = f" ({error.filename})" if error.filename else ""
    return StoreUnavailableError(f"{where}: {error.strerror or error}{named}")
