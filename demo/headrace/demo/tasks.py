"""What an agent does: sample a group of rollouts of one task and say what each was worth.

Guarantees: every sampled token travels as the engine drew it, with log-probability and policy version; the context between two turns is
added token for token, so that a trajectory stays one row. Blocks: for a thread.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.demo import arithmetic, vault
from headrace.engine.sampling.generation import Generation
from headrace.engine.sampling.local_engine import LocalEngine
from headrace.schemas.chat import ChoiceMessage, Message, MessageOrChoice, Tool, ToolCall, ToolCallFunction
from headrace.schemas.codec import SampledGroup
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup
from headrace.schemas.turns import SampledTokens

VAULT_TURN_TOKENS = 4
"""One more than a well-formed turn needs."""


class Task(Protocol):
    """Samples groups."""

    def sample(self, engine: LocalEngine, rng: random.Random, *, groups: int, rollouts: int) -> list[SampledGroup]:
        """`groups` groups of `rollouts` trajectories each, as few batches as the task allows."""
        ...


@dataclass(slots=True, kw_only=True)
class _Rollout:
    """One trajectory while it grows."""

    items: list[MessageOrChoice]
    turns: list[SampledTokens]
    last: Generation | None = None
    reward: float = 0.0

    def say(self, generation: Generation, message: ChoiceMessage | None = None) -> None:
        """Add a sampled turn; `message` tells it in other words than plain text (a tool call)."""
        choice, tokens = generation.to_choice()
        if message is not None:
            choice = choice.model_copy(update={"message": message, "finish_reason": "tool_calls"})
        self.items.append(choice)
        self.turns.append(tokens)
        self.last = generation


class VaultTask:
    """`headrace.demo.vault` in two turns: all first turns are one batch, all second turns another."""

    def sample(self, engine: LocalEngine, rng: random.Random, *, groups: int, rollouts: int) -> list[SampledGroup]:
        """See `Task`. The rollouts of a group share the question; each has secrets of its own."""
        keys = [rng.choice(vault.KEYS) for _ in range(groups)]
        episodes = [vault.draw_episode(rng, key) for key in keys for _ in range(rollouts)]
        runs = [_Rollout(items=[episode.question], turns=[]) for episode in episodes]
        asked = engine.generate([run.items for run in runs], max_tokens=VAULT_TURN_TOKENS)
        open_runs = []
        for episode, run, turn in zip(episodes, runs, asked, strict=True):
            key = episode.call(_words(engine, turn))
            run.say(turn, None if key is None else _tool_call(key))
            if key is not None:
                run.items.append(Message(role="tool", content=episode.secrets[key], tool_call_id="call-1"))
                open_runs.append((episode, run, engine.prompt_after(turn, run.items[-1:])))
        answers = engine.generate([prompt for _, _, prompt in open_runs], max_tokens=VAULT_TURN_TOKENS)
        for (episode, run, _), turn in zip(open_runs, answers, strict=True):
            run.say(turn)
            run.reward = episode.reward(_words(engine, turn))
        return _grouped(runs, rollouts, tools=[vault.TOOL])


class ArithmeticTask:
    """`headrace.demo.arithmetic` in one turn."""

    def sample(self, engine: LocalEngine, rng: random.Random, *, groups: int, rollouts: int) -> list[SampledGroup]:
        """See `Task`. The rollouts of a group answer the same question."""
        questions = [question for question in (arithmetic.draw_question(rng) for _ in range(groups)) for _ in range(rollouts)]
        runs = [_Rollout(items=[*question.conversation()], turns=[]) for question in questions]
        answers = engine.generate([run.items for run in runs], max_tokens=arithmetic.MAX_TOKENS)
        for question, run, turn in zip(questions, runs, answers, strict=True):
            run.say(turn)
            run.reward = question.reward(turn.text)
        return _grouped(runs, rollouts, tools=None)


def _words(engine: LocalEngine, turn: Generation) -> Sequence[str]:
    """The turn's tokens as they are, special ones too: a role marker inside a turn is no well-formed turn."""
    return list(engine.tokenizer.convert_ids_to_tokens(turn.token_ids))


def _tool_call(key: str) -> ChoiceMessage:
    function = ToolCallFunction(name=vault.CALL, arguments={"key": key})
    return ChoiceMessage(tool_calls=[ToolCall(id="call-1", function=function)])


def _grouped(runs: list[_Rollout], rollouts: int, tools: list[Tool] | None) -> list[SampledGroup]:
    groups = []
    for start in range(0, len(runs), rollouts):
        members = runs[start : start + rollouts]
        trajectories = [
            Trajectory(
                messages_and_choices=run.items,
                tools=tools,
                reward=run.reward,
                initial_policy_version=run.turns[0].policy_versions[0] if run.turns[0].policy_versions else None,
                final_policy_version=run.turns[-1].policy_versions[-1] if run.turns[-1].policy_versions else None,
            )
            for run in members
        ]
        groups.append(SampledGroup(group=TrajectoryGroup(trajectories=trajectories), turns=tuple(t for run in members for t in run.turns)))
    return groups
