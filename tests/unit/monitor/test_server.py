from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.monitor.logs import make_run, start_line, steps, write_log
from wanshim.cli.main import app
from wanshim.errors import MonitorInvalid
from wanshim.monitor.runs import RunFolder

pytest.importorskip("starlette", reason="the extra wanshim[monitor] is not installed")
from starlette.testclient import TestClient
from typer.testing import CliRunner

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
    with pytest.raises(MonitorInvalid, match="WANSHIM_MONITOR_TOKEN"):
        server.make_app(logs, host="0.0.0.0")
    with pytest.raises(MonitorInvalid, match="16 or more"):
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
