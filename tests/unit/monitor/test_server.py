from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.monitor.logs import make_run, start_line, steps, write_log
from wanshim.cli.main import app
from wanshim.errors import WanshimError
from wanshim.monitor.runs import RunFolder

pytest.importorskip("starlette", reason="the extra wanshim[monitor] is not installed")
import uvicorn
from click.testing import CliRunner
from starlette.testclient import TestClient

from wanshim.monitor import server

TOKEN = "a-token-of-some-length"


@pytest.fixture
def logs(tmp_path: Path) -> RunFolder:
    write_log(make_run(tmp_path / "logs" / "run"), [start_line(), *steps(50, memory=2**30, memory_total=2**34)])
    (tmp_path / "secret.txt").write_text("SECRET")
    return RunFolder(tmp_path / "logs")


@pytest.fixture
def client(logs: RunFolder) -> Iterator[TestClient]:
    with TestClient(server.make_app(logs), base_url="http://127.0.0.1") as client:
        yield client


def test_status_has_what_the_front_ends_of_the_guide_read(client: TestClient) -> None:
    found = client.get("/api/training/status").json()
    assert (found["current_step"], found["total_steps"], found["progress_percent"]) == (50, 100, 50)
    assert found["eta_seconds"] == pytest.approx(5.0)
    assert found["gpus"][0]["memory_used"] == 2**30
    assert client.get("/api/runs").json()["runs"][0] == found
    assert client.get("/api/training/status?run=run").json() == found


def test_history_is_of_known_runs_only(client: TestClient) -> None:
    assert len(client.get("/api/runs/run/history").json()["curve"]["x"]) == 50
    for path in ("nothing", "..", "%2e%2e", "..%2f..%2fsecret.txt", "%00"):
        answer = client.get(f"/api/runs/{path}/history")
        assert answer.status_code == 404
        assert "SECRET" not in answer.text


@pytest.mark.parametrize("path", ["../server.py", "%2e%2e/server.py", "..%2f..%2f..%2fsecret.txt", "/etc/passwd"])
def test_static_files_stay_in_their_folder(client: TestClient, path: str) -> None:
    answer = client.get(f"/static/{path}")
    assert answer.status_code == 404


def test_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    answer = client.get("/")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "://" not in answer.text
    for name in ("page.js", "page.css", "uPlot.iife.min.js", "uPlot.min.css"):
        assert client.get(f"/static/{name}").status_code == 200


def test_page_of_elsewhere_that_resolves_to_this_machine_is_refused(client: TestClient) -> None:
    assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 400


def test_writing_is_not_offered(client: TestClient) -> None:
    assert client.post("/api/runs").status_code == 405


