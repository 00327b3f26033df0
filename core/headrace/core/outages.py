"""Outages: the store, Kafka, a disk or the clock fails, and not the work itself.

`outage_of` is the one place that decides which failures are outages. An outage never counts as an attempt of a batch, never refuses a group
and never stops a model: the caller waits and tries again (`outlast`). Guarantees: every error of the store except "not there", "other
content", "digest differs" and "invalid key" is an outage. Limitations: an error that is not known here is no outage. A library's unknown
errors are turned into `OutageError` where they are raised.
"""

import asyncio
import errno
import logging
import re
import shutil
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.core.errors import OutageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
_ERRNOS = frozenset(
    {
        # No room.
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        # No permission.
        *(errno.EROFS, errno.EACCES, errno.EPERM),
        # A disk or a network file system that does not answer.
        *(errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ELOOP, errno.EBUSY, errno.ENOLCK, errno.ETIMEDOUT),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN, errno.ESHUTDOWN),
        # This machine has no more of something.
        *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS),
    }
)
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""How safetensors, which is written in Rust, names the operating system's error."""


def outage_of(error: BaseException) -> str | None:
    """What does not work, as one line, if the error is an outage; None if it is the work's own failure.

    The error counts as an outage if it is one, or if it was raised from one (`raise … from`).
    """
    found: BaseException | None = error
    while found is not None:
        if _is_outage(found):
            return said(error)
        found = found.__cause__
    return None


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, OutageError):
        return True
    if isinstance(error, OSError):
        # shutil.Error collects the errors of many files, without a number.
        return error.errno in _ERRNOS or isinstance(error, ConnectionError | TimeoutError | shutil.Error)
    if type(error).__module__.partition(".")[0] == "safetensors":
        number = _RUST_ERROR.search(str(error))
        return number is not None and int(number[1]) in _ERRNOS
    return False


def said(error: BaseException) -> str:
    """The error as one line of text, which is never empty: many libraries raise errors without a message."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    if not text:
        return f"{name} (without a message)"
    return text if isinstance(error, OutageError) else f"{name}: {text}"


async def outlast(what: str, call: Callable[[], Awaitable[T]], *, waits: Callable[[], Awaitable[None]] | None = None) -> T:
    """Call until no outage is in the way; the pauses between two calls double, up to `LONGEST_PAUSE_SECONDS`.

    Logs one warning when the waiting begins and one line when it is over.

    Args:
        what: What is tried, for the log: "storing step 5 of m".
        call: Makes a fresh attempt each time.
        waits: Called once, when the waiting begins.

    Raises:
        Exception: what `call` raises, if it is no outage.
    """
    pause, waiting = FIRST_PAUSE_SECONDS, False
    while True:
        try:
            result = await call()
        except Exception as error:
            reason = outage_of(error)
            if reason is None:
                raise
            if not waiting:
                logger.warning("%s waits, and is tried again until it works: %s", what, reason)
                waiting = True
                if waits is not None:
                    await waits()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        else:
            if waiting:
                logger.warning("%s waits no longer: it works again", what)
            return result
