"""One run of the demo, from nothing to the figure: a Kafka, a worker and two agents, each a process, and this one that only watches.

In parallel: the base model is trained while Kafka starts, and worker and agents import torch meanwhile; a model is created by command when
its base is there. Guarantees: no process of the run outlives it, however it ends (`children`, `headrace.core.local`); a process
that ends early ends the run with its last words; without `--keep` nothing is left on disk or on a foreign Kafka but the figure.
"""

import asyncio
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.local import LocalBroker
from headrace.core.models import create_model, model_id_of, wait_for_model
from headrace.core.settings import BaseModelEntry, Settings, StoreSettings
from headrace.core.topic_admin import apply, open_admin
from headrace.demo import smollm2
from headrace.demo.board import Board
from headrace.demo.children import Child, Children
from headrace.demo.figure import save_figure
from headrace.demo.history import History, Summary, follow_events, follow_groups
from headrace.demo.options import AGENTS, BASE_MODEL, AgentConfig, DemoOptions
from headrace.demo.transcripts import transcript
from headrace.schemas.topics import TOPICS

PARTITIONS = 2
MODEL_READY_S = 120.0


class ModelStoppedError(HeadraceError):
    """The worker can't train the demo's model; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run came to."""

    summary: Summary
    figure: Path


class Session:
    """A run.

    Args:
        options: What was asked for.
        settings: Of this process; its Kafka is used where one is configured.
        console: Where the run is shown.
    """

    def __init__(self, options: DemoOptions, settings: Settings, console: Console) -> None:
        self._options = options
        self._user_settings = settings
        self._console = console
        self._run_id = uuid.uuid4().hex[:8]
        self._history = History(wanted=options.steps)
        title = "a key, a tool, a secret" if options.model == "vault" else "SmolLM2-135M learns its sums"
        self._title = f"Headrace demo: {title} (seed {options.seed}, lag {options.lag})"

    def run(self) -> Result:
        """Run to the end.

        Raises:
            HeadraceError: Kafka could not be started or reached, the model could not be fetched, or a process ended early.
        """
        began = time.monotonic()
        if self._options.model == "smollm2":
            smollm2.fetch()
        folder = Path(tempfile.mkdtemp(prefix=f"headrace-demo-{self._run_id}-"))
        with ExitStack() as cleanup:
            if self._options.keep:
                cleanup.callback(self._say_what_is_kept, folder)
            else:
                cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
            settings = self._settings(folder)
            broker = LocalBroker(folder)
            if settings.kafka.bootstrap_servers is None:
                cleanup.callback(broker.stop)
            elif not self._options.keep:
                cleanup.callback(lambda: asyncio.run(_delete_topics(settings)))
            # Entered last, so that the processes are gone before their topics and their broker go.
            children = cleanup.enter_context(Children(folder / "logs"))
            base = children.start("base model", self._base_command(settings), {**os.environ, "TMPDIR": str(folder)})
            if settings.kafka.bootstrap_servers is None:
                self._console.print("Starting Kafka", highlight=False)
                broker.start()
                kafka = settings.kafka.model_copy(update={"bootstrap_servers": broker.bootstrap_servers})
                settings = settings.model_copy(update={"kafka": kafka})
            with Board(self._console, self._title, self._history) as board:
                asyncio.run(self._train(settings, children, base, board))
        return self._show(time.monotonic() - began)

    async def _train(self, settings: Settings, children: Children, base: Child, board: Board) -> None:
        """From a Kafka that runs to the last step, served."""
        board.phase("Creating the topics")
        await apply(settings)
        project, name = "demo", self._options.model
        model_id = model_id_of(settings.account, project, name)
        lane = lane_of(model_id, PARTITIONS)
        environment = _environment(settings)
        workers = [children.start("worker", [sys.executable, "-m", "headrace.cli", "worker"], environment)]
        workers += [children.start(f"agent {i + 1}", self._agent_command(settings, model_id, i), environment) for i in range(AGENTS)]

        async def work() -> None:
            board.phase("Making the base model; worker and agents load torch meanwhile")
            if await asyncio.wrap_future(base.ended) != 0:
                raise base.failure()
            board.phase("Creating the model")
            asked = await create_model(settings, project=project, name=name, model=self._options.model_settings)
            view = await wait_for_model(settings, asked, MODEL_READY_S)
            if view.status != "active":
                raise ModelStoppedError(f"the worker can't train the demo's model ({view.status}): {view.status_detail}")
            board.phase("Waiting for the first step")
            async with asyncio.TaskGroup() as tasks:
                followers = [
                    tasks.create_task(follow_groups(settings, lane, self._history)),
                    tasks.create_task(follow_events(settings, lane, self._history)),
                ]
                while not self._history.served:
                    await self._history.changed.wait()
                    self._history.changed.clear()
                    board.show()
                for follower in followers:
                    follower.cancel()

        await _unless_one_ends(work(), workers)

    def _settings(self, folder: Path) -> Settings:
        """The user's settings, with topics, store, worker group and folders of this run's own."""
        user = self._user_settings
        path = smollm2.model_folder() if self._options.model == "smollm2" else folder / "base"
        return user.model_copy(
            update={
                "topics": user.topics.model_copy(update={"prefix": f"headrace-demo-{self._run_id}.", "partitions": PARTITIONS}),
                "store": StoreSettings(url=f"file://{folder / 'store'}"),
                "worker": user.worker.model_copy(update={"group": f"demo-{self._run_id}", "work_dir": folder / "worker", "threads": 1}),
                "base_models": {BASE_MODEL: BaseModelEntry(path=str(path))},
            }
        )

    def _base_command(self, settings: Settings) -> list[str]:
        if self._options.model == "smollm2":
            return [sys.executable, "-m", "headrace.demo.smollm2"]
        return [sys.executable, "-m", "headrace.demo.base_model", settings.base_models[BASE_MODEL].path, str(self._options.seed)]

    def _agent_command(self, settings: Settings, model_id: str, index: int) -> list[str]:
        config = AgentConfig(
            name=f"agent-{index + 1}",
            task=self._options.model,
            model_id=model_id,
            base_path=settings.base_models[BASE_MODEL].path,
            cache_dir=str(settings.worker.work_dir.parent / f"agent-{index + 1}"),
            groups_per_step=self._options.model_settings.batch.groups_per_step,
            share=1 / AGENTS,
            rollouts=self._options.rollouts,
            max_policy_lag=self._options.lag,
            seed=self._options.seed * AGENTS + index,
        )
        return [sys.executable, "-m", "headrace.demo.agent", config.model_dump_json()]

    def _show(self, seconds: float) -> Result:
        """The transcripts, the figure and the numbers of a run that came to its end."""
        history = self._history
        summary = history.summary(seconds)
        figure = self._options.out / f"headrace-demo-{self._options.model}-seed{self._options.seed}-lag{self._options.lag}.png"
        save_figure(history.steps, figure, self._title)
        for group, title in ((history.first, "The first rollout"), (history.last, "The last rollout")):
            if group is not None:
                self._console.print(transcript(group, title))
        self._console.print(
            f"Reward {summary.reward_first:.2f} → [bold green]{summary.reward_last:.2f}[/] in {summary.steps} steps: "
            f"{summary.groups} groups trained, {summary.rejected} refused, largest lag {summary.max_lag}, {summary.seconds:.0f} s",
            highlight=False,
            soft_wrap=True,
        )
        if summary.reward_last <= summary.reward_first:
            steps = max(40, 2 * summary.steps)
            minutes = summary.seconds / summary.steps * steps / 60
            why = f"The reward has not risen: {summary.steps} steps are few, and rewards of single steps vary"
            self._console.print(f"{why}. Try --steps {steps}, about {minutes:.0f} minutes at this speed", highlight=False, soft_wrap=True)
        self._console.print(f"Figure: {figure}", highlight=False, soft_wrap=True)
        return Result(summary=summary, figure=figure)

    def _say_what_is_kept(self, folder: Path) -> None:
        prefix = f"headrace-demo-{self._run_id}."
        where = self._user_settings.kafka.bootstrap_servers
        kafka = f"on {where}" if where else f"in {folder} (headrace up --data-dir {folder})"
        self._console.print(f"Kept: topics {prefix}* {kafka}; logs, store and base model in {folder}", highlight=False, soft_wrap=True)


