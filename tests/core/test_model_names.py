"""Which model a name means."""

import asyncio
from datetime import UTC, datetime

import pytest

from headrace.core.model_names import AmbiguousModelError, find_model, known_model_id, pick_model
from headrace.core.model_views import ModelView
from headrace.core.models import UnknownModelError, create_model, delete_model, model_id_of
from headrace.core.settings import BaseModelEntry, KafkaSettings, Settings, TopicSettings
from headrace.core.topic_admin import apply
from headrace.schemas.training import ModelSettings


def view(project: str, name: str, account: str = "default", status: str = "active") -> ModelView:
    return ModelView(
        model_id=model_id_of(account, project, name),
        account=account,
        project=project,
        name=name,
        status=status,  # type: ignore[arg-type]  # one of its values
        status_detail=None,
        settings=ModelSettings(base_model="tiny"),
        worker_group="default",
        created_at=datetime.now(UTC),
        state=None,
    )


HERE = [
    view("games", "chess"),
    view("games", "go"),
    view("tests", "go"),
    view("games", "old", status="deleted"),
    view("x", "chess", "other"),
]


@pytest.mark.parametrize(
    ("wanted", "project", "found"),
    [
        ("chess", None, HERE[0]),
        ("games/chess", None, HERE[0]),
        ("default/games/chess", None, HERE[0]),
        ("other/x/chess", None, HERE[4]),
        ("tests/go", None, HERE[2]),
        ("go", "tests", HERE[2]),
        (HERE[3].model_id, None, HERE[3]),
        (HERE[4].model_id, None, HERE[4]),
    ],
)
def test_a_name_means_one_model(wanted: str, project: str | None, found: ModelView) -> None:
    assert pick_model(HERE, wanted, account="default", project=project) is found


def test_a_name_that_several_projects_have_is_refused_with_the_candidates() -> None:
    with pytest.raises(AmbiguousModelError, match=rf"games/go \({HERE[1].model_id}\), tests/go \({HERE[2].model_id}\)"):
        pick_model(HERE, "go", account="default")


@pytest.mark.parametrize("wanted", ["chees", "old", "x/chess", "", "other/chess"])
def test_an_unknown_name_is_refused_with_the_models_that_there_are(wanted: str) -> None:
    with pytest.raises(UnknownModelError, match="in account 'default'; models of the account: games/chess, games/go, tests/go"):
        pick_model(HERE, wanted, account="default")


def test_a_model_is_found_by_its_name_as_soon_as_its_command_is_in_the_log(kafka: str, topic_prefix: str) -> None:
    settings = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka),
        topics=TopicSettings(prefix=topic_prefix, partitions=2),
        base_models={"tiny": BaseModelEntry(path="/none")},
    )

    async def run() -> None:
        await apply(settings)
        with pytest.raises(UnknownModelError, match="there is no model 'my-agent'"):
            await find_model(settings, "my-agent")
        made = await create_model(settings, project="p", name="my-agent", model=ModelSettings(base_model="tiny"))
        assert (await find_model(settings, "my-agent")).model_id == made.model_id
        assert await known_model_id(settings, made.model_id.upper()) == made.model_id
        with pytest.raises(UnknownModelError):
            await known_model_id(settings, model_id_of("default", "p", "other"))
        await delete_model(settings, made.model_id)
        with pytest.raises(UnknownModelError):
            await find_model(settings, "my-agent")

    asyncio.run(run())
