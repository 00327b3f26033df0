"""Ports on the loopback address.

Limitations: between choosing a port and the service's own bind another program may take it; services that chose their
ports themselves start again with others then.
"""

import contextlib
import socket

from headrace.core.local.errors import LocalServiceError

HOST = "127.0.0.1"


def is_free(port: int) -> bool:
    """True if a server could listen on `port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does: closed connections do not count
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def choose(count: int, *, fixed: int | None, remembered: list[int]) -> list[int]:
    """`count` free ports: those remembered while they are free, the first `fixed` if given.

    Raises:
        LocalServiceError: `fixed` is taken.
    """
    if fixed and not is_free(fixed):
        raise LocalServiceError(f"port {fixed} is taken by another program; name another port, or none to have a free one chosen")
    chosen: list[int] = []
    with contextlib.ExitStack() as held:  # held open until all are known, so that they differ
        for place in range(count):
            wish = fixed if place == 0 and fixed else next(iter(remembered[place : place + 1]), None)
            if wish and wish not in chosen and (wish == fixed or is_free(wish)):
                chosen.append(wish)
                continue
            probe = held.enter_context(socket.socket())
            probe.bind((HOST, 0))
            chosen.append(probe.getsockname()[1])
    return chosen
