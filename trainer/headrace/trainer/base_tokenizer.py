"""The tokenizer of a base model, for the groups that are tokenized and for the weights that carry it.

Guarantees: a folder without any file of a tokenizer has none, which is not a fault: its agents bring token ids. A folder that has such
files and can't be read as a tokenizer is a fault of the base model, never of the group or the step that needs it.
Limitations: a tokenizer that reads texts otherwise than the model was trained with is not noticed.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.outages import said
from headrace.trainer.plan import BaseSource, BaseUnusableError

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")


def load_tokenizer(base: BaseSource) -> "PreTrainedTokenizerBase | None":
    """The tokenizer; None: the folder has no file of one.

    Raises:
        BaseUnusableError: it has, and can't be read.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    if base.gguf_file is None and not any(os.path.lexists(Path(base.path, name)) for name in _FILES):
        return None
    gguf = {} if base.gguf_file is None else {"gguf_file": base.gguf_file}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(base.path, **gguf, local_files_only=True)
    except Exception as error:  # whatever a tokenizer's files make transformers raise
        raise BaseUnusableError(f"base model {base.path}: its tokenizer can't be read: {said(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # transformers makes an empty one where a file is missing, which reads every text as nothing.
        raise BaseUnusableError(f"base model {base.path}: its tokenizer has no vocabulary: is a file missing?")
    return tokenizer
