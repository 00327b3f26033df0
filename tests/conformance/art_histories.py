"""What `openpipe-art` itself makes of captured trajectories: run by `test_art_histories.py` in the client's environment.

Reads groups as the client sends them, one named group a line, and prints for each trajectory the histories that the client's own trainer
would train: token ids, which of them train, and their log-probabilities. Nothing is rendered, so the tokenizer is only a name.
"""

import json
import os
import sys
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from art.trajectories import TokenFlag, TrajectoryGroup, first_occurrence_masks


class NoTokenizer:
    """Ids that the engine gave need none."""

    name_or_path = "none"
    all_special_ids: tuple[int, ...] = ()

    def __call__(self, *_: object, **__: object) -> object:
        raise AssertionError("a text was tokenized")

    def apply_chat_template(self, *_: object, **__: object) -> object:
        raise AssertionError("a template was rendered")


for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
    named = json.loads(line)
    if named["name"] == "without_ids":
        continue
    found = []
    for trajectory in TrajectoryGroup.model_validate(named["group"]).trajectories:
        histories = trajectory.tokenize(multi_history=True, tokenizer=NoTokenizer(), base_model="none").histories
        masks = first_occurrence_masks(histories, where=TokenFlag.SAMPLED)
        found.append(
            [
                {
                    "token_ids": history.tokens,
                    "trains": mask,
                    "logprobs": [lp if m else None for lp, m in zip(history.logprobs, mask, strict=True)],
                }
                for history, mask in zip(histories, masks, strict=True)
                if any(mask)
            ]
        )
    sys.stdout.write(json.dumps({"name": named["name"], "trajectories": found}) + "\n")
