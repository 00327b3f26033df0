"""Two transcripts of a run, in colour: what the agent said at first and what it says now."""

from collections.abc import Iterator

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.demo.history import sampled_by
from headrace.schemas.chat import Choice, MessageOrChoice, ToolCallFunction
from headrace.schemas.codec import SampledGroup
from headrace.schemas.trajectory import Trajectory

_COLOURS = {"system": "bright_black", "user": "cyan", "assistant": "bold yellow", "tool": "magenta"}


def transcript(group: SampledGroup, title: str) -> Panel:
    """One trajectory of a group as a panel: the one whose reward is the group's most common."""
    chosen = _typical(group.group.trajectories)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right")
    grid.add_column()
    for role, text in _lines(chosen.messages_and_choices):
        colour = _COLOURS.get(role, "white")
        grid.add_row(Text(role, style="bright_black"), Text(text, style=colour))
    right = chosen.reward > 0
    verdict = Text.assemble(("reward ", "bright_black"), (f"{chosen.reward:g}", "bold green" if right else "bold red"))
    return Panel(
        Group(grid, verdict),
        title=f"[bold]{title}[/] · policy version {sampled_by(group)}",
        title_align="left",
        border_style="green" if right else "red",
        padding=(0, 1),
        width=64,
    )


def _typical(trajectories: list[Trajectory]) -> Trajectory:
    mean = sum(t.reward for t in trajectories) / len(trajectories)
    return min(trajectories, key=lambda t: abs(t.reward - round(mean)))


def _lines(items: list[MessageOrChoice]) -> Iterator[tuple[str, str]]:
    for item in items:
        if isinstance(item, Choice):
            yield "assistant", _said(item) or "(nothing)"
        else:
            yield item.role, item.content if isinstance(item.content, str) else ""


def _said(choice: Choice) -> str:
    calls = choice.message.tool_calls or []
    return " ".join([*(f"{c.function.name}({_arguments(c.function)})" for c in calls), choice.message.content or ""]).strip()


def _arguments(function: ToolCallFunction) -> str:
    if isinstance(function.arguments, str):
        return function.arguments
    return ", ".join(str(value) for value in function.arguments.values())
