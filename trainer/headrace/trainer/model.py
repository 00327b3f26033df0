"""Loading a base model, and the proof that packed sequences do not see each other in it.

Guarantees: any Hugging Face causal LM folder (or GGUF file in one) is a base model, in float32; `self_test` compares packed with
alone on the loaded model itself, and refuses a model that can't be trained on rows at all. What its short samples can't show, because
it begins at thousands of tokens, is found by other means: windows are narrowed for the test, a neighbour has the last position, and
rotary positions that depend on the longest sequence of a pass are told by their name. Limitations: no code from the folder
(`trust_remote_code`).
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headrace.core.outages import said
from headrace.schemas.training import LoraSettings, ModelSettings
from headrace.trainer.forward import RowTensors, Scorer, logits_at
from headrace.trainer.groups import TokenSequence
from headrace.trainer.packing import pack
from headrace.trainer.plan import BaseSource, BaseUnusableError
from headrace.trainer.rows import CreditedSequence, PackedRow
from headrace.trainer.tree_attention import ATTENTION, register

TOLERANCE = 1e-3
_WINDOW = 4
"""Tokens of every sliding window while the self-test looks at windows: fewer than its samples have."""
_PART = 0.05
"""Of what a window changes, that the tree attention may be off by."""
logger = logging.getLogger(__name__)


class BaseModelError(BaseUnusableError):
    """A base model that can't be loaded; says which and why."""


