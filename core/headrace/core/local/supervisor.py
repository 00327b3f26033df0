"""Runs one Java program and ends it together with the process that asked for it, however that process ends.

Run as `python -I -S supervisor.py PARENT_PID GRACE_SECONDS PROGRAM ARGUMENT...`, with a pipe as standard input. Prints
the child's process id, then waits for the first of three events, and exits with the child's status.

- The pipe closes or a byte arrives on it: the parent ended (also by SIGKILL, the kernel closes its end) or asked to stop.
- This process has another parent than PARENT_PID: looked at once a second, because a child that the parent forked
  without exec keeps the pipe's other end open.
- The child ended by itself.

Guarantees: SIGTERM first, SIGKILL after the grace; no child is left behind. If this process itself is killed, Linux sends the child SIGTERM
(PR_SET_PDEATHSIG, safe here: the one thread that forks lives as long as the process). Limitations: on macOS a SIGKILL of this process
leaves the child running. Only the standard library, no import of headrace: it stays small (about 10 MB) and starts in 20 ms.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
LOOK_AT_PARENT_S = 1.0


def die_with_supervisor() -> None:
    """In the child before exec: ask Linux for SIGTERM when the supervisor ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM, and SIGKILL if that was not enough."""
    child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def main() -> int:
    """See the module."""
    parent, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    stop_signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    asked: list[int] = []
    for number in stop_signals:
        signal.signal(number, lambda received, _frame: asked.append(received))
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # its byte on the wake-up pipe is what counts
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            close_fds=False,  # the folder's lock continues to the child: it is free only when nothing writes there any more
            preexec_fn=die_with_supervisor if sys.platform == "linux" else None,  # noqa: PLW1509  (no threads here)
        )
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        return 127
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()
    while child.poll() is None:
        ready, _, _ = select.select([0, wake_read], [], [], LOOK_AT_PARENT_S)
        if wake_read in ready:
            os.read(wake_read, 4096)
        if 0 in ready or asked or os.getppid() != parent:
            end(child, grace_s)
    with contextlib.suppress(OSError):  # the reader may be gone
        sys.stdout.close()
    # A signal as the shell tells it, so that the caller can say which one.
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main())
