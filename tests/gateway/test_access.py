"""Who may call, how much, and what is answered where something is missing."""

import asyncio
import contextlib
import multiprocessing
import socket
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.gateway.conftest import gateway_settings, running

from headrace.core.settings import Settings
from headrace.core.topic_admin import apply
from headrace.gateway.serve import ListenError, bind, check_listening
from headrace.gateway.tokens import create_token, list_tokens, revoke_token


async def test_it_says_that_it_and_its_parts_are_there(gateway: httpx.AsyncClient) -> None:
    assert (await gateway.get("/v1/health")).json() == {"status": "ok"}
    check = await gateway.get("/v1/system-check")
    assert (check.status_code, check.json()) == (200, {"status": "ok", "kafka": "ok", "store": "ok"})


def test_without_tokens_it_does_not_listen_where_others_reach_it(settings: Settings, tmp_path: Path) -> None:
    open_to_all = settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"host": "0.0.0.0"})})  # noqa: S104
    with pytest.raises(ListenError, match="headrace tokens create"):
        check_listening(open_to_all)
    create_token(tmp_path / "tokens", account="acme", owner="ada")
    with_tokens = open_to_all.gateway.model_copy(update={"tokens_file": tmp_path / "tokens"})
    check_listening(open_to_all.model_copy(update={"gateway": with_tokens}))


def test_a_token_is_kept_as_a_digest_and_can_be_revoked(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    stored, token = create_token(file, account="acme", owner="ada", projects=["red"])
    assert token.split("_", 2)[2] not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    assert list_tokens(file) == [stored]
    assert stored.is_of(token.split("_", 2)[2])
    revoke_token(file, stored.id)
    assert list_tokens(file) == []


def test_creates_and_revokes_of_many_processes_undo_nothing(tmp_path: Path) -> None:
    file, link = tmp_path / "deep" / "tokens", tmp_path / "link"
    link.symlink_to(file)
    revoked = [create_token(file, account="acme", owner=f"old-{n}")[0].id for n in range(12)]
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("forkserver")) as pool:
        created = [pool.submit(create_token, where, account="acme", owner=f"new-{n}") for n, where in enumerate([file, link] * 6)]
        gone = [pool.submit(revoke_token, where, token) for token, where in zip(revoked, [link, file] * 6, strict=True)]
        assert [each.result().id for each in gone] == revoked
        kept = {each.result()[0].id for each in created}
    assert {token.id for token in list_tokens(file)} == kept
    assert link.is_symlink()
    assert file.parent.stat().st_mode & 0o077 == 0


async def test_a_body_beyond_the_limit_is_413_and_not_read(kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    settings = gateway_settings(kafka, topic_prefix, tmp_path, max_body_bytes=2000)
    await apply(settings)

    async def pieces():
        for _ in range(100):
            yield b"x" * 100

    async with running(settings) as http:
        said = await http.post("/v1/preview/models", content=b"x" * 5000)
        found_out = await http.post("/v1/preview/training-jobs", content=pieces())
    assert (said.status_code, found_out.status_code) == (413, 413)
    assert "max_body_bytes" in said.json()["detail"]


async def test_answers_leave_at_once(settings: Settings) -> None:
    listener = bind(settings)
    loop = asyncio.get_running_loop()
    connected: asyncio.Future[asyncio.StreamWriter] = loop.create_future()
    server = await asyncio.start_server(lambda _reader, writer: connected.set_result(writer), sock=listener)
    async with server:
        _reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        accepted = (await connected).get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        (await connected).close()


async def test_without_tokens_no_page_of_another_place_can_call(gateway: httpx.AsyncClient) -> None:
    path = "/v1/headrace/trajectories/t/exchanges"
    own = f"{gateway.base_url.host}:{gateway.base_url.port}"
    assert (await gateway.get(path)).status_code == 200
    assert (await gateway.get(path, headers={"Origin": f"http://{own}"})).status_code == 200
    assert (await gateway.get(path, headers={"Host": "localhost:8100"})).status_code == 200
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        answer = await gateway.get(path, headers=headers)
        assert answer.status_code == 403, headers
        assert "headrace tokens create" in answer.json()["detail"]


async def first_line_of_the_answer(http: httpx.AsyncClient, path: str, piece: bytes, *, pause: float) -> tuple[str, int]:
    """POST without an end, piece by piece, until it is answered; the status line, and how many bytes were taken."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    )
    answer = asyncio.create_task(reader.readline())
    taken = 0
    with contextlib.suppress(ConnectionError):  # it may hang up while more is sent
        while not answer.done():
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            taken += len(piece)
            await asyncio.sleep(pause)
    line = (await answer).decode()
    writer.close()
    return line, taken


async def test_of_somebody_without_a_key_no_large_body_is_read(kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    create_token(tmp_path / "tokens", account="acme", owner="ada")
    settings = gateway_settings(kafka, topic_prefix, tmp_path, tokens_file=tmp_path / "tokens")
    await apply(settings)
    async with running(settings) as http:
        for path in ("/v1/preview/models", "/v1/accounts/acme/deployments"):
            said = await http.post(path, content=b" " * 100_000, headers={"content-type": "application/json"})
            assert said.status_code == 401, path
            line, taken = await first_line_of_the_answer(http, path, b" " * 50_000, pause=0)
            assert "401" in line
            assert taken < 20_000_000  # what lies in buffers


async def test_a_body_that_comes_in_drops_is_given_up(kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    settings = gateway_settings(kafka, topic_prefix, tmp_path, request_timeout_seconds=0.3)
    await apply(settings)
    async with running(settings) as http:
        line, _taken = await first_line_of_the_answer(http, "/v1/preview/training-jobs", b" ", pause=0.02)
    assert "408" in line