def load_base(base: BaseSource) -> Any:  # noqa: ANN401 - a transformers model, untyped
    """The causal LM of a folder, in float32 on the CPU.

    Raises:
        BaseModelError: no such folder, transformers can't load it, or weights are missing in it, which transformers would draw at random.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    if not os.path.isdir(base.path):  # noqa: PTH112 - a pathlib path raises where it may not look
        raise BaseModelError(f"base model: {base.path} is no folder")
    try:
        # The attention is transformers' choice: SDPA where the architecture has it. The self-test judges whatever it is.
        loaded: Any = AutoModelForCausalLM.from_pretrained(  # with the loading info a pair, which its type does not say
            base.path, gguf_file=base.gguf_file, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # whatever a folder's files make transformers raise
        raise BaseModelError(f"base model in {base.path}: {said(error)}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise BaseModelError(f"base model in {base.path}: its files lack {len(missing)} weights: {', '.join(missing[:3])}")
    return model


def adapt(model: Any, settings: ModelSettings) -> Any:  # noqa: ANN401 - a transformers model, untyped
    """The model with what trains: all parameters, or LoRA adapters over frozen ones.

    Raises:
        BaseModelError: `lora.target_modules` names what is not there or is no linear layer, or peft can't adapt this architecture.
    """
    if settings.adaptation == "full":
        model.requires_grad_(True)
        return model
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - takes seconds

    lora: LoraSettings = settings.lora
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    if isinstance(targets, list):
        _check_targets(model, targets)
    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=targets, bias="none", task_type="CAUSAL_LM")
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise BaseModelError(f"base model {settings.base_model!r} can't be adapted: {error}") from error
    # The catalogue's name, not this machine's folder: equal training gives equal files on every machine.
    adapted.peft_config["default"].base_model_name_or_path = settings.base_model
    return adapted


def _check_targets(model: Any, targets: list[str]) -> None:  # noqa: ANN401 - untyped
    """Peft takes what it finds, so that a misspelt name among others would go unseen."""
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415 - GPT-2's linear layer

    modules = dict(model.named_modules())
    linear = {name: module for name, module in modules.items() if isinstance(module, (torch.nn.Linear, Conv1D))}
    for target in targets:
        # As peft matches: the whole name, or its end.
        found = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not found or not linear.keys() >= set(found):
            names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            fault = f"is a {type(modules[found[0]]).__name__}" if found else "is not there"
            raise BaseModelError(f"lora.target_modules: {target!r} {fault}; the base model's linear layers are {names}")


def trainable_parameters(model: Any) -> dict[str, torch.nn.Parameter]:  # noqa: ANN401 - a transformers model, untyped
    """Parameters that train, by name, in a fixed order."""
    return {name: parameter for name, parameter in sorted(model.named_parameters()) if parameter.requires_grad}


@torch.no_grad()
def self_test(model: Any) -> Scorer:  # noqa: ANN401 - a transformers model, untyped
    """Which way of scoring rows is right for the loaded model, found by comparing with each sequence alone.

    Tree attention with shared prefixes where that gives the logits of each sequence alone; else the model's own attention with one sequence
    a row; and scoring in chunks where the output layer's logits are the model's.

    Raises:
        BaseModelError: not even one sequence a row is right (the model is not causal, or takes no positions): it can't be trained.
    """
    _forget_longest(model)
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().num_embeddings
    sequences = _samples(vocabulary)
    own_attention = model.config._attn_implementation
    try:
        alone = [_logits(model, _row([sequence]), device, None) for sequence in sequences]
        for sequence, logits_TV in zip(sequences, alone, strict=True):
            half = len(sequence) // 2
            # Where positions follow from the length the other sequence must have it, too.
            other = np.concatenate([sequence[:half], sequence[: len(sequence) - half]]) if _follows_longest(model) else sequence[:half]
            if not _same(_logits(model, _row([other]), device, None)[:half], logits_TV[:half]):
                raise BaseModelError(
                    "the base model is not causal: a sequence's logits change with the tokens behind it, so it can't be trained"
                )
    except (TypeError, AttributeError) as error:
        raise BaseModelError(f"the base model can't be trained on rows with position ids: {said(error)}") from error
    width: int | None = _attention_width(model)
    right = _tree_is_right(model, sequences, alone, device, width)
    if right and (windows := _windows(model)):
        with _narrow(windows):
            right = _windows_are_right(model, sequences, alone, device, width, own_attention)
    if not right:
        model.set_attn_implementation(own_attention)
        width = None
        logger.warning("this architecture lets packed sequences see each other: every sequence gets a row of its own")
    return Scorer(width=width, chunked=_chunks_are_right(model, sequences, alone, device, width))


def _samples(vocabulary: int) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    """Sequences that share prefixes in a nested way, one that shares nothing, and one that is the beginning of another."""
    rng = np.random.default_rng(0)

    def draw(n: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return rng.integers(0, vocabulary, n).astype(np.int32)

    stem, branch = draw(9), draw(6)
    joined = [(stem, branch, draw(5)), (stem, branch, draw(8)), (stem, draw(4)), (draw(11),), (stem, branch[:3])]
    return [np.concatenate(parts) for parts in joined]


def _row(sequences: list[Any]) -> PackedRow:
    """One row with every token but the first as a target."""
    credited = [
        CreditedSequence(
            sequence=TokenSequence(token_ids=ids, trainable=np.arange(len(ids)) > 0, logprobs=np.full(len(ids), np.nan, np.float32)),
            tree=0,
            branch=i,
            advantage=0.0,
            weight=1.0,
        )
        for i, ids in enumerate(sequences)
    ]
    (row,) = pack(credited, capacity=sum(len(ids) for ids in sequences), min_shared=1).rows
    return row


def _logits(model: Any, row: PackedRow, device: torch.device, width: int | None) -> torch.Tensor:  # noqa: ANN401 - untyped
    tensors = RowTensors.of(row, device, width)
    return logits_at(model, tensors, torch.arange(len(row), device=device)).float().cpu()


def _tree_is_right(model: Any, sequences: list[Any], alone: list[torch.Tensor], device: torch.device, width: int | None) -> bool:  # noqa: ANN401 - untyped
    if getattr(model.config.get_text_config(), "attention_chunk_size", None) is not None:
        return False  # attention that starts again every so many tokens: the samples are too short to show it
    if _follows_longest(model):
        return False
    register()
    row = _row(sequences)
    try:
        model.set_attn_implementation(ATTENTION)
        logits_TV = _logits(model, row, device, width)
        beside_TV = _logits(model, _with_far_neighbour(model, row), device, width)
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        logger.info("tree attention does not fit this architecture: %s: %s", type(error).__name__, error)
        return False
    if not _same(beside_TV[: len(row)], logits_TV):
        return False
    # Targets tell where each sequence's tokens stand: the column that predicts token i + 1 holds token i.
    return all(_same(logits_TV[at], expected[:-1]) for at, expected in zip(_columns(row, len(sequences)), alone, strict=True))


def _columns(row: PackedRow, sequences: int) -> list[Any]:
    return [row.predictors_N[row.branches_N == i] for i in range(sequences)]


def _with_far_neighbour(model: Any, row: PackedRow) -> PackedRow:  # noqa: ANN401 - untyped
    """The row, and a sequence of one token behind it that stands at the last position which the model has."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    return replace(
        row,
        token_ids_T=np.append(row.token_ids_T, row.token_ids_T[:1]),
        position_ids_T=np.append(row.position_ids_T, np.int32(positions - 1)),
        starts_G=np.append(row.starts_G, np.int32(len(row))),
        parents_G=np.append(row.parents_G, np.int32(-1)),
    )


