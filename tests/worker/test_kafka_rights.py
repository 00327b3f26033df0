"""The commands of docs/security.md on a broker with authorisation: each role works with its rights alone, and has no others.

Kafka's `kafka-acls` is not among the jars that are fetched: the commands are read as it reads them, and sent in its protocol.
"""

import asyncio
import re
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupAuthorizationFailedError, TopicAuthorizationFailedError, TransactionalIdAuthorizationFailed
from aiokafka.protocol.admin import CreateAclsRequest
from tests.engine.site import Site
from tests.engine.site import running as running_engine
from tests.gateway.conftest import running as running_gateway
from tests.worker.conftest import WorkerProcess, following, learner, settings_of
from tests.worker.groups import group

from headrace.consumers.subscribers.weight_applier import CallableAdapter
from headrace.consumers.subscribers.weight_subscriber import WeightSubscriber
from headrace.core.kafka import client_options
from headrace.core.local import LocalBroker
from headrace.core.settings import KafkaSettings, Settings
from headrace.core.topic_admin import apply
from headrace.producers import TrajectoryProducer
from headrace.schemas.state import StepRecord
from headrace.schemas.topics import TOPICS

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
ROLES = ("operator", "agent", "worker", "gateway", "engine", "subscriber")
PASSWORD = "secret"  # noqa: S105 - of a broker on this machine, for one test
SOON = 60.0
RESOURCES = {"--topic": 2, "--group": 3, "--cluster": 4, "--transactional-id": 5}
OPERATIONS = {"All": 2, "Read": 3, "Write": 4, "DescribeConfigs": 10}
PATTERNS = {"literal": 3, "prefixed": 4}
Acl = tuple[int, str, int, str, str, int, int]


def acls_of(command: str) -> list[Acl]:
    """What a `kafka-acls --add` allows, as the protocol's entries."""
    program, *words = shlex.split(command)
    assert program == "kafka-acls"
    principals, operations, resources, pattern = [], [], [], "literal"
    rest = iter(words)
    for word in rest:
        match word:
            case "--add":
                pass
            case "--bootstrap-server" | "--command-config":
                next(rest)
            case "--allow-principal":
                principals.append(next(rest))
            case "--operation":
                operations.append(OPERATIONS[next(rest)])
            case "--resource-pattern-type":
                pattern = next(rest)
            case "--cluster":
                resources.append((RESOURCES[word], "kafka-cluster"))
            case _:
                resources.append((RESOURCES[word], next(rest)))
    return [
        (kind, name, PATTERNS[pattern], principal, "*", operation, 3)
        for principal in principals
        for operation in operations
        for kind, name in resources
    ]


def commands_of(role: str) -> list[str]:
    section = PAGE.split(f"### {role}\n")[1].split("\n#")[0]
    return [line for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A broker that authorises: its listener for administrators, and the one for the page's users."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    port, controller, secured = (one.getsockname()[1] for one in held)
    for one in held:
        one.close()
    users = " ".join(f'user_{name}="{PASSWORD}"' for name in (*ROLES, "stranger"))
    overrides = {
        "listeners": f"CLIENT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller},SECURE://127.0.0.1:{secured}",
        "advertised.listeners": f"CLIENT://127.0.0.1:{port},SECURE://127.0.0.1:{secured}",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_PLAINTEXT",
        "listener.name.secure.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.secure.plain.sasl.jaas.config": f"org.apache.kafka.common.security.plain.PlainLoginModule required {users};",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    with LocalBroker(tmp_path_factory.mktemp("rights"), port, overrides=overrides) as broker:
        yield broker.bootstrap_servers, f"127.0.0.1:{secured}"


@pytest.fixture(scope="module")
def of_role(secure: tuple[str, str], tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str], Settings]:
    """Settings of each role, once the page's commands have run and the operator has made the topics."""
    folder = tmp_path_factory.mktemp("rights-data")

    def settings(role: str) -> Settings:
        kafka = KafkaSettings.model_validate(
            {
                "bootstrap_servers": secure[1],
                "security_protocol": "SASL_PLAINTEXT",
                "sasl_mechanism": "PLAIN",
                "sasl_username": role,
                "sasl_password": PASSWORD,
            }
        )
        return settings_of(secure[1], "headrace.", folder, tiny_model).model_copy(update={"kafka": kafka})

    async def run() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=secure[0])
        await admin.start()
        for acl in [acl for role in ROLES for command in commands_of(role) for acl in acls_of(command)]:
            (answer,) = (await admin._send_to_controller(CreateAclsRequest(*acl))).creation_responses
            assert answer[0] == 0, (acl, answer)
        await admin.close()
        await apply(settings("operator"))

    asyncio.run(run())
    return settings


