"""The rank process: real processes, real signals."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.errors import HeadraceError
from headrace.schemas.state import TrainingScalars
from headrace.schemas.training import TrainConfig
from headrace.trainer.inbox import Inbox
from headrace.trainer.plan import BaseSource, Saved, SignOfLife, StateKey, StepPlan
from headrace.trainer.rank import RankDiedError, RankWorld, StepFailedError
from headrace.trainer.rank_main import nodes_of_launcher, seat_of_launcher
from headrace.trainer.world import WorldSettings

Plans = Callable[..., StepPlan]


def weights(plan: StepPlan) -> bytes:
    return Path(plan.out_dir, "weights", "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where torch would compile C++ extensions."""
    return tmp_path_factory.mktemp("extensions")


@pytest.fixture(scope="module")
def rank(extensions: Path) -> Iterator[RankWorld]:
    """One for all, since it imports for seconds. It finds no compiler, and is interrupted as by a terminal while it imports."""
    process = RankWorld(WorldSettings(threads=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(extensions))
        patch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
        process.start()
    assert process.pids[0] is not None
    os.kill(process.pids[0], signal.SIGINT)
    yield process
    process.kill()
    process.close()


def test_a_plan_goes_in_and_a_step_comes_out_and_the_state_stays(rank: RankWorld, make_plan: Plans, tiny: BaseSource):
    rank.preload(tiny)
    first = rank.run(make_plan())
    assert (first.updates, first.key.step, first.fingerprint.threads) == (1, 1, 1)
    second = rank.run(make_plan(first.key))
    assert second.key.step == 2


def test_a_plan_that_is_handed_over_while_another_runs_trains_what_it_would_have_trained(rank: RankWorld, make_plan: Plans):
    first = make_plan(attempt="first")
    second = replace(make_plan(StateKey(model_id="m", incarnation="i", step=1, attempt="first"), attempt="second"), snapshot=False)
    handing = threading.Thread(target=rank.hand_over, args=(second,), kwargs={"goes_on": False})
    running = threading.Thread(target=rank.run, args=(first,))
    running.start()
    handing.start()
    for thread in (running, handing):
        thread.join(60)
    # What was not known then is said now: the scalars, and whether there is a snapshot.
    scalars = TrainingScalars(updates=1)
    result = rank.run(replace(second, scalars=scalars, snapshot=True))
    assert (result.key.step, result.scalars.updates) == (2, 2)
    assert Path(second.out_dir, "snapshot").is_dir()
    plain = replace(make_plan(second.state, attempt="plain"), scalars=scalars)
    rank.run(replace(first, out_dir=f"{first.out_dir}-again"))
    again = rank.run(plain)
    assert (again.plan_digest, again.loss) == (result.plan_digest, result.loss)
    assert weights(plain) == weights(second)


def test_a_plan_with_the_attempt_of_one_that_was_handed_over_is_run_as_what_it_is(rank: RankWorld, make_plan: Plans):
    """As a step that is run again has: its own files, its own groups."""
    first = rank.run(make_plan(attempt="first"))
    handed = make_plan(first.key, attempt="second")
    rank.hand_over(handed, goes_on=False)
    other = replace(handed, groups=handed.groups[:1], out_dir=f"{handed.out_dir}-again")
    result = rank.run(other)
    assert result.metrics["groups"] == 1
    assert weights(other)
    assert not Path(handed.out_dir).exists()


def test_nothing_is_compiled(rank: RankWorld, make_plan: Plans, extensions: Path):
    rank.run(make_plan())
    assert list(extensions.iterdir()) == []


def test_a_step_that_raises_fails_alone(rank: RankWorld, make_plan: Plans):
    with pytest.raises(StepFailedError) as caught:
        rank.run(make_plan(config=TrainConfig(kl_loss_coef=0.1)))
    assert str(caught.value).strip().splitlines()[-1].endswith("the config asks for KL to a reference policy, and the plan brings none")
    assert rank.run(make_plan()).updates == 1


def test_the_terminals_interrupt_is_the_parents_to_judge(rank: RankWorld, make_plan: Plans):
    assert rank.pids[0] is not None
    os.kill(rank.pids[0], signal.SIGINT)
    assert rank.run(make_plan()).key.step == 1


def test_a_rank_that_is_killed_says_so_to_its_waiting_caller(rank: RankWorld, make_plan: Plans):
    """Last of those that share the rank."""
    assert rank.pids[0] is not None
    failed: list[BaseException] = []

    def run_for_ever() -> None:
        try:
            while True:
                rank.run(make_plan())
        except RankDiedError as error:
            failed.append(error)

    caller = threading.Thread(target=run_for_ever)
    caller.start()
    os.kill(rank.pids[0], signal.SIGKILL)
    caller.join(30)
    assert "exit code -9" in str(failed[0])
    assert not rank.alive


def test_closing_ends_it_without_force():
    rank = RankWorld(WorldSettings(threads=1))
    rank.start()
    (pid,) = rank.pids
    rank.close()
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the rank ends at its next read of the pipe")
def test_the_rank_ends_with_its_parent_even_when_that_is_killed(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        "from headrace.trainer.rank import RankWorld\n"
        "from headrace.trainer.world import WorldSettings\n"
        "if __name__ == '__main__':\n"
        "    rank = RankWorld(WorldSettings(threads=1))\n"
        "    rank.start()\n"
        "    print(rank.pids[0], flush=True)\n"
        "    sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    watched = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    import select  # noqa: PLC0415 - next to its use

    ready, _, _ = select.select([watched], [], [], 10)
    os.close(watched)
    assert ready, "the rank outlived its parent"


def test_a_process_that_only_hands_plans_over_needs_no_torch():
    code = (
        "import sys; import headrace.trainer.rank, headrace.trainer.plan, headrace.trainer.options, headrace.trainer.tokenize;"
        "assert not {'torch', 'transformers', 'deepspeed'} & sys.modules.keys(), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_launchers_environment_that_is_no_number_is_refused_in_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(HeadraceError, match="WORLD_SIZE, RANK and LOCAL_RANK are a launcher's to set, as numbers"):
        seat_of_launcher()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert seat_of_launcher() is None, "a size without a rank is no launcher's doing"


def test_a_silent_rank_is_noticed_however_often_the_others_give_a_sign_of_life():
    """No process is started: the ranks' ends of the pipes are ours."""
    world = RankWorld(WorldSettings(size=2, silence_seconds=0.4))
    world._ready = {0, 1}
    ended = threading.Event()

    def rank_0() -> None:
        while not ended.wait(0.01):
            world._theirs[0].send(SignOfLife())

    lively = threading.Thread(target=rank_0)
    lively.start()
    try:
        with pytest.raises(RankDiedError, match="rank 1 of 2 gave no sign of life"):
            world._result()
    finally:
        ended.set()
        lively.join()
        world.close()


def test_a_rank_that_hangs_while_it_is_handed_a_plan_is_noticed(make_plan: Plans, monkeypatch: pytest.MonkeyPatch):
    """Nobody reads, and the plan is larger than the pipe."""
    world = RankWorld(WorldSettings(silence_seconds=0.4))
    world._ready = {0}
    monkeypatch.setattr(world, "kill", world._theirs[0].close)
    handing = threading.Thread(target=world.hand_over, args=(make_plan(attempt="a" * (1 << 22)),), kwargs={"goes_on": False}, daemon=True)
    handing.start()
    while not world._sending.locked():
        pass
    raised: list[BaseException] = []

    def run() -> None:
        try:
            world.run(make_plan())
        except RankDiedError as error:
            raised.append(error)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(20)
    assert "rank 0 of 1 gave no sign of life" in str(raised)
    handing.join(5)
    assert not handing.is_alive()
    world.close()


def test_a_world_of_a_worker_that_has_many_connections_runs_what_was_handed_over(make_plan: Plans):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        world = RankWorld(WorldSettings())
        plan = make_plan()
        world.hand_over(plan, goes_on=False)
        world._theirs[0].send(Saved())
        assert world._ask(plan) == Saved()
        assert [world._theirs[0].recv()[0] for _ in range(2)] == ["ahead", "run"]
        world.close()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_message_that_can_not_be_read_ends_the_rank_instead_of_leaving_it_waiting():
    ours, theirs = multiprocessing.Pipe()
    inbox = Inbox(theirs, lambda _plan: None)
    ours.send_bytes(b"no pickle")
    with pytest.raises(EOFError):
        inbox.next()


@pytest.mark.parametrize(
    ("environment", "nodes"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "8", "RANK": "0", "LOCAL_WORLD_SIZE": "4"}, 2),
        ({"WORLD_SIZE": "8", "RANK": "0", "LOCAL_SIZE": "2"}, 4),
        ({"WORLD_SIZE": "2", "RANK": "0"}, 1),
    ],
    ids=["alone", "torchrun", "deepspeed", "unknown"],
)
def test_the_machines_of_a_world_are_what_its_launcher_says(environment: dict[str, str], nodes: int, monkeypatch: pytest.MonkeyPatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert nodes_of_launcher() == nodes
