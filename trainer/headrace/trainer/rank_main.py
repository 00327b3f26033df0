"""What a rank process does: join the world, then run the plans that come, until its parent is gone.

Rank 0 gets plans through a pipe and hands them to the others by a broadcast; the others know neither Kafka nor the worker. Between plans
they wait at their own pipe, or, where a launcher (torchrun, deepspeed) started them on another node, at the world's store: never inside a
collective, which would time out in a quiet hour. Guarantees: while a plan runs every rank with a pipe gives a sign of life; an exception
is reported with its traceback, and ends the rank where the world has others, since no one knows how far they are. Limitations: signs of
life across nodes; there the time limit of collectives has to do.
"""

import atexit
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from headrace.core.errors import HeadraceError
from headrace.core.importing import importing
from headrace.core.processes import die_with, name_process
from headrace.trainer.inbox import Inbox
from headrace.trainer.plan import Answer, BaseSource, SignOfLife
from headrace.trainer.plan_runner import PlanRunner
from headrace.trainer.store_words import hear, tell
from headrace.trainer.world import Seat, WorldSettings

if TYPE_CHECKING:  # it imports torch, which only a rank does
    from headrace.trainer.engine import TrainingEngine

logger = logging.getLogger(__name__)


class RankFailedError(HeadraceError):
    """A plan raised in a rank that a launcher started; the message holds the traceback."""


def main(pipe: Connection, world: WorldSettings, seat: Seat, parent: int) -> None:
    """A rank process that a worker started.

    Args:
        pipe: To the worker.
        world: The world.
        seat: This rank's place in it.
        parent: The worker's process id.
    """
    die_with(parent)
    name_process(f"headrace-rank-{seat.rank}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = _engine(world, seat)
    lock = threading.Lock()

    def answer(message: Answer) -> None:
        with lock:
            pipe.send(message)

    inbox = Inbox(pipe, engine.make_ready)
    plans = PlanRunner(engine, world, seat, answer, inbox.following)
    with suppress(BrokenPipeError, OSError, EOFError):  # the parent is gone
        answer(SignOfLife())
        while True:
            match inbox.next():
                case ("preload", BaseSource() as base):
                    _preload(engine, base)
                case ("drop", None):
                    engine.drop()
                case ("run", plan):
                    with _signs_of_life(answer, world.silence_seconds / 4):
                        failure = plans.run(plan)
                    if failure is not None and world.size > 1:
                        return
    if seat.rank == 0 and world.size > 1:
        tell("end")


def serve(world: WorldSettings, seat: Seat) -> None:
    """A rank that a launcher started next to another node's worker: runs what rank 0 broadcasts, until the world ends.

    Raises:
        RankFailedError: a plan failed; the launcher ends or restarts all ranks.
    """
    plans = PlanRunner(_engine(world, seat), world, seat, answer=lambda _: None, following=lambda *_: None)
    number = 0
    while True:
        try:
            if hear(number) == "end":
                return
        except RuntimeError as error:
            # Between plans there is nothing to lose: rank 0 held the store and has ended, or the launcher did and ends us all.
            logger.info("the world's store is gone, and the world with it: %s", str(error).splitlines()[0])
            return
        number += 1
        failure = plans.run(None)
        if failure is not None:
            raise RankFailedError(f"rank {seat.rank} failed:\n{failure.text}")


def seat_of_launcher() -> tuple[int, Seat] | None:
    """World size and place that torchrun or deepspeed gave this process; None without a launcher, or with a world of one."""
    try:
        size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "-1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    except ValueError as error:
        raise HeadraceError(f"WORLD_SIZE, RANK and LOCAL_RANK are a launcher's to set, as numbers: {error}") from None
    if size == 1 or rank < 0:
        return None
    return size, Seat(rank=rank, local_rank=local_rank)


def nodes_of_launcher() -> int:
    """Machines that torchrun or deepspeed started this world on; 1 without a launcher."""
    launched = seat_of_launcher()
    if launched is None:
        return 1
    beside = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or str(launched[0])  # torchrun's name, deepspeed's name
    try:
        return max(1, launched[0] // max(1, int(beside)))
    except ValueError as error:
        raise HeadraceError(f"LOCAL_WORLD_SIZE is a launcher's to set, as a number: {error}") from None


def _engine(world: WorldSettings, seat: Seat) -> "TrainingEngine":
    logging.basicConfig(level="INFO", format=f"%(asctime)s %(levelname)s rank {seat.rank}: %(message)s", stream=sys.stderr)
    # Before torch loads OpenMP: its threads wait by spinning otherwise, and a step of 0.06 s took 0.96 s on two busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # our stderr is a log
    if seat.rendezvous is not None and sys.platform == "linux":
        # Ranks of one machine: a host whose name resolves to nothing, or to somewhere else, must not matter.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with importing():
        from headrace.trainer.engine import TrainingEngine  # noqa: PLC0415 - imports torch, in this process only

        engine = TrainingEngine(world, seat)
        # What a base model of whatever architecture needs, before the first is loaded. After the engine, which tells DeepSpeed the device.
        from transformers import LlamaForCausalLM  # noqa: F401, PLC0415 - seconds, in this process only
    # All of it stays until the end, when libraries look whether they have left anything: no collection looks through it (0.3 s each).
    gc.freeze()
    atexit.register(gc.unfreeze)
    return engine


def _preload(engine: "TrainingEngine", base: BaseSource) -> None:
    try:
        engine.preload(base)
    except Exception:
        logger.exception("preload failed")


@contextmanager
def _signs_of_life(answer: Callable[[Answer], None], seconds: float) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        with suppress(BrokenPipeError, OSError):
            while not ended.wait(seconds):
                answer(SignOfLife())

    thread = threading.Thread(target=beat, name="signs-of-life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