async def _unless_one_ends(work: Coroutine[Any, Any, None], children: Sequence[Child]) -> None:
    """Await the work; a child that ends before it is the error."""
    task = asyncio.create_task(work)
    ends: dict[asyncio.Future[int], Child] = {asyncio.wrap_future(child.ended): child for child in children}
    try:
        waited: list[asyncio.Future[Any]] = [task, *ends]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for end, child in ends.items():
            if end.done() and not task.done():
                raise child.failure()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _delete_topics(settings: Settings) -> None:
    """Take the run's topics off a Kafka that was there before."""
    async with open_admin(client_options(settings.kafka, "headrace-demo")) as admin:
        there = set(await admin.list_topics())
        await admin.delete_topics([name for name in map(settings.topic_names.full, (spec.name for spec in TOPICS)) if name in there])


def _environment(settings: Settings) -> dict[str, str]:
    """This process' environment with the run's settings in it: what worker and agents read at their start."""
    catalogue = {name: entry.model_dump(mode="json") for name, entry in settings.base_models.items()}
    return {
        **os.environ,
        "TMPDIR": str(settings.worker.work_dir.parent),  # what torch leaves in temporary folders goes with the run's
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": str(settings.kafka.bootstrap_servers),
        "HEADRACE_TOPICS__PREFIX": settings.topics.prefix,
        "HEADRACE_TOPICS__PARTITIONS": str(settings.topics.partitions),
        "HEADRACE_STORE__URL": settings.store.url,
        "HEADRACE_WORKER__GROUP": settings.worker.group,
        "HEADRACE_WORKER__WORK_DIR": str(settings.worker.work_dir),
        "HEADRACE_WORKER__THREADS": str(settings.worker.threads),
        "HEADRACE_BASE_MODELS": orjson.dumps(catalogue).decode(),
    }
