"""Loading a base model, and the proof that packed rows do not see each other in it.

Guarantees: any Hugging Face causal LM folder (or GGUF file in one) is a base model, in float32; `row_layout` compares packed with
alone on the loaded model itself. Known trap: rows are isolated only with `attention_mask=None`, `use_cache=False` and
position ids that restart; with an all-ones mask logits are silently wrong by 0.2. Gives up: code from the folder
(`trust_remote_code`).
"""

from enum import Enum
from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import HeadraceError
from headrace.schemas.training import LoraSettings, ModelSettings
from headrace.trainer.forward import logits_at
from headrace.trainer.plan import BaseSource

TOLERANCE = 1e-3


class BaseModelError(HeadraceError):
    """A base model that can't be loaded; says which and why."""


def load_base(base: BaseSource) -> Any:  # noqa: ANN401 - a transformers model, untyped
    """The causal LM of a folder, in float32 on the CPU.

    Raises:
        BaseModelError: no such folder, or transformers can't load it.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    if not Path(base.path).is_dir():
        raise BaseModelError(f"base model: {base.path} is no folder")
    try:
        # The attention is transformers' choice: SDPA where the architecture has it. The self-test judges whatever it is.
        return AutoModelForCausalLM.from_pretrained(base.path, gguf_file=base.gguf_file, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise BaseModelError(f"base model in {base.path}: {type(error).__name__}: {error}") from error


def adapt(model: Any, settings: ModelSettings) -> Any:  # noqa: ANN401 - a transformers model, untyped
    """The model with what trains: all parameters, or LoRA adapters over frozen ones."""
    if settings.adaptation == "full":
        model.requires_grad_(True)
        return model
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - takes seconds

    lora: LoraSettings = settings.lora
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    adapted = get_peft_model(
        model,
        LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=targets, bias="none", task_type="CAUSAL_LM"),
    )
    # The catalogue's name, not this machine's folder: equal training gives equal files on every machine.
    adapted.peft_config["default"].base_model_name_or_path = settings.base_model
    return adapted


def trainable_parameters(model: Any) -> dict[str, torch.nn.Parameter]:  # noqa: ANN401 - a transformers model, untyped
    """Parameters that train, by name, in a fixed order."""
    return {name: parameter for name, parameter in sorted(model.named_parameters()) if parameter.requires_grad}


class RowLayout(Enum):
    """How many sequences a row may hold."""

    PACKED = "packed"
    ALONE = "alone"
    """One: the model lets packed sequences see each other."""


@torch.no_grad()
def row_layout(model: Any) -> RowLayout:  # noqa: ANN401 - a transformers model, untyped
    """The start-up self-test: whether sequences that share a row get the logits that each gets alone, and if not, whether a sequence is at
    least untouched by what stands behind it.

    Raises:
        BaseModelError: not even that: the model can't be trained on rows.
    """
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(0, vocabulary, (n,), generator=generator) for n in (7, 11, 5)]

    def logits(rows: list[torch.Tensor], positions: torch.Tensor, wanted: int) -> torch.Tensor:
        tokens_RL, positions_RL = torch.stack(rows).to(device), positions.expand(len(rows), -1).to(device)
        chosen_RL = torch.zeros(tokens_RL.shape, dtype=torch.bool, device=device)
        chosen_RL[:, :wanted] = True
        return logits_at(model, tokens_RL, positions_RL, *chosen_RL.nonzero(as_tuple=True)).float().cpu()

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return bool((a - b).abs().max() <= TOLERANCE * max(1.0, float(a.abs().max())))

    try:
        alone = torch.cat([logits([part], torch.arange(len(part)), len(part)) for part in parts])
        row, restarting = torch.cat(parts), torch.cat([torch.arange(len(part)) for part in parts])
        # Two rows, so that rows are proved not to see each other either.
        if same(logits([row, row.flip(0)], restarting, len(row))[: len(row)], alone):
            return RowLayout.PACKED
        first = len(parts[0])
        if same(logits([row], torch.arange(len(row)), first), alone[:first]):
            return RowLayout.ALONE
    except (TypeError, AttributeError) as error:
        raise BaseModelError(f"the base model can't be trained on rows with position ids: {type(error).__name__}: {error}") from error
    raise BaseModelError("the base model is not causal: a sequence's logits change with the tokens behind it, so it can't be trained")
