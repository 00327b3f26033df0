"""The weights of an engine: a base model from disk, and sets of weights held next to it by name: LoRA adapters on it, or full copies.

Guarantees: a folder is read and checked (names, shapes, finite count of files) before a model is touched, so a folder that does not fit
leaves everything as it was; a name is never used for other weights. Adapters are small and share the base; a full set is a model of its
own. Limitations: locking; its owner calls `hold`, `drop` and `use` while no one decodes.

What an engine knows of its model next to the weights: vocabulary, context, and the tokens that end a turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from headrace.core.errors import HeadraceError

_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"


class WeightsMismatchError(HeadraceError):
    """Weights that do not fit the model; says which tensor and why. Everything is as it was."""


class EngineWeights:
    """A causal LM and the weights that it can decode with.

    Args:
        base_path: Folder of a Hugging Face model.
        gguf_file: File name inside it, where the weights are GGUF (read to float32).
        device: Where the model lives.
        keep_base: Keep the base model next to full weights. False: the first full weights take its place, which saves its memory, and it is
            loaded again when something asks for it.
    """

    def __init__(self, base_path: Path, *, gguf_file: str | None, device: str, keep_base: bool = True) -> None:
        self._base_path = base_path
        self._gguf_file = gguf_file
        self._device = device
        self._keep_base = keep_base
        self._base: PreTrainedModel | None = self._load_base()
        self._peft: Any = None  # a PeftModel; adapters are injected into the base's own modules
        self._adapters: set[str] = set()
        self._full: dict[str, PreTrainedModel] = {}
        self._in_use: str | None = None  # of the adapters; None: they are switched off, or it is not known

    @property
    def base(self) -> PreTrainedModel:
        """The base model; it decodes as one only after `use(None)`."""
        if self._base is None:
            self._base = self._load_base()
        return self._base

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

    def hold(self, name: str, folder: Path, tensors: dict[str, torch.Tensor], over: str | None = None) -> None:
        """Take what `read` gave, under a name that was never used.

        Args:
            name: Letters, digits, dashes.
            folder: Where it was read.
            tensors: What was read.
            over: Weights that these replace: they are dropped, and where both are full, their memory is used again.

        Raises:
            WeightsMismatchError: names or shapes do not fit; everything is as it was.
        """
        if (folder / _ADAPTER_CONFIG).is_file():
            self._hold_lora(name, folder, tensors)
        else:
            self._hold_full(name, folder, tensors, over)
        if over is not None:
            self.drop(over)

    def drop(self, name: str) -> None:
        """Forget weights; what is not held is no error."""
        self._full.pop(name, None)
        if name not in self._adapters or self._peft is None:
            return
        self._adapters.discard(name)
        self._in_use = None
        if self._adapters:
            self._peft.set_adapter(min(self._adapters), inference_mode=True)  # peft warns where an active one goes
            self._peft.delete_adapter(name)
        elif self._keep_base or not self._full:
            self._base, self._peft = self._peft.unload(), None
        else:
            self._base = self._peft = None

    def use(self, name: str | None) -> PreTrainedModel:
        """The model that decodes with these weights, until the next call; None: the base model."""
        if name in self._full:
            return self._full[name]
        base = self.base
        if name is None:
            if self._peft is not None:
                self._peft.base_model.disable_adapter_layers()
            self._in_use = None
        elif name not in self._adapters or self._peft is None:
            raise KeyError(f"no weights {name!r} are held")
        elif name != self._in_use:
            self._peft.base_model.enable_adapter_layers()
            self._peft.set_adapter(name, inference_mode=True)
            self._in_use = name
        return base

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

    def _hold_full(self, name: str, folder: Path, tensors: dict[str, torch.Tensor], over: str | None) -> None:
        former = None if over is None else self._full.get(over)
        takes_base = not self._keep_base and self._peft is None and self._base is not None
        model = former or (self.base if takes_base else self._load_base())
        own = model.state_dict()
        # Tied weights are one tensor under two names: a folder that has one of them is complete.
        written = {own[key].data_ptr() for key in tensors if key in own}
        missing = [key for key, tensor in own.items() if key not in tensors and tensor.data_ptr() not in written]
        _refuse(folder, "missing", missing)
        _refuse(folder, "not in the model", [key for key in tensors if key not in own])
        _refuse(folder, "of another shape", [f"{key} {list(t.shape)}" for key, t in tensors.items() if t.shape != own[key].shape])
        for key, tensor in tensors.items():
            own[key].copy_(tensor)
        if over is not None:
            self._full.pop(over, None)
        if model is self._base:
            self._base = None
        self._full[name] = model

    def _hold_lora(self, name: str, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        config = PeftConfig.from_pretrained(str(folder))
        if not isinstance(config, LoraConfig):
            raise WeightsMismatchError(f"{folder}: {type(config).__name__} where a LoRA adapter is needed")
        config.inference_mode = True
        try:
            if self._peft is None:
                self._peft = PeftModel(self.base, config, adapter_name=name)
            else:
                self._peft.add_adapter(name, config)
            found: Any = set_peft_model_state_dict(self._peft, tensors, adapter_name=name)
            _refuse(folder, "missing", [key for key in found.missing_keys if f".{name}." in key])
            _refuse(folder, "not in the model", list(found.unexpected_keys))
        except (RuntimeError, ValueError, WeightsMismatchError) as error:
            self._take_out(name)
            raise WeightsMismatchError(f"{folder}: the adapter does not fit: {error}") from error
        self._peft.eval()
        self._adapters.add(name)
        self._in_use = None

    def _take_out(self, name: str) -> None:
        """Undo a half-loaded adapter."""
        self._in_use = None
        if self._peft is None:
            return
        if not self._adapters:
            self._base, self._peft = self._peft.unload(), None
        elif name in self._peft.peft_config:
            self._peft.delete_adapter(name)


def _refuse(folder: Path, what: str, names: list[str]) -> None:
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise WeightsMismatchError(f"{folder}: tensors {what}: {shown}; is it a version of this engine's base model?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Read once; the same for every version of a base model."""

    vocabulary: int
    context: int
    """Positions: prompt and generated tokens together."""
    stop_ids: frozenset[int]
    """The end-of-sequence tokens of the model and of its tokenizer."""

    def check(self, prompt: Sequence[int], max_tokens: int, what: str) -> None:
        """Refuse what the model can't take.

        Args:
            prompt: Token ids.
            max_tokens: New tokens at most.
            what: How the message names the prompt.

        Raises:
            ValueError: says which of both is wrong, and where.
        """
        if not prompt:
            raise ValueError(f"{what} is empty: at least one token or message is needed")
        if len(prompt) + max_tokens > self.context:
            raise ValueError(
                f"{what} has {len(prompt)} tokens; with max_tokens={max_tokens} that is more than the model's {self.context} positions"
            )
        wrong = next((token_id for token_id in prompt if not 0 <= token_id < self.vocabulary), None)
        if wrong is not None:
            raise ValueError(f"{what}: token id {wrong} is outside the vocabulary of {self.vocabulary}")


def facts_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ModelFacts:
    """The facts of a model with its tokenizer."""
    config = model.config.get_text_config()
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return ModelFacts(
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        stop_ids=frozenset(token_id for token_id in [*ids, tokenizer.eos_token_id] if token_id is not None),
    )
