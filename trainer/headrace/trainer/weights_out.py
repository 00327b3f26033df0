"""Weights as others load them: a whole Hugging Face folder, or a peft adapter. Safetensors, never pickle.

Guarantees: `full` is itself a base-model folder (config, tokenizer, model.safetensors with tied weights once); `lora` is what
`PeftModel.from_pretrained` and vLLM read. The small files are made once a model, so that a step writes tensors only. Under ZeRO 3
tensors are gathered one at a time; rank 0 writes, next to the next step where it has a copy.
"""

import tempfile
from pathlib import Path
from typing import Any, Literal

import orjson
import torch
from safetensors.torch import save_file

from headrace.trainer.base_tokenizer import load_tokenizer
from headrace.trainer.plan import BaseSource
from headrace.trainer.shards import Tensors, gathered

WeightsFormat = Literal["full", "lora"]
ADAPTER = "adapter_model.safetensors"
WHOLE = "model.safetensors"


class WeightsWriter:
    """Writes the weights of one loaded model.

    Args:
        model: The model, adapted.
        base: Where its tokenizer is.
        adaptation: `full` or `lora`.
    """

    def __init__(self, model: Any, base: BaseSource, adaptation: WeightsFormat) -> None:  # noqa: ANN401 - a transformers model, untyped
        self._model = model
        self.format: WeightsFormat = adaptation
        with tempfile.TemporaryDirectory() as folder:
            if adaptation == "lora":
                model.peft_config["default"].save_pretrained(folder)
                _sort_targets(Path(folder, "adapter_config.json"))
            else:
                model.config.save_pretrained(folder)
                if model.can_generate() and model.generation_config is not None:
                    model.generation_config.save_pretrained(folder)
                _save_tokenizer(base, folder)
            # The same objects as long as the model lives: to look for them took as long as to copy a small model.
            parameters = dict(model.named_parameters(remove_duplicate=False))
            named = [(name, parameters.get(name, tensor)) for name, tensor in model.state_dict(keep_vars=True).items()]
            self._written = [(name, tensor) for name, tensor in named if adaptation == "full" or tensor.requires_grad]
            self._files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}

    def tensors(self) -> Tensors:
        """The weights by name, as copies on the CPU, at rank 0. Called by all ranks."""
        whole = self._whole()
        if self.format == "lora" and whole:
            from peft import get_peft_model_state_dict  # noqa: PLC0415 - takes seconds

            # Embeddings are never part of an adapter here; asking peft to find out makes it look for the base model on the network.
            whole = get_peft_model_state_dict(self._model, state_dict=whole, save_embedding_layers=False)
        elif self.format == "full":
            for tied in getattr(self._model, "_tied_weights_keys", None) or ():
                # The loader ties them again; safetensors refuses shared memory.
                if self._model.get_output_embeddings().weight is self._model.get_input_embeddings().weight:
                    whole.pop(tied, None)
        return dict(sorted(whole.items()))

    def write(self, folder: Path, tensors: Tensors) -> None:
        """Write all files into an existing folder. At rank 0."""
        for name, content in self._files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        save_file(tensors, folder / (ADAPTER if self.format == "lora" else WHOLE), metadata={"format": "pt"})

    def _whole(self) -> Tensors:
        """State dict on the CPU, whole; of an adapter only what trains."""
        kept = torch.distributed.get_rank() == 0
        found: Tensors = {}
        for name, parameter in self._written:
            with gathered([parameter]):
                if kept:
                    found[name] = parameter.detach().to("cpu", copy=True).contiguous()
        return found


def _sort_targets(config: Path) -> None:
    """Peft writes the names of the target modules in the order of a set, another one in each process; equal weights need equal bytes."""
    content = orjson.loads(config.read_bytes())
    if isinstance(content["target_modules"], list):
        content["target_modules"].sort()
    config.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))


def _save_tokenizer(base: BaseSource, folder: str) -> None:
    if (tokenizer := load_tokenizer(base)) is not None:
        tokenizer.save_pretrained(folder)
