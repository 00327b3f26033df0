"""A rank that continues by itself to the plan that it has: next to the writing of the step before, and with the same bits."""

import multiprocessing
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.trainer.tiny import ONE_THREAD

from headrace.core.errors import HeadraceError
from headrace.schemas.state import TrainingScalars
from headrace.schemas.training import TrainConfig
from headrace.trainer.computed import ComputedStep
from headrace.trainer.engine import TrainingEngine
from headrace.trainer.inbox import Inbox
from headrace.trainer.plan import Ahead, Answer, Failure, HandedOver, KlReference, Saved, SavePlan, StateKey, StepPlan, StepResult
from headrace.trainer.plan_runner import PlanRunner
from headrace.trainer.rank import RankWorld, StepFailedError
from headrace.trainer.world import Seat, WorldSettings

Plans = Callable[..., StepPlan]


def weights(plan: StepPlan) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(plan.out_dir, "weights").iterdir()}


def two_plans(make_plan: Plans, name: str, **options: object) -> tuple[StepPlan, StepPlan]:
    first = replace(make_plan(attempt=name, **options), snapshot=False)
    return first, replace(make_plan(made_by(first), attempt=f"{name}-next", **options), snapshot=False)


def made_by(plan: StepPlan) -> StateKey:
    return replace(plan.state, step=plan.state.step + 1, attempt=plan.attempt)


class Rank:
    """A rank without a process: its plans are run here, what it answers is kept."""

    def __init__(self, following: StepPlan | None, world: WorldSettings = ONE_THREAD) -> None:
        self.engine = TrainingEngine(world)
        self.answers: list[Answer] = []
        self.went_on = threading.Event()
        self._following = following
        self.plans = PlanRunner(self.engine, world, Seat(), self.answers.append, self._next)

    def _next(self, state: StateKey, scalars: TrainingScalars) -> StepPlan | None:
        plan, self._following = self._following, None
        if plan is None:
            self.went_on.set()
            return None
        assert plan.state == state
        return replace(plan, scalars=scalars)


@pytest.fixture
def finishes_late(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rank], None]:
    """The first step of a rank is written when its second one has been computed."""

    def late(rank: Rank) -> None:
        finish = ComputedStep.finish

        def waits(computed: ComputedStep) -> StepResult:
            if computed.plan.state.step == 0:
                assert rank.went_on.wait(30)
            return finish(computed)

        monkeypatch.setattr(ComputedStep, "finish", waits)
        computing = rank.engine.compute

        def notes(plan: StepPlan) -> ComputedStep:
            computed = computing(plan)
            if plan.state.step == 1:
                rank.went_on.set()
            return computed

        monkeypatch.setattr(rank.engine, "compute", notes)

    return late


@pytest.mark.parametrize("adaptation", ["full", "lora"])
def test_a_step_that_is_gone_on_to_changes_nothing_of_the_one_before_and_trains_what_it_would_have_trained(
    make_plan: Plans, finishes_late: Callable[[Rank], None], adaptation: str
):
    alone = TrainingEngine(ONE_THREAD)
    plain_first, plain_second = two_plans(make_plan, "plain", adaptation=adaptation)
    expected = [alone.run(plain_first)]
    expected.append(alone.run(replace(plain_second, scalars=expected[0].scalars)))
    first, second = two_plans(make_plan, "going", adaptation=adaptation)
    rank = Rank(second)
    finishes_late(rank)
    assert rank.plans.run(first) is None
    results = [answer for answer in rank.answers if isinstance(answer, StepResult)]
    assert [result.goes_on for result in results] == [second.out_dir, None]
    for mine, plain in zip(results, expected, strict=True):
        assert (mine.loss, mine.grad_norm, mine.plan_digest, mine.seed) == (plain.loss, plain.grad_norm, plain.plan_digest, plain.seed)
        assert (mine.scalars, mine.updates, mine.num_sequences, mine.tokens) == (
            plain.scalars,
            plain.updates,
            plain.num_sequences,
            plain.tokens,
        )
    assert (weights(first), weights(second)) == (weights(plain_first), weights(plain_second))


