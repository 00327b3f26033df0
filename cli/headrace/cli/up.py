"""`headrace up`: a Kafka, and with `--s3` an S3 server, on this machine until Ctrl-C.

Stdout gets nothing but the `export` lines that other terminals need, each when its service is ready; the rest goes to stderr.
"""

import queue
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from headrace.core.local import LocalBroker, LocalS3, LocalServiceError
from headrace.core.settings import Settings

BUCKET = "headrace"
"""The bucket that `--s3` makes and HEADRACE_STORE__URL names."""
INTERRUPTED = 130


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
            if configured:
                typer.echo(f"Using the Kafka at {configured} (setting kafka.bootstrap_servers); none is started here.", err=True)
            else:
                broker = running.enter_context(LocalBroker(data_dir, port))
                services.append(broker)
                typer.echo(f"export HEADRACE_KAFKA__BOOTSTRAP_SERVERS={broker.bootstrap_servers}")
            if s3:
                server = running.enter_context(LocalS3(data_dir, s3_port, bucket=BUCKET))
                services.append(server)
                typer.echo(f"export HEADRACE_STORE__URL=s3://{BUCKET}/store")
                typer.echo(f"export HEADRACE_S3__ENDPOINT_URL={server.endpoint_url}")
                typer.echo(f"export HEADRACE_S3__ACCESS_KEY_ID={server.access_key}")
                typer.echo(f"export HEADRACE_S3__SECRET_ACCESS_KEY={server.secret_key}")
            if services:
                ready = True
                typer.echo(f"Ready. Data and logs are in {data_dir.absolute()}. Ctrl-C stops.", err=True)
                _wait_for_the_first_to_end(services)
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        raise typer.Exit(0 if ready else INTERRUPTED) from None


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
