"""`headrace worker`: one trainer worker, until SIGTERM or Ctrl-C; under torchrun or deepspeed, one rank of its world."""

import asyncio
import logging
from typing import Annotated, Literal

import typer

from headrace.core.importing import importing
from headrace.core.settings import Settings, WorkerSettings


def worker(
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(case_sensitive=False)] = "info",
    ranks: Annotated[int | None, typer.Option(min=1, help="Data-parallel ranks on this machine; worker.ranks of the settings.")] = None,
    zero_stage: Annotated[int | None, typer.Option(min=0, max=3, help="What DeepSpeed shards over the ranks; worker.zero_stage.")] = None,
) -> None:
    """Claim lanes, train what arrives on them, publish weights. Settings come from the environment and the configuration file.

    Across nodes: `torchrun --nnodes 2 --nproc-per-node 8 --no-python headrace worker`; the process of rank 0 talks to Kafka, the others
    only train.
    """
    from headrace.trainer.rank_main import seat_of_launcher, serve  # noqa: PLC0415 - heavy

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # The broker's "previous transaction is not complete yet" is routine for a lane's producer, and retried.
    logging.getLogger("aiokafka").setLevel(logging.ERROR)
    settings = _with(Settings(), ranks=ranks, zero_stage=zero_stage)
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


def _with(settings: Settings, **given: int | None) -> Settings:
    """The settings with what the command line says over them, checked anew."""
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        return settings
    worker = WorkerSettings.model_validate(settings.worker.model_dump() | changes)
    return settings.model_copy(update={"worker": worker})
