"""Forward and backward of a group of 8 answers of 128 tokens to one prompt of 1,024: shared prefix against one sequence at a time.

The model has SmolLM2-135M's shape (30 layers, 9 heads of 64 over 3 key heads, vocabulary 49,152), random weights, float32. Both sides
send only the answers' positions through the vocabulary projection, and both give the same gradient (tests/trainer/test_model.py). The other
side is transformers as it comes: SDPA, causal, a sequence a pass. Tokens saved would make 4.5 at best.
"""

import time
from collections.abc import Callable

import numpy as np
from benchmarks.measuring import Comparison, Rates

PROMPT, ANSWER, ANSWERS = 1024, 128, 8
TOKENS = ANSWERS * (PROMPT + ANSWER)
RATIO = TOKENS / (PROMPT + ANSWERS * ANSWER)
ROUNDS = 3
"""A round takes a minute on two cores."""


def run(rounds: int) -> list[Comparison]:
    """Tokens per second of the sequences as they are, forward and backward."""
    import torch  # noqa: PLC0415 - the other benchmarks start without it
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415 - as above

    from headrace.trainer.forward import RowTensors  # noqa: PLC0415 - as above
    from headrace.trainer.groups import TokenSequence  # noqa: PLC0415 - as above
    from headrace.trainer.model import self_test  # noqa: PLC0415 - as above
    from headrace.trainer.packing import pack  # noqa: PLC0415 - as above
    from headrace.trainer.rows import CreditedSequence  # noqa: PLC0415 - as above

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, config.vocab_size, PROMPT)
    ids = [np.concatenate([prompt, rng.integers(0, config.vocab_size, ANSWER)]).astype(np.int32) for _ in range(ANSWERS)]
    sequences = [
        CreditedSequence(
            sequence=TokenSequence(token_ids=one, trainable=np.arange(len(one)) >= PROMPT, logprobs=np.full(len(one), np.nan, np.float32)),
            tree=0,
            branch=i,
            advantage=1.0,
            weight=1.0,
        )
        for i, one in enumerate(ids)
    ]

    def alone() -> None:
        for one in ids:
            tokens = torch.from_numpy(one).long()
            logits = model(tokens[None], use_cache=False, logits_to_keep=ANSWER + 1).logits[0, :-1]
            logits.log_softmax(-1).gather(-1, tokens[PROMPT:, None]).sum().backward()

    def shared() -> None:
        (row,) = pack(sequences, capacity=PROMPT + ANSWERS * ANSWER).rows
        new_N, _ = scorer.score(model, RowTensors.of(row, torch.device("cpu"), scorer.width), chunk=1024)
        new_N.sum().backward()

    own_attention = model.config._attn_implementation
    scorer = self_test(model)
    tree_attention = model.config._attn_implementation
    sides: dict[str, list[float]] = {"alone": [], "shared": []}
    for number in range(min(rounds, ROUNDS) + 1):  # the first warms up
        for name, attention, work in (("alone", own_attention, alone), ("shared", tree_attention, shared)):
            model.set_attn_implementation(attention)
            model.zero_grad()
            seconds = _timed(work)
            if number:
                sides[name].append(TOKENS / seconds)
    return [
        Comparison(
            title="Forward and backward with a shared prefix, 8 × (1,024 + 128), SmolLM2-135M's shape",
            command="python benchmarks/run.py sharing",
            ours=Rates(name="packed with sharing", unit="tokens/s", per_round=sides["shared"]),
            reference=Rates(name="one sequence at a time", unit="tokens/s", per_round=sides["alone"]),
            target=0.75 * RATIO,
            notes=f"The token ratio is {RATIO:g}; {torch.get_num_threads()} threads.",
        )
    ]


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
