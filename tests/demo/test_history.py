"""The numbers of a run come from its events alone; the figure and the transcripts show them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from headrace.demo.board import Board
from headrace.demo.figure import save_figure
from headrace.demo.history import History
from headrace.demo.transcripts import transcript
from headrace.schemas.chat import Choice, ChoiceMessage, Message, ToolCall, ToolCallFunction
from headrace.schemas.codec import SampledGroup
from headrace.schemas.events import GroupRejected, StepCompleted
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup

START = datetime(2026, 1, 1, tzinfo=UTC)


def step(number: int, reward: float, lags: dict[int, int] | None = None) -> StepCompleted:
    return StepCompleted(
        model_id="m", incarnation="i", step=number, policy_version=number, groups=12, trajectories=96, tokens=1000,
        metrics={"reward_mean": reward, "kl_behaviour": 0.001}, lag_histogram=lags or {0: 96}, seconds=0.1,
        completed_at=START + timedelta(seconds=number),
    )  # fmt: skip


def rejected() -> GroupRejected:
    return GroupRejected(model_id="m", group_id="g", reason=RejectionReason.STALE, detail="too old", partition=0, offset=5)


def group(version: int, reward: float = 0.0) -> SampledGroup:
    call = ChoiceMessage(tool_calls=[ToolCall(function=ToolCallFunction(name="vault", arguments={"key": "amber"}))])
    items = [
        Message(role="user", content="what is in amber ?"),
        Choice(finish_reason="tool_calls", message=call),
        Message(role="tool", content="heron"),
        Choice(finish_reason="stop", message=ChoiceMessage(content="answer heron")),
    ]
    trajectory = Trajectory(messages_and_choices=items, reward=reward, initial_policy_version=version, final_policy_version=version)
    return SampledGroup(group=TrajectoryGroup(trajectories=[trajectory]), turns=(None, None))


def test_the_summary_is_the_mean_over_the_first_and_the_last_ten_steps():
    history = History(wanted=30)
    for i in range(30):
        history.note_event(step(i + 1, reward=0.1 if i < 10 else 0.5 if i < 20 else 0.9, lags={0: 90, 2: 6}))
    history.note_event(rejected())
    summary = history.summary(42.04)
    assert (summary.reward_first, summary.reward_last) == (0.1, 0.9)
    assert (summary.steps, summary.groups, summary.rejected, summary.max_lag, summary.policy_version) == (30, 360, 1, 2, 30)
    assert summary.tokens_per_second == 1000.0
    assert summary.seconds == 42.0


def test_steps_after_the_last_wanted_one_are_not_counted():
    history = History(wanted=2)
    for i in range(4):
        history.note_event(step(i + 1, 0.5))
    assert history.summary(1).steps == 2


def test_a_run_ends_only_when_the_last_version_has_sampled():
    history = History(wanted=1)
    history.note_group(group(version=0))
    assert not history.served
    history.note_event(step(1, 0.5))
    assert history.trained
    assert not history.served
    history.note_group(group(version=1))
    assert history.served


def test_the_queue_is_what_is_neither_trained_on_nor_refused():
    history = History(wanted=5)
    for _ in range(20):
        history.note_group(group(0))
    history.note_event(step(1, 0.5))
    history.note_event(rejected())
    assert history.queued == 20 - 12 - 1


@pytest.mark.parametrize("count", [1, 2, 40])
def test_the_figure_is_a_png_for_any_number_of_steps(tmp_path: Path, count: int):
    path = tmp_path / "new folder" / "figure.png"
    save_figure([step(i + 1, i / count, {0: 50, i % 3: 46}) for i in range(count)], path, "A title")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_transcript_shows_the_call_the_answer_and_the_reward():
    console = Console(record=True, width=100)
    console.print(transcript(group(7, reward=1.0), "The last rollout"))
    text = console.export_text()
    for part in ("policy version 7", "what is in amber ?", "vault(amber)", "heron", "answer heron", "reward 1"):
        assert part in text


def test_the_live_table_shows_each_number_of_the_last_step():
    console = Console(record=True, width=120, force_terminal=True)
    history = History(wanted=3)
    with Board(console, "Headrace demo", history) as board:
        board.phase("Waiting")
        for _ in range(30):
            history.note_group(group(0))
        history.note_event(step(1, 0.25, {0: 48, 1: 48}))
        history.note_event(step(2, 0.75, {1: 96}))
        board.show()
    text = console.export_text()
    for part in ("Headrace demo", "0.75", "1.0", "1,000", "2/3 steps"):
        assert part in text


def test_without_a_terminal_there_is_a_plain_line_now_and_then():
    console = Console(record=True, width=200, force_terminal=False)
    history = History(wanted=25)
    with Board(console, "Headrace demo", history) as board:
        for i in range(25):
            history.note_event(step(i + 1, 0.5))
            board.show()
            board.show()
    lines = [line for line in console.export_text().splitlines() if "step" in line]
    assert [line.split("step ")[1].split("/")[0] for line in lines] == ["1", "10", "20", "25"]
