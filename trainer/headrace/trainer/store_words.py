"""What rank 0 says at the world's store to ranks without a pipe: those that a launcher (torchrun, deepspeed) started on another node.

Guarantees: words are heard in their order, each once by everybody; who waits for one is in no collective, which would time out in a quiet
hour. Limitations: deleting them.
"""

import time
from contextlib import suppress
from typing import Literal

Word = Literal["run", "end"]

_PEEK_SECONDS = 0.05
_told = 0


def tell(word: Word) -> None:
    """Say what comes next; at rank 0."""
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415 - the engine imported torch

    global _told  # noqa: PLW0603 - counts the words of this process's one world
    with suppress(RuntimeError):  # the store is gone, and so are those who look at it
        _get_default_store().set(_key(_told), word)
    _told += 1


def hear(number: int) -> str:
    """The word of this number, from 0, when it is said.

    Raises:
        RuntimeError: the store is gone.
    """
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415 - the engine imported torch

    store = _get_default_store()
    # Looked at, not waited for: a wait has a time limit, and complains in the log when a quiet hour reaches it.
    while not store.check([_key(number)]):
        time.sleep(_PEEK_SECONDS)
    word: bytes = store.get(_key(number))
    return word.decode()


def _key(number: int) -> str:
    return f"headrace-plan-{number}"
