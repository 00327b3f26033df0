"""The tokenizing process: one answer a record, whatever the record or the model's template does."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from tests.consumers.test_plain_groups import packed, raw_group
from tests.consumers.test_plain_groups import request as plain_request
from tests.consumers.tiny_model import TEMPLATE

from headrace.consumers.worker.admission.messages import AdmissionRequest, Admitted, NotTokenized, Refused, Unreadable
from headrace.consumers.worker.admission.pool import AdmissionPool
from headrace.core.settings import Settings, StoreSettings
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.training import ModelSettings
from headrace.trainer.plan import BaseSource

HANGS = "{% if messages[0].content == 'hang' %}{{ (messages | length + 2) ** (10 ** 9) }}{% endif %}"


def request(base: Path, *, user: str = "a b", name: str = "g", **group: object) -> AdmissionRequest:
    choice = {"finish_reason": "stop", "message": {"content": "a"}, "token_ids": [7, 1], "token_logprobs": [-1, -1]}
    trajectory = {"messages_and_choices": [{"role": "user", "content": user}, choice], "reward": 1}
    return AdmissionRequest(
        value=orjson.dumps({"trajectories": [trajectory], "group_id": name, **group}),
        headers={},
        fallback_id="0-7",
        base=BaseSource(path=str(base)),
        settings=ModelSettings(base_model="tiny"),
    )


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdmissionPool]:
    """One process for all tests: its imports take seconds. A record has two seconds of processor time."""
    made = AdmissionPool(Settings(store=StoreSettings(url=f"file://{tmp_path_factory.mktemp('store')}")), record_seconds=2)
    yield made
    made.close()


@pytest.fixture
def base_with(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with a template that hangs in C where the user says so: no Python code runs that could be stopped."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(HANGS + TEMPLATE)
    return folder


async def test_a_base_model_that_can_not_be_used_is_said_with_its_groups_and_used_when_it_is_repaired(
    tiny_model: Path, tmp_path: Path, pool: AdmissionPool
) -> None:
    base = tmp_path / "base"
    told = []
    for ill in ("gone", "config.json", "tokenizer.json", "chat_template.jinja"):
        if ill != "gone":
            shutil.copytree(tiny_model, base, dirs_exist_ok=True)
            (base / ill).write_text("{% for" if ill == "chat_template.jinja" else "not json {")
        waits, admitted = await pool.admit([request(base, job_id="j"), request(tiny_model)])
        assert isinstance(admitted, Admitted), "no other model's"
        assert isinstance(waits, NotTokenized)
        assert (waits.group_id, waits.job_id) == ("g", "j")
        told.append(waits.waits_for or "")
    for said, text in zip(("no such folder", "its config", "its tokenizer", "does not compile"), told, strict=True):
        assert said in text
    (base / "chat_template.jinja").unlink()
    shutil.copytree(tiny_model, base, dirs_exist_ok=True)
    (repaired,) = await pool.admit([request(base)])
    assert isinstance(repaired, Admitted)


async def test_plain_groups_and_others_are_answered_in_the_order_of_the_log(tiny_model: Path, pool: AdmissionPool) -> None:
    """Plain ones are read at once, the others by the process."""
    plain = [plain_request(tiny_model, packed(raw_group() | {"group_id": name})) for name in ("a", "d")]
    broken = plain_request(tiny_model, packed(raw_group())[:-4])
    answers = await pool.admit([plain[0], request(tiny_model, name="b"), broken, plain[1], request(tiny_model, name="e")])
    assert isinstance(answers[2], Unreadable)
    assert [answer.group.group_id for answer in answers if isinstance(answer, Admitted)] == ["a", "b", "d", "e"]


async def test_examples_need_a_job_and_lost_members_come_with_their_group(tiny_model: Path, pool: AdmissionPool) -> None:
    loose, in_job = await pool.admit([request(tiny_model, purpose="sft"), request(tiny_model, purpose="sft", job_id="j")])
    body = orjson.loads(request(tiny_model).value or b"")
    body["trajectories"].append({"messages_and_choices": [], "reward": 0})
    (partial,) = await pool.admit([request(tiny_model, trajectories=body["trajectories"])])
    assert isinstance(loose, Refused)
    assert loose.reason is RejectionReason.SFT_WITHOUT_JOB
    assert isinstance(in_job, Admitted)
    assert (in_job.group.sft, in_job.job_id) == (True, "j")
    assert isinstance(partial, Admitted)
    assert [(member.index, member.reason) for member in partial.group.rejected] == [(1, RejectionReason.NO_TRAINABLE_TOKENS)]


async def test_a_record_that_never_ends_is_refused_alone(base_with: Path, pool: AdmissionPool) -> None:
    admitted, refused = await pool.admit([request(base_with), request(base_with, user="hang", name="bad", job_id="j")])
    assert isinstance(admitted, Admitted)
    assert isinstance(refused, Refused)
    assert refused.reason is RejectionReason.TOKENIZATION_FAILED
    assert "took too much time" in refused.detail
    assert (refused.group_id, refused.job_id) == ("bad", "j"), "its job must not wait for it"


def test_the_tokenizing_process_imports_no_torch(tiny_model: Path) -> None:
    code = (
        "import sys\n"
        "from headrace.consumers.worker.admission.admit import limits_of, prepare\n"
        "from headrace.core.settings import Settings\n"
        "from headrace.trainer.plan import BaseSource\n"
        "prepare(Settings(), 0, None)\n"
        f"limits_of(BaseSource(path={str(tiny_model)!r}))\n"
        "print([name for name in ('transformers', 'torch') if sys.modules.get(name) is not None])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "['transformers']"
