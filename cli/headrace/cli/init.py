"""`headrace init DIR`: everything that the commands of README and docs name, so that each works unchanged.

Writes `headrace.yaml` (a configuration), `tiny/` (the demo's base model, 100 thousand parameters), `groups.jsonl` (groups that it sampled,
with rewards), `examples.jsonl` (conversations for supervised fine-tuning) and `model.yaml` (training options).
Guarantees: no existing file is overwritten; the same seed gives the same files on the same machine.
Limitations: the groups are samples of version 0 of a model; a model that is more than
`max_policy_lag` versions further rejects them as stale.
"""

import random
from pathlib import Path
from typing import Annotated

import orjson
import typer

from headrace.core.errors import HeadraceError
from headrace.core.importing import importing
from headrace.demo import vault

GROUPS, ROLLOUTS, EXAMPLES = 16, 8, 16
FILES = ("headrace.yaml", "tiny", "groups.jsonl", "examples.jsonl", "model.yaml")

_CONFIGURATION = """\
# Settings of every Headrace process; the environment (HEADRACE_…) wins over this file. `headrace config show` prints all of them.
# Processes that start in this folder read this file; elsewhere set HEADRACE_CONFIG to its path.
base_models:
  tiny: {{path: {base}}}  # any folder with a Hugging Face causal language model
store: {{url: {store}}}  # or s3://bucket/prefix; `headrace up --s3` starts an S3 server and `headrace env` names it
worker: {{work_dir: {work}}}
gateway: {{tokens_file: {tokens}}}  # made by `headrace tokens create`; without a token the gateway listens on this machine only
"""
_MODEL = """\
# headrace models create NAME --settings model.yaml; docs/training.md explains every option.
base_model: tiny
adaptation: lora
lora: {r: 16, alpha: 32}
max_policy_lag: 4
train: {learning_rate: 1.0e-3, loss_fn: ppo}
batch: {groups_per_step: 8}
"""


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write into; made if it is missing.")] = Path(),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the base model and of the samples.")] = 0,
) -> None:
    """Write a configuration, a tiny base model and sample groups into a folder (10 s)."""
    if taken := [name for name in FILES if (folder / name).exists()]:
        raise HeadraceError(f"{folder / taken[0]} exists already: name another folder, or remove {', '.join(taken)} first")
    folder.mkdir(parents=True, exist_ok=True)
    typer.echo("Training the tiny base model", err=True)
    with importing():
        from headrace.consumers import LocalEngine  # noqa: PLC0415 - torch takes seconds
        from headrace.demo.base_model import build_base_model  # noqa: PLC0415
        from headrace.demo.tasks import VaultTask  # noqa: PLC0415
        from headrace.schemas.codec import encode_json  # noqa: PLC0415

    build_base_model(folder / "tiny", seed)
    typer.echo(f"Sampling {GROUPS} groups of {ROLLOUTS} trajectories", err=True)
    engine, rng = LocalEngine(str(folder / "tiny"), threads=1, seed=seed), random.Random(seed)
    groups: list[bytes] = []
    while len(groups) < GROUPS:
        for sampled in VaultTask().sample(engine, rng, groups=GROUPS, rollouts=ROLLOUTS):
            rewards = {trajectory.reward for trajectory in sampled.group.trajectories}
            groups += [encode_json(sampled)] if len(rewards) > 1 else []  # equal rewards train nothing
    examples = [_example(vault.draw_episode(rng)) for _ in range(EXAMPLES)]
    (folder / "groups.jsonl").write_bytes(b"\n".join(groups[:GROUPS]) + b"\n")
    (folder / "examples.jsonl").write_bytes(b"\n".join(examples) + b"\n")
    (folder / "model.yaml").write_text(_MODEL)
    (folder / "headrace.yaml").write_text(_configuration(folder.resolve()))
    typer.echo(f"Wrote {', '.join(FILES)} into {folder.resolve()}. Next, in that folder: headrace up --s3")


def _configuration(folder: Path) -> str:
    """The file; a JSON string is a YAML string too, so that every path is valid."""
    places = {"base": folder / "tiny", "work": folder / "work", "tokens": folder / "tokens.json"}
    quoted = {name: orjson.dumps(str(path)).decode() for name, path in places.items()}
    return _CONFIGURATION.format(**quoted, store=orjson.dumps((folder / "store").as_uri()).decode())


def _example(episode: vault.Episode) -> bytes:
    """A line for supervised fine-tuning: the conversation that earns the reward."""
    secret = episode.secrets[episode.key]
    call = {"id": "call-1", "type": "function", "function": {"name": vault.CALL, "arguments": {"key": episode.key}}}
    messages = [
        {"role": "user", "content": episode.question.content},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": secret, "tool_call_id": "call-1"},
        {"role": "assistant", "content": f"{vault.ANSWER} {secret}"},
    ]
    return orjson.dumps({"messages": messages, "tools": [vault.TOOL.model_dump(mode="json", exclude_none=True)]})