def test_another_address_without_a_token_is_refused(logs: RunFolder) -> None:
    with pytest.raises(WanshimError, match="WANSHIM_MONITOR_TOKEN"):
        server.make_app(logs, host="0.0.0.0")
    with pytest.raises(WanshimError, match="16 or more"):
        server.make_app(logs, token="short", host="0.0.0.0")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_serving_on_another_address_makes_a_token_and_prints_it(
    logs: RunFolder, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    served: list[str | None] = []
    monkeypatch.setattr(server, "serve", lambda folder, host, port, patience, token: served.append(token))
    result = CliRunner().invoke(app, ["monitor", str(logs.folder), "--serve", "--host", host])
    (token,) = served
    assert (token is None) == (host == "127.0.0.1")
    assert result.output.strip() == f"http://{host}:7010/" + (f"?token={token}" if token else "")
    assert token is None or len(token) >= server.LEAST_TOKEN


def test_page_of_one_run_shows_that_run(logs: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(logs.folder / "other")
    served: list[RunFolder] = []
    monkeypatch.setattr(server, "serve", lambda folder, *_: served.append(folder))
    CliRunner().invoke(app, ["monitor", str(logs.folder), "--serve", "--run", "other"])
    served[0].update()
    assert list(served[0].runs) == ["other"]


@pytest.mark.parametrize(("name", "said"), [("otter", ["no run 'otter' yet", "there: other, run"]), ("other", [])])
def test_page_of_a_run_that_is_not_there_is_said_to_be_empty(
    name: str, said: list[str], logs: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(logs.folder / "other")
    monkeypatch.setattr(server, "serve", lambda *_: None)
    stderr = CliRunner().invoke(app, ["monitor", str(logs.folder), "--serve", "--port", "0", "--run", name]).stderr
    assert bool(stderr) == bool(said)
    assert all(part in stderr for part in said)


LOCAL = {"127.0.0.1": True, "::1": True, "localhost": True, "0.0.0.0": False, "::": False, "192.168.0.2": False}


@pytest.mark.parametrize(("host", "local"), LOCAL.items())
def test_local_addresses_are_known(host: str, local: bool) -> None:
    assert server.is_local(host) is local


def test_token_opens_and_its_absence_does_not(logs: RunFolder) -> None:
    with TestClient(server.make_app(logs, token=TOKEN, host="0.0.0.0"), base_url="http://box.example") as client:
        for path in ("/", "/api/runs", "/api/events", "/static/page.js"):
            assert client.get(path).status_code == 401
            assert client.get(f"{path}?token=wrong").status_code == 401
        assert client.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        answer = client.get(f"/?token={TOKEN}")
        assert TOKEN not in str(answer.url)
        assert client.get("/api/runs").status_code == 200


def test_token_of_the_user_is_not_printed(logs: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_MONITOR_TOKEN", TOKEN)
    served: list[str | None] = []
    monkeypatch.setattr(server, "serve", lambda folder, host, port, patience, token: served.append(token))
    result = CliRunner().invoke(app, ["monitor", str(logs.folder), "--serve", "--host", "0.0.0.0"])
    assert served == [TOKEN]
    assert TOKEN not in result.output
    assert "WANSHIM_MONITOR_TOKEN" in result.output


def test_token_that_is_too_short_is_refused_before_an_address_is_printed(
    logs: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSHIM_MONITOR_TOKEN", "short")
    result = CliRunner().invoke(app, ["monitor", str(logs.folder), "--serve"])
    assert isinstance(result.exception, WanshimError)
    assert result.output == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_busy_port_is_an_error_and_prints_nobodys_address(logs: RunFolder, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        other = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(app, ["monitor", str(logs.folder), "--serve", "--host", host, "--port", str(port)])
    assert isinstance(result.exception, WanshimError)
    assert f"port {port} of {host}: Address already in use" in str(result.exception)
    assert result.output == ""


LOCAL_NAMES = ["127.0.0.1", "127.0.0.1:7010", "127.0.0.2:7010", "[::1]", "[::1]:7010", "localhost:7010", "LOCALHOST"]


@pytest.mark.parametrize("host", LOCAL_NAMES)
def test_every_address_of_this_machine_opens_the_page(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 200


FOREIGN_NAMES = ["evil.example", "127.0.0.1.evil.example", "[evil", "[::1", "", "192.168.0.2", "127.0.0.1@evil.example"]


@pytest.mark.parametrize("host", [*FOREIGN_NAMES, "evil.example/127.0.0.1", "evil.example?127.0.0.1"])
def test_every_other_name_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 400


def test_refused_name_is_let_in_by_what_the_refusal_advises(logs: RunFolder, client: TestClient) -> None:
    behind_a_proxy = {"host": "user-6006.proxy.example"}
    refusal = client.get("/", headers=behind_a_proxy)
    assert refusal.status_code == 400
    assert "WANSHIM_MONITOR_TOKEN" in refusal.text
    with TestClient(server.make_app(logs, token=TOKEN), base_url="http://127.0.0.1") as with_token:
        assert with_token.get("/", headers=behind_a_proxy).status_code == 401
        assert with_token.get(f"/?token={TOKEN}", headers=behind_a_proxy).status_code == 200


def test_events_are_passed_on_as_they_come_by_nginx(logs: RunFolder) -> None:
    app = server.make_app(logs)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/api/events", "app": app, "headers": [(b"host", b"localhost")]}
    asyncio.run(server._Events()(scope, receive, send))  # type: ignore[arg-type]
    assert dict(sent[0]["headers"])[b"x-accel-buffering"] == b"no"


def test_folder_that_is_made_later_is_shown_then(tmp_path: Path) -> None:
    with pytest.raises(WanshimError, match="no folder"):
        RunFolder(tmp_path / "later")
    runs = RunFolder(tmp_path / "later", may_come=True)
    with TestClient(server.make_app(runs), base_url="http://127.0.0.1") as client:
        assert client.get("/api/runs").json()["runs"] == []
        write_log(make_run(tmp_path / "later" / "run"), [start_line(), *steps(3)])
        server._update(client.app)  # type: ignore[arg-type]
        assert client.get("/api/runs").json()["runs"][0]["id"] == "run"


def test_two_tokens_pages_end_at_this_server(logs: RunFolder) -> None:
    with TestClient(server.make_app(logs, token=TOKEN), base_url="http://127.0.0.1") as client:
        for path in ("//other.example/", "//other.example", "/\\other.example/", "/%2f%2fother.example/", "/api/runs/"):
            url = f"http://127.0.0.1{path}?token={TOKEN}"
            answer = client.get(url, follow_redirects=False)
            location = answer.headers.get("location", "./")
            assert location.startswith("./")
            assert str(answer.request.url.join(location)).startswith("http://127.0.0.1/")
        answer = client.get(f"/api/runs?token={TOKEN}")
        assert answer.json()["runs"][0]["id"] == "run"


def test_no_redirect_is_made_from_the_host_header(client: TestClient) -> None:
    answer = client.get("/api/runs/", headers={"host": "127.0.0.1"}, follow_redirects=False)
    assert answer.status_code == 404


def test_folder_that_goes_away_lets_its_runs_grow_old(logs: RunFolder, client: TestClient) -> None:
    logs.folder.rename(logs.folder.with_name("moved"))
    server._update(client.app)  # type: ignore[arg-type]
    assert client.get("/api/runs").json()["runs"][0]["id"] == "run"


def test_name_that_is_no_text_leaves_the_answer_whole(logs: RunFolder, client: TestClient) -> None:
    run = make_run(logs.folder / "bad", name="\udc80\ud800 \U0001f642", framework="\udcff")
    write_log(run, [start_line(device="\udc80"), {"event": "end", "state": "failed", "error": "\udc80"}])
    write_log(make_run(logs.folder / "\udcff", name=""), [start_line(), *steps(3)])
    server._update(client.app)  # type: ignore[arg-type]
    assert len(client.get("/api/runs").json()["runs"]) == 3
    for run_id in logs.runs:
        assert client.get(f"/api/runs/{run_id}/history").status_code == 200
        assert client.get("/api/training/status", params={"run": run_id}).status_code == 200


@contextmanager
def serving(logs: RunFolder) -> Iterator[tuple[str, int]]:
    """The real server, in a thread."""
    with server.listen("127.0.0.1", 0) as listening:
        running = uvicorn.Server(server.config_of(server.make_app(logs)))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()
        finally:
            running.should_exit = running.force_exit = True
            thread.join(60)


def closes(connection: socket.socket) -> bool:
    """Whether the server closes a connection without having answered; waits for it."""
    connection.settimeout(60)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


UNFINISHED = {
    "nothing": b"",
    "half a line": b"GET / HT",
    "headers without an end": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: 1\r\n",
}


@pytest.mark.parametrize("case", list(UNFINISHED))
def test_request_that_does_not_arrive_is_cut(logs: RunFolder, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.2)
    with serving(logs) as address, socket.create_connection(address) as connection:
        connection.sendall(UNFINISHED[case])
        assert closes(connection)


def test_second_request_of_a_connection_is_cut_too(logs: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.2)
    with serving(logs) as address, socket.create_connection(address) as connection:
        connection.sendall(b"GET /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = connection.makefile("rb")
        length = 0
        while (line := answer.readline()) != b"\r\n":
            if found := re.match(rb"content-length: (\d+)", line):
                length = int(found[1])
        answer.read(length)
        connection.sendall(b"GET / HTTP/1.1\r\n")
        assert closes(connection)


def test_request_that_trickles_is_cut(logs: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.2)
    with serving(logs) as address, socket.create_connection(address) as connection:
        connection.settimeout(0.05)
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        for _ in range(1200):  # a minute
            try:
                assert connection.recv(1) == b""
                return
            except TimeoutError:
                pass
            except ConnectionError:
                return
            try:
                connection.sendall(b"x")
            except ConnectionError:
                return
        raise AssertionError("a byte now and then keeps the connection")


def test_stream_of_events_outlives_the_time_of_a_request(logs: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.2)
    monkeypatch.setattr(server, "EVERY_S", 0.1)
    with serving(logs) as address, socket.create_connection(address) as connection:
        connection.settimeout(60)
        connection.sendall(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        events = (line[6:] for line in connection.makefile("rb") if line.startswith(b"data: "))
        for _ in range(10):
            found = json.loads(next(events))
            assert [run["id"] for run in found["runs"]] == ["run"]
            assert found["runs_left_out"] == 0
            assert found["tails"] == {}


def open_streams(address: tuple[str, int], count: int, stack: ExitStack) -> list[bytes]:
    """The status of streams that are asked for at once; they stay open as long as the stack."""
    connections = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(count)]
    for connection in connections:
        connection.sendall(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    return [connection.recv(15)[9:12] for connection in connections]


def test_streams_that_begin_at_once_do_not_pass_the_limit_together(
    logs: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that end make room for others."""
    monkeypatch.setattr(server, "EVERY_S", 0.05)
    with serving(logs) as address:
        with ExitStack() as stack:
            answers = open_streams(address, 100, stack)
            assert (answers.count(b"200"), answers.count(b"503")) == (server.MOST_STREAMS, 100 - server.MOST_STREAMS)
        with ExitStack() as stack:
            assert any(open_streams(address, 1, stack) == [b"200"] for _ in range(10_000))
