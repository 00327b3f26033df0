"""Starting a Java service on its folder: space, ports, configuration, process, and the wait until it answers.

Guarantees: returns a service that answered as itself, or raises with the service's last words and leaves no process.
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core.local.cache import class_path, verify
from headrace.core.local.distribution import Distribution, find_java
from headrace.core.local.errors import LocalServiceError
from headrace.core.local.folder import ServiceFolder, ServiceNote
from headrace.core.local.probe import choose
from headrace.core.local.process import JavaProcess, tail

START_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.05
LEAST_FREE_BYTES = 200_000_000
PORT_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What `launch` has to know of a service."""

    distribution: Distribution
    port_count: int
    """Ports it listens on; the first is the clients'."""
    address: Callable[[int], str]
    """Port for clients -> what clients are told."""
    prepare: Callable[[Path, list[Path], list[int]], Sequence[str]]
    """(java, jars, ports) -> Java's arguments; writes the configuration before."""
    is_ready: Callable[[int], bool]
    """Port for clients -> whether this very service answers there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A service that answered."""

    process: JavaProcess
    address: str


def launch(program: Program, path: Path, fixed_port: int | None) -> Running:
    """Start `program` on the folder `path`, fetching its jars first if this is the first time.

    Args:
        program: The service.
        path: Its folder; made if missing.
        fixed_port: The port for clients; None takes that of the last start if it is free, else any.

    Raises:
        LocalServiceError: see the classes of the services.
    """
    java = find_java()
    jars = class_path(program.distribution)
    folder = ServiceFolder(path, program.distribution.label)
    with folder.lock() as lock:
        _check_space(program, folder)
        note = folder.note()
        remembered = note.ports if note else []
        for _ in range(PORT_ATTEMPTS):
            ports = choose(program.port_count, fixed=fixed_port, remembered=remembered)
            address = program.address(ports[0])
            note = ServiceNote(address=address, ports=ports, pid=0, owner_pid=os.getpid())
            folder.write_note(note)
            arguments = program.prepare(java, jars, ports)
            process = JavaProcess(java, arguments, jars=jars, output=folder.output_file, lock=lock)
            try:
                _wait_until_ready(program, folder, process, ports[0])
                folder.write_note(ServiceNote(address=address, ports=ports, pid=process.pid, owner_pid=os.getpid()))
            except PortLostError:
                process.stop()
                remembered = []
                if fixed_port:
                    raise
            except BaseException:
                process.stop()
                raise
            else:
                return Running(process=process, address=address)
    raise LocalServiceError(
        f"{program.distribution.label} lost its port to another program {PORT_ATTEMPTS} times; start it again, or name a port"
    )


class PortLostError(LocalServiceError):
    """The service could not listen on a port that was free a moment before."""


def corrupt_jars(distribution: Distribution) -> str:
    """A line for an error message that names corrupt jars; empty if all are right. The next start fetches them again."""
    wrong = verify(distribution)
    if not wrong:
        return ""
    return f"\nThe cause is probably a corrupt jar: {', '.join(map(str, wrong))}. Start once more: it is downloaded again"


def _check_space(program: Program, folder: ServiceFolder) -> None:
    if (free := shutil.disk_usage(folder.path).free) < LEAST_FREE_BYTES:
        raise LocalServiceError(
            f"no disk space: {folder.path} has {free / 1e6:.0f} MB free, {program.distribution.label} wants "
            f"{LEAST_FREE_BYTES / 1e6:.0f} MB. Free some, or name another data folder"
        )


def _wait_until_ready(program: Program, folder: ServiceFolder, process: JavaProcess, port: int) -> None:
    label = program.distribution.label
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        if program.is_ready(port):
            return
        try:
            status = process.wait(LOOK_EVERY_S)
        except TimeoutError:
            continue
        words = tail(folder.output_file, folder.log_file)
        # Kafka's words, and S3Proxy's.
        is_lost = "Address already in use" in words or "Failed to bind to" in words
        kind = PortLostError if is_lost else LocalServiceError
        raise kind(
            f"{label} ended with status {status} while it started; its last words, from {folder.log_file}:\n"
            f"{words}{corrupt_jars(program.distribution)}"
        )
    raise LocalServiceError(
        f"{label} did not answer within {START_TIMEOUT_S:.0f} s; its last words, from {folder.log_file}:\n{tail(folder.log_file)}"
    )