def _follows_longest(model: Any) -> bool:  # noqa: ANN401 - untyped
    """Whether rotary frequencies follow from the longest position of a pass, which a neighbour may have."""
    types = [getattr(module, "rope_type", "") for module in model.modules()]
    kinds = [kind for found in types for kind in (found.values() if isinstance(found, dict) else [found])]  # one for each kind of layer
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)


def _forget_longest(model: Any) -> None:  # noqa: ANN401 - untyped
    """Dynamic rotary positions keep the frequencies of the longest pass so far: each pass starts from the model's own instead."""

    def reset(module: Any, *_inputs: Any) -> None:  # noqa: ANN401 - untyped
        for name in [name for name, _ in module.named_buffers(recurse=False) if name.endswith("original_inv_freq")]:
            prefix = name.removesuffix("original_inv_freq")
            module.register_buffer(f"{prefix}inv_freq", getattr(module, name).clone(), persistent=False)  # some write into it
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)

    for module in model.modules():
        if hasattr(module, "original_max_seq_len") and _follows_longest(module):
            module.register_forward_pre_hook(reset)


def _windows(model: Any) -> list[Any]:  # noqa: ANN401 - untyped
    """What holds the length of a sliding window that the samples may not reach: configs and attention layers."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    if kinds is not None and not any("sliding" in kind for kind in kinds):
        return []
    holders = {id(holder): holder for module in model.modules() for holder in (module, getattr(module, "config", None))}
    return [
        holder for holder in holders.values() if isinstance(window := getattr(holder, "sliding_window", None), int) and window > _WINDOW
    ]


@contextmanager
def _narrow(windows: list[Any]) -> Iterator[None]:
    before = [holder.sliding_window for holder in windows]
    for holder in windows:
        holder.sliding_window = _WINDOW
    try:
        yield
    finally:
        for holder, window in zip(windows, before, strict=True):
            holder.sliding_window = window


def _windows_are_right(  # noqa: PLR0917 - as those next to it
    model: Any,  # noqa: ANN401 - untyped
    sequences: list[Any],
    alone: list[torch.Tensor],
    device: torch.device,
    width: int | None,
    own_attention: str,
) -> bool:
    """Whether the tree attention keeps to windows that are narrowed now, as the model's own attention does.

    An architecture may hold its window where the test can't narrow it, or not tell it to the attention: what the window changes must be
    seen, and what the tree attention makes of it must be the same but for a small part of that.
    """
    row = _row(sequences)
    tree_TV = _logits(model, row, device, width)
    model.set_attn_implementation(own_attention)
    narrow = [_logits(model, _row([sequence]), device, None) for sequence in sequences]
    model.set_attn_implementation(ATTENTION)
    changed = max(float((a - b).abs().max()) for a, b in zip(narrow, alone, strict=True))
    wrong = max(
        float((tree_TV[at] - expected[:-1]).abs().max()) for at, expected in zip(_columns(row, len(sequences)), narrow, strict=True)
    )
    return changed > 0 and wrong <= _PART * changed


def _chunks_are_right(
    model: Any,  # noqa: ANN401 - untyped
    sequences: list[Any],
    alone: list[torch.Tensor],
    device: torch.device,
    width: int | None,
) -> bool:
    scorer = Scorer(width=width, chunked=True)
    for ids, logits_TV in zip(sequences, alone, strict=True):
        try:
            new_N, _ = scorer.score(model, RowTensors.of(_row([ids]), device, width), chunk=4)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            logger.info("logits of this architecture are projected whole: %s: %s", type(error).__name__, error)
            return False
        expected_N = logits_TV[:-1].log_softmax(-1).gather(-1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0]
        if not _same(new_N.float().cpu(), expected_N):
            return False
    return True


def _attention_width(model: Any) -> int:  # noqa: ANN401 - untyped
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    return int(heads * (getattr(config, "head_dim", None) or config.hidden_size // heads))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * float(b.abs().max()))
