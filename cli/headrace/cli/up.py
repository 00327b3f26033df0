"""`headrace up`: a Kafka, and with `--s3` an S3 server, on this machine until Ctrl-C; `headrace env`: how other terminals reach them.

`up` prints the `export` lines, each when its service is ready; everything else goes to stderr. It also keeps them in the file `env` of its
folder, for its own user only, and holds a lock on the file while it runs. Guarantees: `env` prints the lines of services that run, never
those of services that have ended.
"""

import fcntl
import queue
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from headrace.core.errors import HeadraceError
from headrace.core.local import LocalBroker, LocalS3, LocalServiceError
from headrace.core.settings import Settings

BUCKET = "headrace"
"""The bucket that `--s3` makes and HEADRACE_STORE__URL names."""
INTERRUPTED = 130
ENV_FILE = "env"
WAIT_SECONDS = 120.0


def up(
    data_dir: Annotated[Path, typer.Option(help="Folder for data, keys and logs; survives restarts.")] = Path(".headrace"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Kafka's port; 0: that of the last start, or a free one.")] = 0,
    s3: Annotated[bool, typer.Option("--s3", help="Start an S3 server as well.")] = False,
    s3_port: Annotated[int, typer.Option(min=0, max=65535, help="Its port; 0: that of the last start, or a free one.")] = 0,
) -> None:
    """Start Kafka (and S3) on this machine and keep them until Ctrl-C."""
    configured = Settings().kafka.bootstrap_servers
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that both leave in order
    ready = False
    try:
        with ExitStack() as running:
            services: list[LocalBroker | LocalS3] = []
            exports: dict[str, str] = {}
            if configured:
                typer.echo(f"Using the Kafka at {configured} (setting kafka.bootstrap_servers); none is started here.", err=True)
            else:
                broker = running.enter_context(LocalBroker(data_dir, port))
                services.append(broker)
                exports |= _exported({"HEADRACE_KAFKA__BOOTSTRAP_SERVERS": broker.bootstrap_servers})
            if s3:
                server = running.enter_context(LocalS3(data_dir, s3_port, bucket=BUCKET))
                services.append(server)
                exports |= _exported(
                    {
                        "HEADRACE_STORE__URL": f"s3://{BUCKET}/store",
                        "HEADRACE_S3__ENDPOINT_URL": server.endpoint_url,
                        "HEADRACE_S3__ACCESS_KEY_ID": server.access_key,
                        "HEADRACE_S3__SECRET_ACCESS_KEY": server.secret_key,
                    }
                )
            if services:
                running.enter_context(_kept(data_dir / ENV_FILE, exports))
                ready = True
                typer.echo(f"Ready. Data and logs are in {data_dir.absolute()}. Ctrl-C stops.", err=True)
                _wait_for_the_first_to_end(services)
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        raise typer.Exit(0 if ready else INTERRUPTED) from None


def env(
    data_dir: Annotated[Path, typer.Option(help="The folder of `headrace up`.")] = Path(".headrace"),
    wait: Annotated[bool, typer.Option("--wait", help="Wait until `headrace up` is ready, two minutes at most.")] = False,
) -> None:
    """Print the `export` lines of the services that `headrace up` runs: eval "$(headrace env)"."""
    file = data_dir / ENV_FILE
    until = time.monotonic() + (WAIT_SECONDS if wait else 0)
    while (lines := _read_kept(file)) is None:
        if time.monotonic() >= until:
            where = f"no `headrace up` is ready in {data_dir.absolute()}"
            raise HeadraceError(f"{where}: start it there, or name its folder with --data-dir (its own messages say what it waits for)")
        time.sleep(0.2)
    typer.echo(lines, nl=False)


def _export_line(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)}"


def _exported(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        typer.echo(_export_line(name, value))
    return variables


@contextmanager
def _kept(file: Path, variables: dict[str, str]) -> Iterator[None]:
    """Keep the lines in a file of this user's own, with a lock that ends with this process."""
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    with file.open("w", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.writelines(f"{_export_line(name, value)}\n" for name, value in variables.items())
        stream.flush()
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _read_kept(file: Path) -> str | None:
    """The lines, if the process that wrote them still runs."""
    try:
        with file.open(encoding="utf-8") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return file.read_text(encoding="utf-8") or None
    except FileNotFoundError:
        pass
    return None


def _wait_for_the_first_to_end(services: list[LocalBroker | LocalS3]) -> None:
    """Returns never but by KeyboardInterrupt; a service that ends by itself is an error."""
    ended: queue.SimpleQueue[LocalBroker | LocalS3] = queue.SimpleQueue()

    def watch(service: LocalBroker | LocalS3) -> None:
        service.wait()
        ended.put(service)

    for service in services:
        threading.Thread(target=watch, args=(service,), daemon=True).start()
    service = ended.get()
    raise LocalServiceError(
        f"{service.label} ended by itself with status {service.wait()}; the others are stopped. Its log: {service.log_file}"
    )
