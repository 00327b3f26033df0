"""The errors of a store. Only `ObjectNotFoundError` and `DigestMismatchError` are final, and may refuse a group or stop a model (rule 13).

A store raises them only if it knows: it answered that there is no such object, or the object was read whole and has another digest.
Whatever else happens, known or not, is a `StoreUnavailableError`: an outage (`headrace.core.outages`), which is waited for.
"""

import errno

from headrace.core.errors import HeadraceError, OutageError


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


class StoreUnavailableError(StoreError, OutageError):
    """The store did not answer, or its answer is not whole or not understood: network, server error, permission. Trying later may help."""


class StoreMisconfiguredError(StoreUnavailableError):
    """No bucket, no folder, or refused credentials: it helps to correct the settings or the store, while waiting alone does not.

    At the start of a process this ends the process. Later it is an outage like any other: the settings worked before.
    """


class StoreFullError(StoreUnavailableError):
    """No space, or no quota, for the object. Nothing of it was left behind."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def plain_os_error(error: OSError, where: str) -> StoreUnavailableError:
    """An operating system's error as ours, with the place; a full disk is told apart."""
    if error.errno in _FULL:
        return StoreFullError(f"no space for {where} ({error.strerror}): make room there, or set another place for it")
    named = f" ({error.filename})" if error.filename else ""
    return StoreUnavailableError(f"{where}: {error.strerror or error}{named}")
