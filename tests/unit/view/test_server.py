"""The server: the page, the API, ranges of media, live events, tokens."""

import json

import pytest

from grpo.view import server
from grpo.view.library import Library
from grpo.view.server import make_app
from tests.unit.view.asking import LOCAL, ask
from tests.unit.view.folders import end, make_run, two_groups


@pytest.fixture
def folder(tmp_path):
    folder = make_run(tmp_path / "run")
    two_groups(folder, 5)
    return folder


@pytest.fixture
def app(folder):
    return make_app(Library(folder.path.parent))


def test_the_page_and_its_files_are_served_with_a_strict_policy(app):
    home = ask(app, "/")
    assert home.status == 200 and home.headers["content-type"] == "text/html; charset=utf-8"
    policy = home.headers["content-security-policy"]
    assert "script-src 'self';" in policy and "default-src 'none'" in policy and "unsafe" not in policy
    assert home.headers["x-content-type-options"] == "nosniff" and home.headers["x-frame-options"] == "DENY"
    script = ask(app, "/page/app.js")
    assert script.status == 200 and script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert ask(app, "/page/no.js").code == "not_found"


def test_answers_are_the_librarys(app, folder):
    found = ask(app, "/api/runs/run/steps/5/groups?sort=mean&order=desc").json
    query = {"sort": "mean", "order": "desc"}
    told = Library(folder.path.parent).answer("/api/runs/run/steps/5/groups", query)
    assert found == json.loads(json.dumps(told))


def test_numbers_that_json_lacks_are_null(folder):
    (folder.path / "config.json").write_text('{"resolved": {"a": NaN, "b": [Infinity, 1]}}')
    found = ask(make_app(Library(folder.path.parent)), "/api/runs/run/config").json
    assert found["settings"] == {"a": None, "b": [None, 1]}


def test_only_reading_is_possible(app):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask(app, "/api/runs", method=method).status == 405
    assert ask(app, "/api/runs", method="HEAD").status == 200
    assert ask(app, "/api/live", method="HEAD").status == 200


def test_media_come_whole_or_in_ranges(app, folder):
    (folder.path / "video.mp4").write_bytes(bytes(range(256)))
    (folder.path / "samples" / "real.png").write_bytes(b"png")
    whole = ask(app, "/media/run/video.mp4")
    assert whole.body == bytes(range(256)) and whole.headers["content-type"] == "video/mp4"
    for asked, body, told in (
        ("bytes=10-19", bytes(range(10, 20)), "bytes 10-19/256"),
        ("bytes=250-", bytes(range(250, 256)), "bytes 250-255/256"),
        ("bytes=-6", bytes(range(250, 256)), "bytes 250-255/256"),
        ("bytes=0-999", bytes(range(256)), "bytes 0-255/256"),
    ):
        part = ask(app, "/media/run/video.mp4", (*LOCAL, ("range", asked)))
        assert (part.status, part.body, part.headers["content-range"]) == (206, body, told)
    assert ask(app, "/media/run/video.mp4", (*LOCAL, ("range", "bytes=300-"))).status == 416
    assert ask(app, "/media/run/video.mp4", (*LOCAL, ("range", "lines=1"))).status == 200
    assert ask(app, "/media/run/samples/real.png").body == b"png"
    assert ask(app, "/media/run/no.mp4").status == 410
    for other in ("config.json", "checkpoints/latest", "metrics.jsonl", "samples/../config.json"):
        assert ask(app, f"/media/run/{other}").code == "not_found"


def test_an_export_can_be_downloaded(app):
    found = ask(app, "/export/run?groups=5/1")
    assert found.status == 200 and found.headers["content-disposition"] == 'attachment; filename="run.html"'
    assert b'id="grpo-export"' in found.body
    assert ask(app, "/export/run?groups=no").code == "bad_request"
    assert ask(app, "/export/run?groups=5/9").code == "not_found" and ask(app, "/export/no").code == "not_found"


def events(body: bytes) -> list[tuple[str, dict]]:
    blocks = [block.split("\n") for block in body.decode().split("\n\n") if block.startswith("event: ")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


@pytest.fixture
def watched(app, monkeypatch):
    """What somebody who watches is told when `change` happens meanwhile."""
    monkeypatch.setattr(server, "POLL", 0.05)
    return lambda url, until, change: events(ask(app, url, until=until, meanwhile=change).body)


def test_new_steps_samples_and_the_end_arrive_live(watched, folder):
    def train() -> None:
        folder.append_metrics(21, {"reward": 3.5})
        two_groups(folder, 20)
        end(folder)

    found = watched("/api/live?run=run", b'"finished"', train)
    names = [name for name, _ in found]
    assert names[:2] == ["hello", "status"] and {"metrics", "samples"} <= {*names[2:]}
    told = next(data for name, data in found if name == "metrics")
    assert told["step"] == [21] and told["columns"]["reward"] == [3.5]
    assert next(data for name, data in found if name == "samples") == {"step": 20}
    assert found[-1][1]["state"] == "finished"


def test_a_resumption_is_told_as_a_reset(watched, folder):
    found = watched("/api/live?run=run", b"event: reset", lambda: folder.truncate_after(10))
    assert ("reset", {"generation": 1}) in found


def test_a_run_deleted_while_watched_is_gone(app, watched, folder):
    away = folder.path.parent.parent / f"{folder.path.parent.name}-away"
    assert watched("/api/live?run=run", b"never", lambda: folder.path.rename(away))[-1] == ("gone", {})
    assert ask(app, "/api/runs/run").status in (404, 410)


def test_the_list_is_watched_too(watched, folder):
    assert ("runs", {}) in watched("/api/live", b"event: runs", lambda: make_run(folder.path.parent / "other"))


def test_too_many_watchers_are_told_so(app, monkeypatch):
    monkeypatch.setattr(server, "MOST_WATCHERS", 0)
    assert ask(app, "/api/live").code == "busy"


def test_watchers_that_leave_make_room(app, monkeypatch):
    monkeypatch.setattr(server, "MOST_WATCHERS", 1)
    for _ in range(3):
        assert ask(app, "/api/live?run=no").code == "not_found"
        assert ask(app, "/api/live?run=run", until=b"event: status").status == 200


def test_live_of_no_run_is_an_error(app):
    assert ask(app, "/api/live?run=no").code == "not_found"
