"""`headrace worker`: one trainer worker, until SIGTERM or Ctrl-C."""

import asyncio
import logging
from typing import Annotated

import typer

from headrace.core.settings import Settings


def worker(
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error")] = "info",
) -> None:
    """Claim lanes, train what arrives on them, publish weights. Settings come from the environment and the configuration file."""
    from headrace.consumers.worker import Worker  # noqa: PLC0415 - heavy

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # The broker's "previous transaction is not complete yet" is routine for a lane's producer, and retried.
    logging.getLogger("aiokafka").setLevel(logging.ERROR)
    settings = Settings()
    if not settings.base_models:
        raise typer.BadParameter("no base models are configured: set base_models in the file that HEADRACE_CONFIG names")

    async def main() -> None:
        await Worker(settings).run()

    asyncio.run(main())
