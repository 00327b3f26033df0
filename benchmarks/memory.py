"""Peak memory of a training step against the number of groups in it.

Each size runs in a process of its own, since a peak never comes down: a small model's step with 16, 48 and 144 groups of 8 answers. What
grows is the plan itself and the statistics of its tokens, a few dozen bytes a token; activations are those of one row.
"""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.measuring import Table

GROUPS = (16, 48, 144)
ROOT = Path(__file__).resolve().parent.parent

_STEP = """
import sys, tempfile, pathlib
import numpy as np
from tests.trainer.tiny import ONE_THREAD, group, save_model, sequence
from headrace.schemas.training import ModelSettings, TrainConfig
from headrace.trainer.engine import TrainingEngine
from headrace.trainer.plan import BaseSource, StateKey, StepPlan
folder = tempfile.TemporaryDirectory()
base = pathlib.Path(folder.name, "base")
base.mkdir()
save_model(base, hidden_size=128, intermediate_size=512, num_hidden_layers=4, head_dim=32, max_position_embeddings=2048)
rng = np.random.default_rng(0)
def made(name):
    prompt = rng.integers(0, 256, 256).tolist()
    answers = [rng.integers(0, 256, 64).tolist() for _ in range(8)]
    return group(rng.random(8).tolist(), [sequence(prompt, a, (-rng.random(64)).tolist()) for a in answers], name)
groups = tuple(made(str(g)) for g in range(int(sys.argv[1])))
plan = StepPlan(
    state=StateKey(model_id="m", incarnation="i", step=0), attempt="a", base=BaseSource(path=str(base)),
    settings=ModelSettings(base_model="b", adaptation="full"), config=TrainConfig(learning_rate=1e-3), groups=groups,
    out_dir=str(pathlib.Path(folder.name, "out")),
)
result = TrainingEngine(ONE_THREAD).run(plan)
print(result.metrics["peak_memory_bytes"], result.metrics["rows"], result.metrics["sequence_tokens"])
"""


def run(_rounds: int) -> list[Table]:
    """Peaks by number of groups."""
    rows, peaks, sizes = [], [], []
    for groups in GROUPS:
        answer = subprocess.run(
            [sys.executable, "-c", _STEP, str(groups)],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"},
        )
        peak, packed, tokens = (float(word) for word in answer.stdout.splitlines()[-1].split())
        peaks.append(peak)
        sizes.append(tokens)
        rows.append([str(groups), f"{tokens:,.0f}", f"{packed:.0f}", f"{peak / 2**20:,.0f} MiB"])
    growth = peaks[-1] / peaks[0]
    a_token = (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0])
    return [
        Table(
            title="Peak memory of a step by its number of groups",
            command="python benchmarks/run.py memory",
            columns=["groups", "tokens of their sequences", "rows", "peak resident memory"],
            rows=rows,
            verdict=f"{GROUPS[-1]} groups take {growth:.3f} times the memory of {GROUPS[0]} (flat: at most 1.05), {a_token:,.0f} B a token",
            reached=growth <= 1.05,
        )
    ]
