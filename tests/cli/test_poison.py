"""What the command line says is the same before and after somebody has written anything at all into the topics."""

import asyncio
from pathlib import Path

from tests.cli.conftest import Headrace, Ran
from tests.cli.recorded import SOLVER, write_recorded
from tests.poison import send_record, write_poison

from headrace.core.lanes import lane_of
from headrace.core.settings import KafkaSettings, Settings, TopicSettings
from headrace.schemas import topics
from headrace.schemas.base import utc_now
from headrace.schemas.carried import CARRIED
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.state import LaneState

COMMANDS = [
    ("models", "list", "--json"),
    ("models", "list"),
    ("models", "show", "solver", "--json"),
    ("jobs", "list", "--json"),
    ("jobs", "show", "job-7", "--json"),
    ("steps", "solver", "--json"),
    ("inspect", "solver", "2", "--json"),
    ("compare", "solver", "second", "--json"),
    ("lineage", "solver", "--version", "3", "--all", "--json"),
    ("lineage", "solver", "--group", "waits", "--json"),
    ("lineage", "solver", "--group", "refused-late", "--json"),
    ("lineage", "solver", "--group", "nowhere", "--json"),
    ("replay", "groups", "--model", "solver", "--where", "reward > 0", "--to", "-"),
]
OTHERS = CARRIED.keys() - {topics.STEPS}


async def genuine(settings: Settings, folder: Path) -> dict[str, str]:
    found = await write_recorded(settings, folder)
    lanes = settings.topics.partitions
    for lane in range(lanes):
        await send_record(settings, LaneState(lane=lane, partitions=lanes, commands_through=0), partition=lane)
    job = JobDocument(job_id="job-7", model_id=SOLVER, state=JobState.RUNNING, created_at=utc_now(), num_groups=3)
    await send_record(settings, job)
    return found.environment


async def poison(settings: Settings) -> None:
    # A step that can't be read must be said: what claims to be one is another test's.
    await write_poison(settings, [SOLVER], claimed=False, but=OTHERS)
    await write_poison(settings, [SOLVER, "job-7", f"lane:{lane_of(SOLVER, settings.topics.partitions)}"], but=[topics.STEPS])


def test_all_commands_say_what_they_said_before(headrace: Headrace, kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    settings = Settings(kafka=KafkaSettings(bootstrap_servers=kafka), topics=TopicSettings(prefix=topic_prefix, partitions=2))
    environment = asyncio.run(genuine(settings, tmp_path))

    def all_of_them() -> dict[str, Ran]:
        return {" ".join(command): headrace(*command, **environment) for command in COMMANDS}

    before = all_of_them()
    assert {name: ran.err for name, ran in before.items() if ran.code} == {}
    asyncio.run(poison(settings))
    after = all_of_them()
    assert {name: ran.out for name, ran in after.items()} == {name: ran.out for name, ran in before.items()}
    assert [name for name, ran in after.items() if "Traceback" in ran.err] == []
    # Groups that can't be read are named, and the exit code says so.
    assert [name for name, ran in after.items() if ran.code] == [" ".join(command) for command in COMMANDS if command[0] == "replay"]
    letters = headrace("dlq", "list", "--all", "--json", **environment)
    assert (letters.code, "Traceback" in letters.err) == (0, False)
