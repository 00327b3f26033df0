"""Groups to tokens: what the sampler drew is trained on, never the re-tokenized text.

`rollout_tokens.py` says what a trajectory becomes. Here the group is put together: members that can't be trained on are set aside, each
with a reason of its own, and the model's policy (`group_policy.py`) says what becomes of the rest.

Guarantees: every member of a group is tokenized, or rejected with a reason from the closed list; one of them never takes the others with it
but by policy. Needs no torch, and no chat template while every choice brings its prompt's ids. Limitations: the options of the job that
names a group, which is read later; what matters here (`purpose`, `allow_training_without_logprobs`) the group says itself.
"""

import json
import os
from collections.abc import Callable
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.outages import said
from headrace.schemas.chat import Choice
from headrace.schemas.codec import SampledGroup
from headrace.schemas.reasons import RejectionReason as Reason
from headrace.schemas.training import ModelSettings
from headrace.schemas.trajectory import NO_REWARD, Trajectory
from headrace.trainer.base_tokenizer import load_tokenizer
from headrace.trainer.chat_text import ChatText, ChatTextError
from headrace.trainer.group_policy import refusal_of
from headrace.trainer.groups import RejectedTrajectory, TokenizedGroup, TokenizedTrajectory
from headrace.trainer.lengths import BaseLimits
from headrace.trainer.plan import BaseSource, BaseUnusableError
from headrace.trainer.rollout_tokens import RolloutTokenizer, UnfitError
from headrace.trainer.user_metrics import UserMetrics

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase

_DETAIL = 1000


class GroupRefused(Exception):  # noqa: N818 - a verdict, not a fault of the program: the group could be read and is not trained on
    """A group that can't be trained on.

    Args:
        reason: From the closed list.
        detail: What, where and what to do.
        trajectory: Index of the (first) trajectory at fault.
    """

    def __init__(self, reason: Reason, detail: str, trajectory: int | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.trajectory = trajectory


class GroupTokenizer:
    """Tokenizes groups for one base model.

    Args:
        base: A Hugging Face folder, or a folder with a GGUF file.

    Raises:
        BaseUnusableError: the config can't be read.
    """

    def __init__(self, base: BaseSource) -> None:
        from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

        self._base = base
        if not os.path.isdir(base.path):  # noqa: PTH112 - a pathlib path raises where it may not look
            raise BaseUnusableError(f"base model {base.path}: there is no such folder")
        try:
            config = AutoConfig.from_pretrained(base.path, **_gguf(base), local_files_only=True).get_text_config()
            self._stop_ids = _stop_ids(config.eos_token_id, Path(base.path))
        except Exception as error:
            raise BaseUnusableError(f"base model {base.path}: its config can't be read: {said(error)}") from error
        self.limits = BaseLimits(vocabulary=int(config.vocab_size), positions=getattr(config, "max_position_embeddings", None))
        """Of the base model."""

    def tokenize(self, group: SampledGroup, group_id: str, settings: ModelSettings) -> TokenizedGroup:
        """Tokenize a group.

        Args:
            group: As decoded; its `purpose` says whether it is of rollouts or of examples.
            group_id: Its id, given or made by the lane.
            settings: Of the model. The longest sequence is the least of `max_sequence_tokens`, `packed_sequence_length` and the base
                model's positions.

        Returns:
            The members that fit; `rejected` says of each other one why not.

        Raises:
            GroupRefused: nothing of it is to be trained on.
            BaseUnusableError: the base model's tokenizer or chat template can't be used: nothing is decided.
        """
        inner = group.group
        if not inner.trajectories:
            raise GroupRefused(Reason.NO_TRAJECTORIES, "the group has no trajectories")
        sft = inner.purpose == "sft"
        of_job = inner.allow_training_without_logprobs
        rollouts = RolloutTokenizer(
            chat=self._chat(settings),
            vocabulary=self.limits.vocabulary,
            limit=self.limits.longest(settings),
            truncate=settings.batch.over_long == "truncate" and not sft,  # half an example teaches to stop in the middle
            text=sft or bool(settings.train.allow_training_without_logprobs if of_job is None else of_job),
            sft=sft,
        )
        turns = iter(group.turns)
        fitting: list[TokenizedTrajectory] = []
        rejected: list[RejectedTrajectory] = []
        for index, trajectory in enumerate(inner.trajectories):
            own = list(islice(turns, _choices(trajectory)))  # taken before anything can fail: the next member starts at its own turns
            try:
                if not sft and "reward" not in trajectory.model_fields_set:
                    raise UnfitError(Reason.MISSING_REWARD, NO_REWARD)
                made = rollouts.tokenize(trajectory, iter(own))
            except UnfitError as error:
                rejected.append(_rejected(index, error.reason, error.detail))
            except BaseUnusableError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a tokenizer or a template does: one member never takes the others down
                rejected.append(_rejected(index, Reason.TOKENIZATION_FAILED, said(error)))
            else:
                fitting.append(
                    TokenizedTrajectory(
                        reward=float(trajectory.reward),
                        sequences=made.fitted.sequences,
                        # An example was written, not sampled: there is no version whose lag could matter.
                        initial_policy_version=None if sft else trajectory.initial_policy_version,
                        final_policy_version=None if sft else trajectory.final_policy_version,
                        truncated=made.fitted.truncated,
                        metrics=UserMetrics.of(trajectory.metrics),
                        turns_without_end=made.turns_without_end,
                        turns_as_context=made.turns_as_context,
                    )
                )
        tokenized = TokenizedGroup(
            group_id=group_id, trajectories=tuple(fitting), rejected=tuple(rejected), exceptions=len(inner.exceptions), sft=sft
        )
        if (refusal := refusal_of(tokenized, settings.batch)) is not None:
            raise GroupRefused(refusal.reason, refusal.detail, refusal.trajectory)
        return tokenized

    def _chat(self, settings: ModelSettings) -> Callable[[], ChatText]:
        """The chat template with the model's switches, opened once a group and only when it is needed."""
        opened: list[ChatText | ChatTextError] = []

        def chat() -> ChatText:
            if not opened:
                try:
                    opened.append(ChatText(self._tokenizer, settings.chat_template_kwargs, self._stop_ids))
                except ChatTextError as error:  # kept: not tried again for every turn
                    opened.append(error)
            if isinstance(opened[0], ChatTextError):
                raise opened[0]
            return opened[0]

        return chat

    @cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        if (tokenizer := load_tokenizer(self._base)) is None:
            raise ChatTextError("the base model has no tokenizer: send prompt_token_ids and token_ids with each choice")
        return tokenizer


def _gguf(base: BaseSource) -> dict[str, str]:
    return {} if base.gguf_file is None else {"gguf_file": base.gguf_file}


def _stop_ids(of_config: int | list[int] | None, folder: Path) -> frozenset[int]:
    """Tokens with which a base model ends its turns, by its config and its generation config."""
    found = [of_config]
    generation = folder / "generation_config.json"
    if generation.is_file():
        found.append(json.loads(generation.read_bytes()).get("eos_token_id"))
    return frozenset(token_id for ids in found if ids is not None for token_id in (ids if isinstance(ids, list) else [ids]))


def _choices(trajectory: Trajectory) -> int:
    return sum(isinstance(item, Choice) for items, _tools in trajectory.histories() for item in items)


def _rejected(index: int, reason: Reason, detail: str) -> RejectedTrajectory:
    return RejectedTrajectory(index=index, reason=reason, detail=f"trajectories[{index}]: {detail}"[:_DETAIL])
