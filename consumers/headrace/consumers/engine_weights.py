"""The weights of a local engine: a base model from disk, and what is put on it: full weights, or a LoRA adapter.

Guarantees: a folder is read and checked (names, shapes, finite count of files) before the model is touched, so a folder that does not fit
leaves the model as it was; adapter names carry the version and a serial number and are never reused; where the kind changes (full after
LoRA, LoRA after full), the base is loaded anew, since an adapter means nothing on another base. Gives up: locking; its owner calls
`swap` while nobody decodes.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftConfig, PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from headrace.core.errors import HeadraceError

Kind = Literal["base", "full", "lora"]
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"


class WeightsMismatchError(HeadraceError):
    """Weights that do not fit the model; says which tensor and why. The model is as it was."""


class EngineWeights:
    """A causal LM whose weights can be exchanged.

    Args:
        base_path: Folder of a Hugging Face model.
        gguf_file: File name inside it, where the weights are GGUF (read to float32).
        device: Where the model lives.

    `model` is what decodes: adapters are injected into its own modules.
    """

    def __init__(self, base_path: Path, *, gguf_file: str | None, device: str) -> None:
        self._base_path = base_path
        self._gguf_file = gguf_file
        self._device = device
        self._peft: PeftModel | None = None
        self._adapter: str | None = None
        self._serial = 0
        self.kind: Kind = "base"
        self.model = self._load_base()

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """All tensors of a folder of weights, in memory. Slow: for a thread, while the engine serves.

        Raises:
            WeightsMismatchError: no safetensors file there, or one that can't be read.
        """
        adapter = folder / _ADAPTER_WEIGHTS
        files = [adapter] if (folder / _ADAPTER_CONFIG).is_file() else sorted(folder.glob("*.safetensors"))
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            try:
                tensors.update(load_file(file))
            except Exception as error:  # safetensors raises its own errors, OSError and more
                raise WeightsMismatchError(f"{file}: not a readable safetensors file: {error}") from error
        if not tensors:
            raise WeightsMismatchError(f"{folder} holds no *.safetensors file with weights")
        return tensors

    def swap(self, folder: Path, tensors: dict[str, torch.Tensor], version: int) -> None:
        """Put what `read` gave on the model.

        Raises:
            WeightsMismatchError: names or shapes do not fit; the model is as it was.
        """
        if (folder / _ADAPTER_CONFIG).is_file():
            self._swap_lora(folder, tensors, version)
        else:
            self._swap_full(folder, tensors)

    def reset(self) -> None:
        """Back to the base model."""
        if self.kind == "base":
            return
        self.model = self._load_base()
        self._peft = self._adapter = None
        self.kind = "base"

    def _load_base(self) -> PreTrainedModel:
        shown = is_progress_bar_enabled()
        disable_progress_bar()  # type: ignore[no-untyped-call]  # not annotated there. The bar would draw over the agent's terminal
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self._base_path, gguf_file=self._gguf_file, dtype=torch.float32)
        finally:
            if shown:
                enable_progress_bar()  # type: ignore[no-untyped-call]  # as above
        model.train(mode=False)
        model.requires_grad_(requires_grad=False)
        torch.nn.Module.to(model, self._device)  # past the decorator of `model.to`, whose annotation takes no device
        return model

    def _swap_full(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        if self.kind == "lora":
            self.reset()
        own = self.model.state_dict()
        # Tied weights are one tensor under two names: a folder that has one of them is complete.
        written = {own[name].data_ptr() for name in tensors if name in own}
        missing = [name for name, tensor in own.items() if name not in tensors and tensor.data_ptr() not in written]
        _refuse(folder, "missing", missing)
        _refuse(folder, "not in the model", [name for name in tensors if name not in own])
        _refuse(folder, "of another shape", [f"{name} {list(t.shape)}" for name, t in tensors.items() if t.shape != own[name].shape])
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
        self.kind = "full"

    def _swap_lora(self, folder: Path, tensors: dict[str, torch.Tensor], version: int) -> None:
        config = PeftConfig.from_pretrained(str(folder))
        if not isinstance(config, LoraConfig):
            raise WeightsMismatchError(f"{folder}: {type(config).__name__} where a LoRA adapter is needed")
        config.inference_mode = True
        if self.kind == "full":
            self.reset()
        self._serial += 1
        name = f"v{version}-{self._serial}"
        try:
            if self._peft is None:
                self._peft = PeftModel(self.model, config, adapter_name=name)
            else:
                self._peft.add_adapter(name, config)
            found: Any = set_peft_model_state_dict(self._peft, tensors, adapter_name=name)
            _refuse(folder, "missing", [key for key in found.missing_keys if f".{name}." in key])
            _refuse(folder, "not in the model", list(found.unexpected_keys))
        except (RuntimeError, ValueError, WeightsMismatchError) as error:
            self._drop(name)
            raise WeightsMismatchError(f"{folder}: the adapter does not fit: {error}") from error
        self._peft.set_adapter(name, inference_mode=True)
        self._peft.eval()
        if self._adapter is not None:
            self._peft.delete_adapter(self._adapter)
        self._adapter = name
        self.kind = "lora"

    def _drop(self, name: str) -> None:
        """Take a half-loaded adapter out again."""
        if self._peft is None:
            return
        if self._adapter is None:
            self.model, self._peft = self._peft.unload(), None
        elif name in self._peft.peft_config:
            self._peft.delete_adapter(name)
            self._peft.set_adapter(self._adapter, inference_mode=True)


def _refuse(folder: Path, what: str, names: list[str]) -> None:
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise WeightsMismatchError(f"{folder}: tensors {what}: {shown}; is it a version of this engine's base model?")
