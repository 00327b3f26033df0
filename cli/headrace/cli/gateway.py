"""`headrace gateway`: the HTTP front door, until SIGTERM or Ctrl-C. Stdout gets the address, once it answers; the log goes to stderr."""

import asyncio
import logging
from typing import Annotated, Literal

import typer

from headrace.core.settings import GatewaySettings, Settings


def gateway(
    host: Annotated[str | None, typer.Option(help="Address to listen on; gateway.host of the settings.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0: any free one. gateway.port of the settings.")] = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(case_sensitive=False)] = "info",
) -> None:
    """Serve the training-jobs API, the RLOR trainer-job API, inference and the dashboard over HTTP.

    Without tokens it listens on loopback only: `headrace tokens create`.
    """
    from headrace.gateway.serve import bind, check_listening, serve  # noqa: PLC0415 - heavy

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("aiokafka").setLevel(logging.ERROR)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = Settings()
    given = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    if given:
        changed = GatewaySettings.model_validate(settings.gateway.model_dump() | given)
        settings = settings.model_copy(update={"gateway": changed})
    check_listening(settings)
    listener = bind(settings)
    where = listener.getsockname()
    address = f"http://{f'[{where[0]}]' if ':' in where[0] else where[0]}:{where[1]}"
    if not settings.gateway.tokens_file and not settings.gateway.tokens:
        typer.echo("no token is configured: everybody on this machine may call, and nobody else can", err=True)
    asyncio.run(serve(settings, listener, ready=lambda: typer.echo(address)))