def test_every_role_of_the_page_has_commands_for_its_own_user_alone() -> None:
    for role in ROLES:
        assert commands_of(role)
        assert {principal for command in commands_of(role) for _, _, _, principal, *_ in acls_of(command)} == {f"User:{role}"}
    assert PAGE.count("kafka-acls ") == sum(len(commands_of(role)) for role in ROLES)


async def test_each_role_works_with_its_rights_alone(of_role: Callable[[str], Settings], tmp_path: Path) -> None:
    worker = WorkerProcess(of_role("worker"), tmp_path / "worker.log")
    served: list[int] = []
    try:
        async with AsyncExitStack() as stack:
            operator = of_role("operator")
            model = await learner(operator, "solver")
            seen = await stack.enter_async_context(following(operator, model.model_id))
            adapter = CallableAdapter(lambda _folder, published: served.append(published.policy_version) or "ok")
            subscriber = WeightSubscriber(
                of_role("subscriber"), adapter, engine_id="subscriber", model_id=model.model_id, cache_dir=tmp_path / "subscriber"
            )
            await stack.enter_async_context(subscriber)
            async with TrajectoryProducer(of_role("agent"), model_id=model.model_id) as producer:
                for seed, name in enumerate("ab"):
                    await producer.send(group(name, seed=seed))
            (step,) = await seen.until(StepRecord, 1, SOON)
            assert step.groups == 2
            async with asyncio.timeout(SOON):
                await subscriber.wait_for(1)
            assert served == [1]
            engine_site = Site(of_role("engine"), None, tmp_path)  # type: ignore[arg-type]  # it writes nothing
            await stack.enter_async_context(running_engine(engine_site))
            gateway = of_role("gateway")
            http = await stack.enter_async_context(
                running_gateway(gateway.model_copy(update={"gateway": gateway.gateway.model_copy(update={"port": 0})}))
            )
            made = await http.post("/v1/preview/models", json={"name": "other", "base_model": "tiny", "project": "p"})
            assert made.status_code in {200, 201}, made.text
            assert (await http.get(f"/v1/preview/models/{model.model_id}/checkpoints")).status_code == 200
    finally:
        assert worker.stop() == 0, (tmp_path / "worker.log").read_text()[-4000:]
        worker.close()
    assert "Authorization" not in (tmp_path / "worker.log").read_text()


def written_by(role: str) -> set[str]:
    """The topics, without their prefix, that the page lets a role write."""
    acls = [acl for command in commands_of(role) for acl in acls_of(command)]
    allowed = [acl for acl in acls if acl[0] == RESOURCES["--topic"] and acl[5] in {OPERATIONS["All"], OPERATIONS["Write"]}]
    names = {spec.name for spec in TOPICS}
    return {name for name in names if any(acl[1] in {f"headrace.{name}", "headrace."} for acl in allowed)}


def test_only_those_who_own_them_write_the_topics_that_others_trust() -> None:
    writers = {spec.name: {role for role in ROLES if spec.name in written_by(role)} - {"operator"} for spec in TOPICS}
    assert writers == {
        "trajectory-groups": {"agent", "gateway"},
        "commands": {"gateway"},
        "steps": {"worker"},
        "models": {"worker"},
        "training-events": {"worker"},
        "weights": {"worker"},
        "weight-acks": {"engine", "subscriber"},
        "jobs": {"worker", "gateway"},
        "dead-letters": {"worker"},
        "gateway": {"gateway"},
    }


@pytest.mark.parametrize("role", [*ROLES[1:], "stranger"])
async def test_a_role_writes_its_own_topics_and_is_refused_all_others(of_role: Callable[[str], Settings], role: str) -> None:
    allowed = written_by(role) if role in ROLES else set()
    refused = set()
    options = client_options(of_role(role).kafka, "test")
    async with AIOKafkaProducer(**options, enable_idempotence=bool(allowed)) as producer:
        for spec in TOPICS:
            try:
                await producer.send_and_wait(f"headrace.{spec.name}", b"{}", key=b"forged", headers=[("ce_type", b"com.example.forged")])
            except TopicAuthorizationFailedError:
                refused.add(spec.name)
    assert refused == {spec.name for spec in TOPICS} - allowed


@pytest.mark.parametrize("role", ["agent", "gateway", "engine", "subscriber", "stranger"])
async def test_only_a_worker_can_take_a_lane(of_role: Callable[[str], Settings], role: str) -> None:
    options = client_options(of_role(role).kafka, "test")
    fencing = AIOKafkaProducer(**options, transactional_id="headrace-default-lane-0")
    with pytest.raises(TransactionalIdAuthorizationFailed):
        await fencing.start()
    await fencing.stop()
    member = AIOKafkaConsumer("headrace.trajectory-groups", **options, group_id="headrace-default")
    with pytest.raises((GroupAuthorizationFailedError, TopicAuthorizationFailedError)):
        async with member, asyncio.timeout(SOON):
            await member.getone()
