"""Access control: keys, host names, origins."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from baton.api.cluster.file import read_cluster
from baton.api.config import Config, ConfigError, check
from baton.api.peering.options import read_key
from baton.api.security import Guard, accepted_keys, host_name
from tests.api.fake_ring import serving

pytestmark = pytest.mark.anyio
BODY = {"text": "a"}
CLOSED = [
    "/v1/models",
    "/metrics",
    "/server_info",
    "/model_info",
    "/version",
    "/flush_cache",
    "/debug/slots",
    "/debug/tree",
]


async def test_keys_guard_everything_but_health() -> None:
    async with serving(api_key=("one", "two")) as served:
        for path in CLOSED:
            async with served.client.get(path) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/ready"):
            async with served.client.get(path) as response:
                assert response.status == 200
        assert (await served.post("/generate", BODY))[0] == 401
        for header, status in (
            ("Bearer one", 200),
            ("bearer two", 200),
            ("Bearer three", 401),
            ("Basic one", 401),
            ("Bearer ", 401),
            ("one", 401),
            ("Bearer ö", 401),
        ):
            assert (await served.post("/generate", BODY, headers={"Authorization": header}))[0] == status, header


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/flush_cache", None),
        ("POST", "/flush_cache", None),
        ("POST", "/pause_generation", {"mode": "retract"}),
        ("POST", "/continue_generation", {}),
        ("POST", "/abort_request", {"abort_all": True}),
        ("GET", "/v1/events", None),
        ("GET", "/v1/%65vents", None),
    ],
)
async def test_only_the_first_key_sees_or_changes_the_requests_of_all(method: str, path: str, body: Any) -> None:
    async with serving(api_key=("operator", "tenant")) as served:
        for key, expected in (("tenant", 403), ("operator", 200)):
            url, headers = URL(path, encoded=True), {"Authorization": f"Bearer {key}"}
            async with served.client.request(method, url, json=body, headers=headers) as response:
                assert response.status == expected, await response.text()
        mine = {"Authorization": "Bearer tenant"}
        assert (await served.post("/abort_request", {"rid": "mine"}, headers=mine))[0] == 200


def test_keys_from_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\n  second \n")
    assert accepted_keys(Config(api_key=("zero",), api_key_file=str(file))) == ("zero", "first", "second")
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match=r"--api-key-file.*no key"):
        Guard(Config(api_key_file=str(file)))
    with pytest.raises(ConfigError, match="--api-key-file"):
        accepted_keys(Config(api_key_file=str(tmp_path / "absent")))


def with_api_keys(file: Path) -> None:
    accepted_keys(Config(api_key_file=str(file)))


def with_peers(file: Path) -> None:
    read_key(Config(peer_listen="localhost:0", peer_key_file=str(file)))


@pytest.mark.parametrize("read", [with_api_keys, with_peers, read_cluster])
def test_endless_and_large_files_are_refused(tmp_path: Path, read: Callable[[Path], object]) -> None:
    with (tmp_path / "large").open("wb") as sparse:
        sparse.truncate(1 << 40)
    for file in (Path("/dev/zero"), tmp_path / "large"):
        with pytest.raises(ConfigError, match="has more than 1048576 bytes"):
            read(file)
    with pytest.raises(ConfigError, match="Is a directory"):
        read(tmp_path)


def test_keys_may_come_from_a_pipe_as_shells_pass_what_a_command_prints() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"first\nsecond\n")
    os.close(writer)
    assert accepted_keys(Config(api_key_file=f"/dev/fd/{reader}")) == ("first", "second")
    os.close(reader)


def test_lines_of_a_file_with_keys_end_with_line_feeds_only(tmp_path: Path) -> None:
    text = "\ufeff# old\x0cstray\r\nfirst\x85key\r\nsecond\n"
    (tmp_path / "keys").write_text(text, encoding="utf-8", newline="")
    assert accepted_keys(Config(api_key_file=str(tmp_path / "keys"))) == ("first\x85key", "second")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("app.localhost", 200),
        ("127.0.0.1", 200),
        ("192.168.1.7:8000", 200),
        ("[::1]:8000", 200),
        ("baton.lan:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
async def test_host_names(host: str, status: int) -> None:
    async with serving(allowed_host=("baton.lan",)) as served:
        answer, _ = await served.post("/generate", BODY, headers={"Host": host})
        assert answer == status
        async with served.client.get("/health", headers={"Host": host}) as response:
            assert response.status == 200


async def test_any_host_name_if_allowed() -> None:
    async with serving(allowed_host=("*",)) as served:
        assert (await served.post("/generate", BODY, headers={"Host": "whatever"}))[0] == 200


async def test_a_foreign_page_is_refused() -> None:
    async with serving() as served:
        for origin in ("https://evil.example", "null", "http://localhost:1"):
            status, error = await served.error("/generate", BODY, headers={"Origin": origin})
            assert (status, error["code"]) == (403, "forbidden")
        async with served.client.get("/flush_cache", headers={"Sec-Fetch-Site": "cross-site"}) as response:
            assert response.status == 403
        async with served.client.options(
            "/generate", headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        ) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers
        assert served.ring.submitted() == []
        same = served.url.rstrip("/")
        for origin in (same, same.replace("http", "https")):
            assert (await served.post("/generate", BODY, headers={"Origin": origin}))[0] == 200, "or behind a proxy"


async def test_cors_lets_apps_in() -> None:
    origin = "app://obsidian.md"
    check(Config(model="m", cors=(origin,)), {})
    async with serving(cors=(origin,)) as served:
        assert (await served.post("/generate", BODY, headers={"Origin": origin}))[0] == 200


async def test_cors_lets_pages_in() -> None:
    async with serving(cors=("https://app.example",), api_key=("k",)) as served:
        origin = {"Origin": "https://app.example"}
        asks = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, x-stainless-os",
        }
        async with served.client.options("/generate", headers={**origin, **asks}) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            assert response.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
        async with served.client.post(
            "/generate", json={**BODY, "stream": True}, headers={**origin, "Authorization": "Bearer k"}
        ) as response:
            assert response.status == 200
            assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
            assert response.headers["Vary"] == "Origin"
        async with served.client.post("/generate", json=BODY, headers=origin) as response:
            assert response.status == 401
            assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert (await served.post("/generate", BODY, headers={"Origin": "https://other.example"}))[0] == 403


async def test_cors_for_all() -> None:
    async with serving(cors=("*",)) as served:
        assert (await served.post("/generate", BODY, headers={"Origin": "null"}))[0] == 200


async def test_headers_of_every_answer() -> None:
    async with serving() as served:
        for path in ("/health", "/nothing"):
            async with served.client.get(path) as response:
                assert response.headers["x-request-id"].startswith("req-")
                assert response.headers["Server"].startswith("baton/")


@pytest.mark.parametrize(
    ("header", "name"),
    [("a.b:80", "a.b"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("A.b.", "a.b"), ("a:b:c", ""), ("", "")],
)
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert host_name(header) == name
