"""`headrace worker`, `engine` and `gateway`: the three processes that run until SIGTERM or Ctrl-C."""

import asyncio
import logging
from typing import Annotated, Literal

import typer

from headrace.core.importing import importing
from headrace.core.settings import Settings

LogLevel = Annotated[Literal["debug", "info", "warning", "error"], typer.Option(case_sensitive=False)]


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _overlaid(settings: Settings, section: Literal["worker", "gateway"], **given: str | int | None) -> Settings:
    """The settings with the command line's values in one section, validated again."""
    changes = {name: value for name, value in given.items() if value is not None}
    found = getattr(settings, section)
    return settings.model_copy(update={section: type(found).model_validate(found.model_dump() | changes)}) if changes else settings


def worker(
    log_level: LogLevel = "info",
    ranks: Annotated[int | None, typer.Option(min=1, help="Data-parallel ranks on this machine; worker.ranks of the settings.")] = None,
    zero_stage: Annotated[int | None, typer.Option(min=0, max=3, help="What DeepSpeed shards over the ranks; worker.zero_stage.")] = None,
) -> None:
    """Claim lanes, train what arrives on them, publish weights. Settings come from the environment and the configuration file.

    Across nodes: `torchrun --nnodes 2 --nproc-per-node 8 --no-python headrace worker`; the process of rank 0 talks to Kafka, the others
    only train.
    """
    from headrace.trainer.rank_main import seat_of_launcher, serve  # noqa: PLC0415 - heavy

    _log_to_stderr(log_level)
    # The broker's "previous transaction is not complete yet" is routine for a lane's producer, and retried.
    logging.getLogger("aiokafka").setLevel(logging.ERROR)
    settings = _overlaid(Settings(), "worker", ranks=ranks, zero_stage=zero_stage)
    launcher = seat_of_launcher()
    if launcher is not None and ranks is not None:
        raise typer.BadParameter(f"--ranks {ranks} under a launcher, which has started {launcher[0]} ranks: leave --ranks out")
    if launcher is not None and launcher[1].rank > 0:
        from headrace.consumers.worker.world import world_settings  # noqa: PLC0415 - heavy

        serve(world_settings(settings, launcher[0]), launcher[1])
        return
    if not settings.base_models:
        raise typer.BadParameter("no base models are configured: set base_models in the file that HEADRACE_CONFIG names")
    with importing():
        from headrace.consumers.worker.process import Worker  # noqa: PLC0415 - heavy

    async def main() -> None:
        await Worker(settings).run()

    asyncio.run(main())


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
    log_level: LogLevel = "info",
) -> None:
    """Serve every model of a base model to OpenAI clients, each version under the name MODEL_ID@VERSION; follow published versions."""
    from headrace.core.kafka import require_bootstrap  # noqa: PLC0415 - heavy
    from headrace.engine.http.options import EngineOptions, base_model_entry, listen  # noqa: PLC0415

    _log_to_stderr(log_level)
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
    # Errors in the settings are reported before torch is loaded.
    require_bootstrap(settings)
    base_model_entry(settings, base_model)
    with listen(host, port) as listener:
        with importing():
            from headrace.engine.http.serve import EngineProcess  # noqa: PLC0415 - seconds

        typer.echo(f"Serving {base_model} at {options.url(listener)}")

        async def main() -> None:
            await EngineProcess(settings, options, listener).run()

        asyncio.run(main())


def gateway(
    host: Annotated[str | None, typer.Option(help="Address to listen on; gateway.host of the settings.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0: any free one. gateway.port of the settings.")] = None,
    log_level: LogLevel = "info",
) -> None:
    """Serve the training-jobs API, the RLOR trainer-job API, inference and the dashboard over HTTP.

    Without tokens it listens on loopback only: `headrace tokens create`.
    """
    from headrace.gateway.serve import bind, check_listening, serve  # noqa: PLC0415 - heavy

    _log_to_stderr(log_level)
    logging.getLogger("aiokafka").setLevel(logging.ERROR)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = _overlaid(Settings(), "gateway", host=host, port=port)
    check_listening(settings)
    listener = bind(settings)
    where = listener.getsockname()
    address = f"http://{f'[{where[0]}]' if ':' in where[0] else where[0]}:{where[1]}"
    if not settings.gateway.tokens_file and not settings.gateway.tokens:
        typer.echo("no token is configured: every process on this machine may call, and no other machine can", err=True)
    asyncio.run(serve(settings, listener, ready=lambda: typer.echo(address)))
