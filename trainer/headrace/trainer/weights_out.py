"""Weights as others load them: a whole Hugging Face folder, or a peft adapter. Safetensors, never pickle.

Guarantees: `full` is itself a base-model folder (config, tokenizer, model.safetensors with tied weights once); `lora` is what
`PeftModel.from_pretrained` and vLLM read. The small files are made once a model, so that a step writes tensors only. Under ZeRO 3
tensors are gathered one at a time; rank 0 writes, beside the next step where it has a copy.
"""

import tempfile
from pathlib import Path
from typing import Any, Literal

import orjson
from safetensors.torch import save_file

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
            self._files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}

    def tensors(self) -> Tensors:
        """The weights by name, on the CPU: the model's own memory where that is there. Called by all ranks."""
        whole = self._whole()
        if self.format == "lora":
            from peft import get_peft_model_state_dict  # noqa: PLC0415 - takes seconds

            # Embeddings are never part of an adapter here; asking peft to find out makes it look for the base model on the network.
            whole = get_peft_model_state_dict(self._model, state_dict=whole, save_embedding_layers=False)
        else:
            for tied in getattr(self._model, "_tied_weights_keys", None) or ():
                # The loader ties them again; safetensors refuses shared memory.
                if self._model.get_output_embeddings().weight is self._model.get_input_embeddings().weight:
                    whole.pop(tied, None)
        return dict(sorted(whole.items()))

    def copied(self, tensors: Tensors) -> Tensors:
        """Weights that stay as they are when the model trains on."""
        own = any(parameter.device.type == "cpu" for parameter in self._model.parameters())
        return {name: tensor.clone() for name, tensor in tensors.items()} if own else tensors

    def write(self, folder: Path, tensors: Tensors) -> None:
        """Write all files into an existing folder. At rank 0."""
        for name, content in self._files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        save_file(tensors, folder / (ADAPTER if self.format == "lora" else WHOLE), metadata={"format": "pt"})

    def _whole(self) -> Tensors:
        """State dict on the CPU, whole; of an adapter only what trains."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        found: Tensors = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            parameter = parameters.get(name, tensor)
            if self.format == "full" or parameter.requires_grad:
                with gathered([parameter]):
                    found[name] = parameter.detach().cpu().contiguous()
        return found


def _sort_targets(config: Path) -> None:
    """Peft writes the names of the target modules in the order of a set, another one in each process; equal weights need equal bytes."""
    content = orjson.loads(config.read_bytes())
    if isinstance(content["target_modules"], list):
        content["target_modules"].sort()
    config.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))


def _save_tokenizer(base: BaseSource, folder: str) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(base.path, gguf_file=base.gguf_file, local_files_only=True)
    except (OSError, ValueError):
        return  # a base model without a tokenizer: its agents bring token ids
    tokenizer.save_pretrained(folder)