@pytest.mark.parametrize("adaptation", ["full", "lora"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_reference_or_an_evaluation_in_the_next_step_changes_nothing_of_the_one_that_is_written(
    make_plan: Plans, finishes_late: Callable[[Rank], None], adaptation: str, zero_stage: int
):
    """The reference's weights are those of the resident model while it is scored."""
    world = replace(ONE_THREAD, zero_stage=zero_stage)
    other = make_plan(attempt="other", adaptation=adaptation, seed=7)
    TrainingEngine(world).run(other)
    options = {
        "adaptation": adaptation,
        "config": TrainConfig(kl_penalty_coef=0.1, kl_penalty_reference_step=1),
        "reference": KlReference(kind="weights", folder=str(Path(other.out_dir, "weights"))),
        "evaluation": other.groups,
    }
    plain_first, plain_second = two_plans(make_plan, "plain", **options)
    alone = TrainingEngine(world)
    expected = [alone.run(plain_first)]
    expected.append(alone.run(replace(plain_second, snapshot=True, scalars=expected[0].scalars)))
    first, second = two_plans(make_plan, "going", **options)
    rank = Rank(replace(second, snapshot=True), world)
    finishes_late(rank)
    assert rank.plans.run(first) is None
    results = [answer for answer in rank.answers if isinstance(answer, StepResult)]
    assert [untimed(result) for result in results] == [untimed(result) for result in expected]
    assert (weights(first), weights(second)) == (weights(plain_first), weights(plain_second))
    for name in ("parameters.safetensors", "moments.safetensors"):
        assert Path(second.out_dir, "snapshot", name).read_bytes() == Path(plain_second.out_dir, "snapshot", name).read_bytes()


def untimed(result: StepResult) -> dict[str, float]:
    return {name: value for name, value in result.metrics.items() if "second" not in name and "memory" not in name}


def test_of_a_step_that_went_on_from_one_that_can_not_be_written_nothing_is_said_and_nothing_is_kept(
    make_plan: Plans, finishes_late: Callable[[Rank], None]
):
    first, second = two_plans(make_plan, "going")
    rank = Rank(second)
    finishes_late(rank)
    Path(first.out_dir).write_text("no folder")
    failure = rank.plans.run(first)
    assert failure is not None
    assert "Error" in failure.text
    assert rank.answers == [failure]
    with pytest.raises(HeadraceError, match="does not hold"):
        rank.engine.compute(make_plan(made_by(second)))


def test_of_a_step_that_nobody_hears_of_no_file_is_left(make_plan: Plans, finishes_late: Callable[[Rank], None]):
    """The disk may be full, and a snapshot is what takes most of it."""
    first, second = two_plans(make_plan, "going")
    rank = Rank(replace(second, snapshot=True))
    finishes_late(rank)
    Path(first.out_dir).write_text("no folder")
    assert rank.plans.run(first) is not None
    assert not Path(second.out_dir).exists()


def test_a_step_that_can_not_be_handed_to_a_thread_leaves_nothing_on_the_device(make_plan: Plans, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    first, second = two_plans(make_plan, "going")
    rank = Rank(second)
    monkeypatch.setattr(rank.plans._thread, "submit", fails)
    failure = rank.plans.run(first)
    assert failure is not None
    assert "can't start new thread" in failure.text
    assert rank.answers == [failure]
    with pytest.raises(HeadraceError, match="does not hold"):
        rank.engine.compute(second)


def test_nothing_of_a_step_that_is_written_is_held_while_the_next_one_runs(make_plan: Plans, monkeypatch: pytest.MonkeyPatch):
    """A copy of all weights, at each rank."""
    first, second = two_plans(make_plan, "going")
    rank = Rank(second)
    finish, computing = ComputedStep.finish, rank.engine.compute
    copies: list[weakref.ref[torch.Tensor]] = []
    held: list[bool] = []

    def finishes(computed: ComputedStep) -> StepResult:
        copies.extend(weakref.ref(tensor) for tensor in computed.tensors.values())
        return finish(computed)

    def looks(plan: StepPlan) -> ComputedStep:
        if plan.state.step == 1:
            rank.plans._thread.submit(lambda: None).result(30)  # the one before it is done
            held.extend(copy() is not None for copy in copies)
        return computing(plan)

    monkeypatch.setattr(ComputedStep, "finish", finishes)
    monkeypatch.setattr(rank.engine, "compute", looks)
    assert rank.plans.run(first) is None
    assert held
    assert not any(held)


def test_the_seconds_of_a_step_hold_its_writing_unless_the_next_one_ran_beside_it(make_plan: Plans, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    write = ComputedStep._write_tokens

    def takes_long(computed: ComputedStep, folder: Path) -> None:
        write(computed, folder)
        now[0] += 1000.0

    monkeypatch.setattr("headrace.trainer.computed.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(ComputedStep, "_write_tokens", takes_long)
    first, second = two_plans(make_plan, "going")
    alone = TrainingEngine(ONE_THREAD).run(first)
    assert (alone.seconds, alone.metrics["seconds_write"]) == (1000.0, 1000.0)
    rank = Rank(second)
    computing = rank.engine.compute

    def after_the_other(plan: StepPlan) -> ComputedStep:
        if plan.state.step == 1:
            rank.plans._thread.submit(lambda: None).result(30)
        return computing(plan)

    monkeypatch.setattr(rank.engine, "compute", after_the_other)
    assert rank.plans.run(first) is None
    assert [answer.seconds for answer in rank.answers if isinstance(answer, StepResult)] == [0.0, 1000.0]


def test_a_step_that_can_not_be_written_leaves_nothing_on_the_device(make_plan: Plans):
    first, second = two_plans(make_plan, "alone")
    rank = Rank(None)
    Path(first.out_dir).write_text("no folder")
    failure = rank.plans.run(first)
    assert rank.answers == [failure]
    with pytest.raises(HeadraceError, match="does not hold"):
        rank.engine.compute(second)


def test_a_step_that_raises_where_it_was_gone_on_to_fails_after_the_result_of_the_one_before(make_plan: Plans):
    first, second = two_plans(make_plan, "going")
    rank = Rank(replace(second, config=TrainConfig(kl_loss_coef=0.1)))
    failure = rank.plans.run(first)
    assert failure is not None
    assert "brings none" in failure.text
    (result, last) = rank.answers
    assert isinstance(result, StepResult)
    assert (result.goes_on, last) == (second.out_dir, failure)


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()


def test_a_plan_is_gone_on_to_only_by_the_step_that_it_was_handed_over_for(make_plan: Plans, pipe: tuple[Connection, Connection]):
    ours, theirs = pipe
    packed = threading.Semaphore(0)
    inbox = Inbox(theirs, lambda _plan: packed.release())
    first, second = two_plans(make_plan, "p")
    scalars = TrainingScalars(updates=7)

    def hand_over(goes_on: bool) -> None:
        ours.send(("ahead", Ahead(plan=second, goes_on=goes_on)))
        assert packed.acquire(timeout=10)
        read_all()

    def read_all() -> None:
        ours.send(("preload", first.base))
        assert inbox.next()[0] == "preload", "and all that was sent before"

    hand_over(goes_on=False)
    assert inbox.following(second.state, scalars) is None, "it is the worker's to say"
    hand_over(goes_on=True)
    assert inbox.following(replace(second.state, attempt="another"), scalars) is None, "another state"
    ours.send(("drop", None))
    ours.send(("run", first))
    assert inbox.next() == ("drop", None)
    assert inbox.next()[0] == "run"
    assert inbox.following(second.state, scalars) is None, "it was handed over for the step before"
    ours.send(("run", HandedOver.of(second)))
    assert inbox.next()[0] == "run", "it can still be run"
    hand_over(goes_on=True)
    ours.send(("drop", None))
    while inbox._messages.empty():
        pass
    assert inbox.following(second.state, scalars) is None, "a message waits"
    assert inbox.next() == ("drop", None)
    ours.send(("wait", None))
    read_all()
    assert inbox.following(second.state, scalars) is None, "it was held back"
    hand_over(goes_on=True)
    found = inbox.following(second.state, scalars)
    assert found is not None
    assert (found.attempt, found.scalars) == (second.attempt, scalars)
    assert inbox.following(second.state, scalars) is None, "it is gone"


def test_a_plan_that_can_not_be_made_ready_is_not_gone_on_to(make_plan: Plans, pipe: tuple[Connection, Connection]):
    ours, theirs = pipe
    tried = threading.Event()

    def fails(_plan: StepPlan) -> None:
        tried.set()
        raise MemoryError

    inbox = Inbox(theirs, fails)
    first, second = two_plans(make_plan, "p")
    ours.send(("ahead", Ahead(plan=second, goes_on=True)))
    assert tried.wait(10)
    ours.send(("preload", first.base))
    inbox.next()
    assert inbox.following(second.state, TrainingScalars()) is None


def answered(plan: StepPlan, engine: TrainingEngine, goes_on: str | None = None) -> StepResult:
    return replace(engine.run(plan), goes_on=goes_on)


def test_the_worker_sends_no_word_for_a_step_that_is_under_way_and_gets_its_result(make_plan: Plans):
    """No process is started: the rank's end of the pipe is ours."""
    first, second = two_plans(make_plan, "p")
    engine = TrainingEngine(ONE_THREAD)
    results = answered(first, engine, second.out_dir), answered(second, engine)
    world = RankWorld(WorldSettings())
    theirs = world._theirs[0]
    world.hand_over(second, goes_on=True)
    theirs.send(results[0])
    assert world.run(first) == results[0]
    assert world.going == second.out_dir
    with pytest.raises(AssertionError, match="continued to another step"):
        world.run(first)
    with pytest.raises(AssertionError, match="continued to another step"):
        world.save(SavePlan(state=second.state, folder=""))
    theirs.send(results[1])
    assert world.run(second) == results[1]
    assert world.going is None
    theirs.send(Saved())
    world.save(SavePlan(state=second.state, folder=""))
    assert [theirs.recv()[0] for _ in range(3)] == ["ahead", "run", "run"], "first, and the save"
    world.close()


def test_a_failure_ends_what_was_gone_on_to(make_plan: Plans):
    """As above."""
    first, second = two_plans(make_plan, "p")
    engine = TrainingEngine(ONE_THREAD)
    world = RankWorld(WorldSettings())
    world._theirs[0].send(answered(first, engine, second.out_dir))
    world.run(first)
    world._theirs[0].send(Failure(text="it could not"))
    with pytest.raises(StepFailedError, match="it could not"):
        world.settle()
    assert world.going is None
    world.close()


@pytest.mark.slow
def test_the_ranks_of_a_world_go_on_together(make_plan: Plans):
    alone = TrainingEngine(ONE_THREAD)
    world = RankWorld(WorldSettings(size=2, threads=1))
    world.start()
    with ThreadPoolExecutor() as threads:
        for turn in range(20):  # it is handed over in time, or not: until it is
            first, second = two_plans(make_plan, f"turn-{turn}")
            running = threads.submit(world.run, first)
            while not world._sending.locked() and not running.done():
                pass  # the plan is under way to the rank: what is handed over comes behind it
            world.hand_over(second, goes_on=True)
            result = running.result(60)
            if result.goes_on is not None:
                break
            world.run(replace(second, scalars=result.scalars))
    assert result.goes_on == second.out_dir
    gone_on_to = world.run(second)
    assert world.run(make_plan(gone_on_to.key, attempt="third")).key.step == 3, "and wait for the next one"
    plain = two_plans(make_plan, "plain")
    expected = alone.run(plain[0])
    assert gone_on_to.loss == pytest.approx(alone.run(replace(plain[1], scalars=expected.scalars)).loss, rel=1e-4)
    world.kill()
    world.close()
