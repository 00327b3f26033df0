"""Loading a base model, and the proof that packed rows do not see each other in it.

Guarantees: any Hugging Face causal LM folder (or GGUF file in one) is a base model, in float32; `isolates_packed_rows` compares
packed with alone on the loaded model itself. Known trap: rows are isolated only with `attention_mask=None`, `use_cache=False` and
position ids that restart; with an all-ones mask logits are silently wrong by 0.2. Gives up: code from the folder
(`trust_remote_code`).
"""

from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import HeadraceError
from headrace.schemas.training import LoraSettings, ModelSettings
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
        return AutoModelForCausalLM.from_pretrained(
            base.path, gguf_file=base.gguf_file, dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
        )
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
    return get_peft_model(
        model,
        LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=targets, bias="none", task_type="CAUSAL_LM"),
    )


def trainable_parameters(model: Any) -> dict[str, torch.nn.Parameter]:  # noqa: ANN401 - a transformers model, untyped
    """Parameters that train, by name, in a fixed order."""
    return {name: parameter for name, parameter in sorted(model.named_parameters()) if parameter.requires_grad}


@torch.no_grad()
def isolates_packed_rows(model: Any) -> bool:  # noqa: ANN401 - a transformers model, untyped
    """Whether sequences packed into one row get the logits that each gets alone (the start-up self-test)."""
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(0, vocabulary, (n,), generator=generator) for n in (7, 11, 5)]

    def logits(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=tokens[None].to(device), position_ids=positions[None].to(device), use_cache=False)
        return output.logits[0].float().cpu()  # type: ignore[no-any-return]  # untyped

    was_training = model.training
    model.eval()
    alone = torch.cat([logits(part, torch.arange(len(part))) for part in parts])
    packed = logits(torch.cat(parts), torch.cat([torch.arange(len(part)) for part in parts]))
    model.train(was_training)
    return bool((alone - packed).abs().max() <= TOLERANCE * max(1.0, float(alone.abs().max())))
