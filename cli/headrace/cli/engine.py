"""`headrace engine`: a rollout engine over HTTP, until SIGTERM or Ctrl-C."""

import asyncio
import logging
from typing import Annotated, Literal

import typer

from headrace.core.importing import importing


def engine(  # noqa: PLR0917 - typer passes them by name
    base_model: Annotated[str, typer.Option(help="Name in the catalogue (base_models in the settings).")],
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Serve only this model (id or name); repeat for several. All."),
    ] = None,
    deployment: Annotated[str | None, typer.Option(help="Serve only what names this deployment.")] = None,
    host: Annotated[str, typer.Option(help="Where it listens; it asks for no token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8200,
    engine_id: Annotated[str | None, typer.Option(help="Unique and stable name of this engine; host name and port.")] = None,
    advertise_url: Annotated[str | None, typer.Option(metavar="URL", help="Where others reach it, with /v1; host and port.")] = None,
    versions: Annotated[int, typer.Option(min=1, max=1000, help="Versions of each model that are held.")] = 2,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads; torch's own choice.")] = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(case_sensitive=False)] = "info",
) -> None:
    """Serve every model of a base model to OpenAI clients, each version under the name MODEL_ID@VERSION; follow what is published."""
    from headrace.core.kafka import require_bootstrap  # noqa: PLC0415 - heavy
    from headrace.core.settings import Settings  # noqa: PLC0415
    from headrace.engine.options import EngineOptions, base_model_entry, listen  # noqa: PLC0415

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = Settings()
    options = EngineOptions(
        base_model=base_model,
        models=tuple(model or ()),
        deployment=deployment,
        engine_id=engine_id,
        host=host,
        port=port,
        advertise_url=advertise_url,
        versions=versions,
        device=device,
        threads=threads,
    )
    # What is wrong is said before torch is loaded.
    require_bootstrap(settings)
    base_model_entry(settings, base_model)
    with listen(host, port) as listener:
        with importing():
            from headrace.engine.serve import EngineProcess  # noqa: PLC0415 - seconds

        typer.echo(f"Serving {base_model} at {options.url(listener)}")

        async def main() -> None:
            await EngineProcess(settings, options, listener).run()

        asyncio.run(main())
