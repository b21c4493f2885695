"""The viewer under attack and on damaged folders: a clear answer, never a 500, nothing outside of the runs folder."""

import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from grpo.view.files import Tail, lines, npz_rows, parse_line
from grpo.view.library import Library
from grpo.view.server import make_app
from tests.faults.tiny import train
from tests.unit.view.asking import LOCAL, ask
from tests.unit.view.folders import add_samples, end, make_run, try_row, two_groups

SECRET = "what nobody may see"
KNOWN = (
    "/api/runs",
    "/api/docs",
    "/api/compare?runs=run",
    "/api/runs/run",
    "/api/runs/run/metrics",
    "/api/runs/run/timing",
    "/api/runs/run/config",
    "/api/runs/run/events",
    "/api/runs/run/groups",
    "/api/runs/run/groups?q=four&sort=mean",
    "/api/runs/run/steps/5/groups",
    "/api/runs/run/steps/5/groups/0",
    "/api/runs/run/steps/5/groups/0/tokens",
    "/api/runs/run/steps/5/groups/0/text?row=0",
    "/media/run/video.mp4",
    "/export/run?groups=1",
)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "secret.json").write_text(json.dumps({"schema": 1, "secret": SECRET}))
    (tmp_path / "secret.mp4").write_text(SECRET)
    folder = make_run(tmp_path / "runs" / "run")
    two_groups(folder, 5)
    folder.event(1, "note", "something")
    end(folder)
    (folder.path / "video.mp4").write_bytes(b"film")
    return tmp_path / "runs"


@pytest.fixture
def app(root):
    return make_app(Library(root))


def well_behaved(answer) -> bool:
    """An answer, or an error in the one shape."""
    if answer.status >= 500:
        return False
    return answer.status in (200, 206, 303, 416) or {"code", "message"} == {*answer.json["error"]}


# --- who may ask -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "evil.com",
        "evil.com:6076",
        "127.0.0.1.evil.com",
        "localhost.evil.com",
        "",
        "127.0.0.1@evil.com",
        "0.0.0.0",
        "[::2]",
    ],
)
def test_a_foreign_host_is_turned_away(app, host):
    for path in ("/", "/page/app.js", "/api/runs", "/api/live", "/media/run/video.mp4"):
        assert ask(app, path, [("host", host)]).code == "forbidden"
    assert ask(app, "/api/runs", []).code == "forbidden"


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:6076", "LOCALHOST", "[::1]:80", "127.0.0.1"])
def test_this_machine_by_any_port_is_let_in(app, host):
    assert ask(app, "/api/runs", [("host", host)]).status == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.com", "null", "http://127.0.0.1:1", "http://127.0.0.1:6076.evil.com", "file://"]
)
def test_a_foreign_origin_is_turned_away(app, origin):
    assert ask(app, "/api/runs", [*LOCAL, ("origin", origin)]).code == "forbidden"
    assert ask(app, "/api/runs", [*LOCAL, ("origin", "http://127.0.0.1:6076")]).status == 200


def test_what_another_site_embeds_is_turned_away_and_a_link_is_not(app):
    embeds = [*LOCAL, ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors"), ("sec-fetch-dest", "script")]
    frame = [*LOCAL, ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe")]
    link = [*LOCAL, ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")]
    assert ask(app, "/api/runs", embeds).code == "forbidden" and ask(app, "/", frame).code == "forbidden"
    assert ask(app, "/", link).status == 200


@pytest.mark.parametrize(
    "twice",
    [
        [("host", "evil.com"), ("host", "localhost")],
        [("host", "localhost"), ("host", "evil.com")],
        [("host", "localhost"), ("Host", "localhost")],
        [*LOCAL, ("origin", "http://evil.com"), ("origin", "http://127.0.0.1:6076")],
        [*LOCAL, ("origin", "http://127.0.0.1:6076"), ("origin", "http://evil.com")],
    ],
)
def test_two_hosts_or_origins_in_one_request_are_refused(app, twice):
    answer = ask(app, "/api/runs", twice)
    assert (answer.status, answer.code) == (400, "bad_request")


def test_other_interfaces_need_the_token(root):
    with pytest.raises(ValueError, match="needs a token"):
        make_app(Library(root), "0.0.0.0")
    app = make_app(Library(root), "0.0.0.0", "right")
    away = [("host", "gpu-box:6076")]
    for path in ("/", "/page/app.js", "/api/runs", "/api/live", "/media/run/video.mp4", "/login", "/login?token=wrong"):
        assert ask(app, path, away).code == "unauthorised"
    login = ask(app, "/login?token=right", away)
    assert login.status == 303 and login.headers["location"] == "/"
    assert "httponly" in login.headers["set-cookie"].lower() and "samesite=lax" in login.headers["set-cookie"].lower()
    cookie = login.headers["set-cookie"].partition(";")[0]
    name = cookie.partition("=")[0]
    for wrong in (f"{name}=wrong", f"{name}=", f"x=1; {name}", "\xff\xfe", f"{name}=righ", "x=right"):
        assert ask(app, "/api/runs", [*away, ("cookie", wrong)]).code == "unauthorised"
    assert ask(app, "/api/runs", [*away, ("cookie", cookie)]).status == 200
    assert ask(app, "/api/runs", [*away, ("cookie", cookie), ("origin", "http://evil.com")]).code == "forbidden"


# --- nothing outside -------------------------------------------------------------------------------------------------

CLIMBS = (
    "/page/../server.py",
    "/page/%2e%2e/server.py",
    "/page/..%2fserver.py",
    "/page//etc/passwd",
    "/page/%2fetc/passwd",
    "/page/vendor/../../server.py",
    "/page/app.js%00",
    "/page/.",
    "/page/",
    "/media/run/../secret.mp4",
    "/media/run/%2e%2e/%2e%2e/secret.mp4",
    "/media/run/..%2f..%2fsecret.mp4",
    "/media/run/~2E~2E~2F~2E~2E~2Fsecret.mp4",
    "/media/../secret.mp4",
    "/media/~2E~2E/secret.mp4",
    "/media/run/samples/~2E~2E~2F~2E~2E~2F~2E~2E~2Fsecret.mp4",
    "/media/run//etc/passwd.mp4",
    "/media/run/~00.mp4",
    "/api/runs/..",
    "/api/runs/%2e%2e",
    "/api/runs/..%2f..",
    "/api/runs/~2E~2E",
    "/api/runs/run/steps/..%2f5/groups",
    "/api/runs/run/steps/5/groups/..%2f..%2f0",
)


@pytest.mark.parametrize("path", CLIMBS)
def test_no_path_leads_out(app, path):
    answer = ask(app, path)
    assert answer.status in (400, 404, 410, 422) and SECRET.encode() not in answer.body and b"import" not in answer.body


def test_links_are_not_followed(root, tmp_path):
    outside = make_run(tmp_path / "outside")
    two_groups(outside, 5)
    (root / "linked").symlink_to(outside.path)
    run = root / "run"
    shutil.move(run / "samples", tmp_path / "samples")
    (run / "samples").symlink_to(tmp_path / "samples")
    for name, target in (("video.mp4", "secret.mp4"), ("config.json", "secret.json"), ("status.json", "secret.json")):
        (run / name).unlink()
        (run / name).symlink_to(tmp_path / target)
    app = make_app(Library(root))
    listed = ask(app, "/api/runs").json
    assert [line["name"] for line in listed["runs"]] == ["run"] and "not followed" in listed["notes"][0]
    assert ask(app, "/api/runs/linked").code == "not_found"
    for path in KNOWN[3:]:
        answer = ask(app, path)
        assert well_behaved(answer) and SECRET.encode() not in answer.body, path
    assert ask(app, "/media/run/video.mp4").code == "unreadable"
    assert ask(app, "/api/runs/run/config").code == "unreadable"
    assert ask(app, "/api/runs/run/steps/5/groups").code == "not_found"


def test_pipes_and_devices_do_not_hang_it(root):
    (root / "run" / "metrics.jsonl").unlink()
    os.mkfifo(root / "run" / "metrics.jsonl")
    (root / "run" / "video.mp4").unlink()
    os.mkfifo(root / "run" / "video.mp4")
    app = make_app(Library(root))
    assert ask(app, "/api/runs").json["runs"][0]["state"] == "unreadable"
    assert ask(app, "/api/runs/run/metrics").code == "unreadable"
    assert ask(app, "/media/run/video.mp4").code == "unreadable"


def test_nothing_is_ever_written(root, app):
    def everything() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(root.rglob("*"))}

    before = everything()
    for path in KNOWN:
        assert ask(app, path).status == 200, path
    assert everything() == before


# --- damage ----------------------------------------------------------------------------------------------------------


def test_every_file_cut_anywhere_is_survived(root, app):
    random.seed(0)
    files = [path for path in (root / "run").rglob("*") if path.is_file() and path.name != "lock"]
    for path in files:
        whole = path.read_bytes()
        for cut in sorted({0, 1, len(whole) // 2, len(whole) - 1, *random.choices(range(len(whole)), k=3)}):
            path.write_bytes(whole[:cut])
            for url in KNOWN:
                answer = ask(app, url)
                assert well_behaved(answer), (path.name, cut, url, answer.body[:200])
        path.write_bytes(whole)
    assert all(ask(app, url).status == 200 for url in KNOWN)


@pytest.mark.parametrize("times", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_every_file_with_flipped_bytes_is_survived(root, app, times):
    random.seed(1)
    files = [path for path in (root / "run").rglob("*") if path.is_file() and path.name != "lock"]
    for path in files:
        whole = path.read_bytes()
        for _ in range(times):
            broken = bytearray(whole)
            for _ in range(1 + len(whole) // 50):
                broken[random.randrange(len(whole))] = random.randrange(256)
            path.write_bytes(broken)
            for url in KNOWN:
                answer = ask(app, url)
                assert well_behaved(answer), (path.name, url, answer.body[:200])
        path.write_bytes(whole)


def test_a_cut_npz_leaves_the_text_and_says_so(root, app):
    path = root / "run" / "samples" / "step-00000005.npz"
    path.write_bytes(path.read_bytes()[:200])
    found = ask(app, "/api/runs/run/steps/5/groups/0").json
    assert "step-00000005.npz" in found["notes"][0] and found["samples"][0]["completion"] == "the answer is four"
    tokens = ask(app, "/api/runs/run/steps/5/groups/0/tokens").json
    assert tokens["rows"][0]["tokens"] and tokens["rows"][0]["ratio"] is None


def test_a_cut_line_of_samples_is_passed_over(root, app):
    path = root / "run" / "samples" / "step-00000005.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    found = ask(app, "/api/runs/run/steps/5/groups").json
    assert [group["size"] for group in found["groups"]] == [2, 1] and "damaged" in found["notes"][0]


@pytest.mark.parametrize("times", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_rows_that_hold_nonsense_are_survived(root, times):
    nonsense = [None, True, "x", -1, 10**400, 1e308, float("nan"), float("inf"), [], {}, [[[]]], {"a": {"b": None}}]
    names = (
        "row",
        "group",
        "reward",
        "advantage",
        "reward_parts",
        "status",
        "prompt",
        "completion",
        "tokens",
        "rewards",
        "length",
        "actions",
        "observations",
        "arm",
        "messages",
        "extras",
        "error",
        "attempt",
        "teaching",
        "media",
        "stop",
    )
    random.seed(2)
    path = root / "run" / "samples" / "step-00000005.jsonl"
    good = [json.loads(line) for line in path.read_text().splitlines()]
    app = make_app(Library(root))
    for _ in range(times):
        rows = [row | {name: random.choice(nonsense) for name in random.sample(names, 4)} for row in good]
        rows[0]["group"] = 0
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for url in KNOWN[8:]:
            answer = ask(app, url)
            assert well_behaved(answer), (rows, url, answer.body[:300])


@pytest.mark.parametrize("times", [15, pytest.param(40, marks=pytest.mark.slow)])
def test_settings_status_and_metrics_that_hold_nonsense_are_survived(root, times):
    nonsense = [None, True, "x", -1, 10**400, float("nan"), float("-inf"), [], {}, [1, "a"], {"resolved": []}]
    random.seed(3)
    app, run = make_app(Library(root)), root / "run"
    kept = {name: json.loads((run / name).read_text()) for name in ("run.json", "config.json", "status.json")}
    for _ in range(times):
        for name, good in kept.items():
            bad = good | {key: random.choice(nonsense) for key in random.sample(sorted(good), min(2, len(good)))}
            if name == "status.json" and isinstance(bad["recipe"], dict):
                bad["recipe"] = {key: random.choice([value, *nonsense]) for key, value in bad["recipe"].items()}
            (run / name).write_text(json.dumps(bad))
        rows = [{"step": random.choice([1, 2, *nonsense]), "reward": random.choice(nonsense), "x": 1} for _ in range(5)]
        for name in ("metrics.jsonl", "timing.jsonl", "events.jsonl"):
            (run / name).write_text("".join(json.dumps(row | {"event": "resumed", "total": 1}) + "\n" for row in rows))
        for url in KNOWN:
            answer = ask(app, url)
            assert well_behaved(answer), (url, answer.body[:300])


def test_a_newer_folder_is_named_and_not_read(root, app):
    about = json.loads((root / "run" / "run.json").read_text())
    (root / "run" / "run.json").write_text(json.dumps(about | {"schema": 99}))
    (line,) = ask(app, "/api/runs").json["runs"]
    assert line["state"] == "unreadable" and "pip install -U anygrpo" in line["error"]


def test_a_run_deleted_while_open_is_gone_and_the_list_goes_on(root, app):
    make_run(root / "other")
    assert all(ask(app, url).status == 200 for url in KNOWN)
    shutil.rmtree(root / "run")
    for url in KNOWN[3:]:
        assert ask(app, url).status in (404, 410), url
    assert [line["name"] for line in ask(app, "/api/runs").json["runs"]] == ["other"]
    shutil.rmtree(root)
    assert ask(app, "/api/runs").json["runs"] == []


def test_hostile_text_comes_through_as_it_is(root):
    said = "<script>alert(1)</script>\x1b[31m\u202eevil\u202c\0\ud800" + "x" * 1_000_000
    folder = make_run(root / "hostile")
    add_samples(folder, 1, [try_row(0, 0, said, [1.0, 0.0], prompt=said)])
    app = make_app(Library(root))
    (sample,) = ask(app, "/api/runs/hostile/steps/1/groups/0").json["samples"]
    assert sample["completion"] == said[:200_000] and sample["completion_cut"] == len(said)
    assert ask(app, "/api/runs/hostile/steps/1/groups?q=" + quote("ALERT(1)")).json["total"] == 1
    path = folder.path / "samples" / "step-00000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b"alert(1)", b"\xff\xfe(1)"))
    (sample,) = ask(app, "/api/runs/hostile/steps/1/groups/0").json["samples"]
    assert sample["completion"].startswith("<script>\ufffd\ufffd(1)")


# --- any question ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_questions_at_random_never_break_it(root, app, times):
    """A fuzz over the routes: parts of paths and parameters, right and wrong, huge and strange."""
    random.seed(4)
    odd = [
        "",
        "0",
        "5",
        "run",
        "-1",
        "1e9",
        "999999999",
        "9" * 30,
        "9" * 5000,
        "٥",
        "é",
        "\ud800",
        "a/b",
        "..",
        "%",
        "\n",
        "nan",
        "inf",
        "0x10",
        "null",
        "'; --",
        "{}",
        "[]",
        "true",
        "run,run",
        "0,1,2",
        "1.5",
        "~",
        "~2F",
        " ",
    ]
    names = [
        "offset",
        "limit",
        "sort",
        "order",
        "q",
        "badge",
        "min_mean",
        "max_mean",
        "rows",
        "row",
        "from",
        "to",
        "after",
        "points",
        "names",
        "run",
        "runs",
        "x",
    ]
    shapes = [
        "/api/runs/{}",
        "/api/runs/{}/metrics",
        "/api/runs/{}/timing",
        "/api/runs/{}/events",
        "/api/runs/{}/groups",
        "/api/runs/{}/steps/{}/groups",
        "/api/runs/{}/steps/{}/groups/{}",
        "/api/runs/{}/steps/{}/groups/{}/tokens",
        "/api/runs/{}/steps/{}/groups/{}/text",
        "/api/compare",
        "/api/prompts/{}",
        "/media/{}/{}",
        "/export/{}",
        "/page/{}",
        "/{}",
        "/api/{}",
        "/api/runs/{}/config",
        "/api/docs",
        "/api/runs",
    ]
    for _ in range(times):
        shape = random.choice(shapes)
        parts = [random.choice([*odd, "run", "run", "5", "0"]) for _ in range(shape.count("{}"))]
        parts[: min(3, len(parts))] = [
            good if random.random() < 0.6 else part for good, part in zip(["run", "5", "0"], parts, strict=False)
        ]
        query = "&".join(f"{random.choice(names)}={_quoted(random.choice(odd))}" for _ in range(random.randrange(4)))
        url = shape.format(*map(_quoted, parts)) + (f"?{query}" if query else "")
        answer = ask(app, url)
        assert well_behaved(answer), (url, answer.status, answer.body[:300])


def _quoted(text: str) -> str:
    return quote(text.encode(errors="surrogatepass"), safe="/.~")


def test_headers_at_random_never_break_it(app):
    random.seed(5)
    for _ in range(500):
        names = random.choices(["host", "origin", "cookie", "range", "sec-fetch-site", "sec-fetch-mode", "x"], k=3)
        odd = [
            "",
            "\xff",
            "http://[",
            "http://a:b:c",
            "[::1",
            "bytes=--",
            "bytes=9" * 9,
            "a=b;" * 99,
            "localhost",
            "//",
        ]
        answer = ask(app, "/media/run/video.mp4", [*LOCAL, *((name, random.choice(odd)) for name in names)])
        assert well_behaved(answer), (names, answer.body[:200])


def test_an_npz_that_promises_too_much_is_refused_without_reading_it(tmp_path):
    rows = np.zeros((3, 4), np.float16)
    np.savez(tmp_path / "good.npz", a=rows, flat=np.zeros(3), text=np.array([["x"]]))
    with (tmp_path / "good.npz").open("rb") as file:
        assert {name: array.shape for name, array in npz_rows(file, [2, 0, 2], 1, 3).items()} == {"a": (3, 2)}
    data = (tmp_path / "good.npz").read_bytes()
    for shape in (b"(3, 4), }      ", b"(3, 9999999999)", b"(-3, 4), }     ", b"(3, True), }   "):
        (tmp_path / "bad.npz").write_bytes(data.replace(b"(3, 4), }      ", shape))
        with (tmp_path / "bad.npz").open("rb") as file:
            try:
                npz_rows(file, [2], 0, 10)
            except RuntimeError as error:
                assert "cannot be read" in str(error)


def _npz(header: str, body: bytes = b"", method: int = zipfile.ZIP_DEFLATED, members: int = 1) -> bytes:
    """An npz with this header before its bytes."""
    made = io.BytesIO()
    text = header.encode().ljust(117) + b"\n"
    with zipfile.ZipFile(made, "w", method) as archive:
        for number in range(members):
            data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body
            archive.writestr(f"a{number}.npy", data)
    return made.getvalue()


PLAIN = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3), }"


def _broken_lzma() -> bytes:
    data = bytearray(_npz(PLAIN, random.Random(0).randbytes(2000), zipfile.ZIP_LZMA))
    data[120:160] = b"\xff" * 40
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [_npz("{[]: 1}"), _npz("{1: 1, 'a': 2, 'c': 3}"), _npz(PLAIN), _broken_lzma(), b"PK\x05\x06"],
    ids=["unhashable", "mixed", "short", "lzma", "no zip"],
)
def test_arrays_that_break_their_decoder_leave_the_text(root, app, data):
    (root / "run" / "samples" / "step-00000005.npz").write_bytes(data)
    for path in ("", "/tokens"):
        answer = ask(app, f"/api/runs/run/steps/5/groups/0{path}")
        assert answer.status == 200 and "no token numbers" in answer.json["notes"][0]


def test_all_arrays_of_a_file_share_one_budget(monkeypatch):
    data = _npz(PLAIN, bytes(48), members=5)
    assert len(npz_rows(io.BytesIO(data), [3], 0, 3)) == 5
    monkeypatch.setattr("grpo.view.files.MOST_PASSED", 5 * 48 - 1)
    with pytest.raises(RuntimeError, match="too large"):
        npz_rows(io.BytesIO(data), [3], 0, 3)


def test_bounds_beyond_every_number_are_survived(root, app):
    for low, high in ((-1e300, 0.2), (0.2, 1e300), (1e300, -1e300)):
        recipe = {"surrogate": "geometric", "epsilon": low, "epsilon_high": high}
        (root / "run" / "status.json").write_text(json.dumps({"recipe": recipe}))
        assert ask(app, "/api/runs/run").status == 200


def test_what_nobody_foresaw_is_said_and_logged(root, app, monkeypatch, caplog):
    def broken(*_):
        raise AssertionError("never thought of")

    monkeypatch.setattr("grpo.view.library.compare", broken)
    answer = ask(app, "/api/compare?runs=run")
    assert (answer.status, answer.code) == (422, "unreadable") and "never thought of" in caplog.text


def test_a_line_that_is_too_long_is_passed_over_once(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.view.files.LONGEST_LINE", 100)
    monkeypatch.setattr("grpo.view.files.CHUNK", 64)
    file, rows = tmp_path / "a.jsonl", []
    file.write_text('{"a": 1}\n{"a": "' + "x" * 1000 + '"}\n')
    tail = Tail(tmp_path, "a.jsonl")
    for number in (2, 3):
        tail.grow(rows.append)
        assert tail.damaged == 1
        with file.open("a") as out:
            out.write(f'{{"a": {number}}}\n')
    assert tail.grow(rows.append) and [row["a"] for row in rows] == [1, 2, 3] and tail.damaged == 1


def test_metrics_without_end_are_thinned_and_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.view.series.MOST_CELLS", 300)
    monkeypatch.setattr("grpo.view.series.MOST_NAMES", 50)
    make_run(tmp_path / "long", steps=500)
    make_run(tmp_path / "wide", steps=3, **{f"m{i}": 1.0 for i in range(400)})
    library = Library(tmp_path)
    for name, word in (("long", "very long"), ("wide", "very many")):
        table = library.answer(f"/api/runs/{name}/metrics")
        assert len(table["step"]) * (1 + len(table["columns"])) <= 300 and table["columns"]["reward"]
        assert any(word in note for note in library.answer(f"/api/runs/{name}")["notes"])
    assert library.answer("/api/runs/long/metrics")["step"][-1] == 500


def test_a_list_of_runs_looks_through_the_folder_once(tmp_path, monkeypatch):
    for number in range(5):
        make_run(tmp_path / f"run{number}", steps=1)
    library, looks = Library(tmp_path), []
    find = library.shelf.find
    monkeypatch.setattr(library.shelf, "find", lambda: looks.append(1) or find())
    assert len(library.answer("/api/runs")["runs"]) == 5 and len(looks) == 1


def test_a_run_deleted_while_it_is_listed_is_left_out(root, monkeypatch):
    library = Library(root)
    monkeypatch.setattr(library.shelf, "find", lambda: ({"run": "run", "lost": "lost"}, []))
    assert [line["run"] for line in library.answer("/api/runs")["runs"]] == ["run"]


# --- the command -----------------------------------------------------------------------------------------------------


@contextmanager
def served(root: Path, *flags: str):
    """A viewer in a process of its own: the link it prints. Ctrl-C ends it, as a success."""
    command = [sys.executable, "-m", "grpo.cli", "view", str(root), "--no-browser", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) as process:
        try:
            yield process.stdout.readline().split()[2]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, process.stderr.read()


def test_the_command_serves_until_it_is_told_to_stop(root):
    with served(root, "--no-token") as url:
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{url}api/runs", timeout=60) as answer:
            assert json.load(answer)["runs"][0]["name"] == "run"
        port = int(url.rstrip("/").rpartition(":")[2])
        again = [sys.executable, "-m", "grpo.cli", "view", str(root), "--no-browser", "--port", str(port)]
        done = subprocess.run(again, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
        assert done.returncode == 2 and "choose another --host or --port" in done.stderr
        with socket.create_connection(("127.0.0.1", port), 60) as raw, raw.makefile("rb") as answer:
            raw.sendall(b"GET /api/runs HTTP/1.1\r\nHost: evil.com\r\nConnection: close\r\n\r\n")
            assert b"403" in answer.readline()


def test_a_wide_host_prints_a_token_that_is_needed(root):
    with served(root, "--host", "0.0.0.0") as url:
        port, token = url.split(":")[2].split("/")[0], url.rpartition("=")[2]
        assert len(token) >= 32
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/runs", timeout=60)
        refused.value.close()
        person = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with person.open(f"http://127.0.0.1:{port}/login?token={token}", timeout=60) as answer:
            assert answer.status == 200 and answer.url == f"http://127.0.0.1:{port}/"
        with person.open(f"http://127.0.0.1:{port}/api/runs", timeout=60) as answer:
            assert json.load(answer)["runs"]


@pytest.mark.slow
def test_a_run_in_training_is_neither_blocked_nor_changed_by_looking(tmp_path):
    """The same run with and without somebody who looks all the time: the same bytes."""
    program = """
import pathlib, sys
from tests.faults.tiny import train
train(pathlib.Path(sys.argv[1]), 20)
"""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    files = {}
    for name in ("alone", "watched"):
        (tmp_path / name).mkdir()
    train(tmp_path / "alone" / "run", 20)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "watched/run")], cwd=root, env=environment
    )
    app, states = make_app(Library(tmp_path / "watched")), set()
    while process.poll() is None:
        for line in ask(app, "/api/runs").json["runs"]:
            states.add(line["state"])
            for url in ("/api/runs/run", "/api/runs/run/metrics", "/api/runs/run/groups"):
                assert ask(app, url).status == 200
        time.sleep(0.02)
    assert process.wait(300) == 0
    for name in ("alone", "watched"):
        path = tmp_path / name / "run"
        files[name] = [p.read_bytes() for p in (path / "metrics.jsonl", *sorted(path.glob("samples/*.jsonl")))]
    assert files["alone"] == files["watched"] and "running" in states
    assert states <= {"running", "finished"} and ask(app, "/api/runs").json["runs"][0]["state"] == "finished"


def test_of_a_very_long_file_the_end_and_some_of_the_rest_are_read(root, monkeypatch):
    """A list of runs must not wait for a file of 100 MB; what was left out is said."""
    monkeypatch.setattr("grpo.view.files.MOST_AT_ONCE", 20_000)
    monkeypatch.setattr("grpo.view.files.MOST_BEFORE", 50)
    rows = [json.dumps({"step": step, "reward": step / 10, "event": "note"}) for step in range(1, 5001)]
    for name in ("metrics.jsonl", "timing.jsonl", "events.jsonl"):
        (root / "run" / name).write_text("\n".join(rows) + "\n")
    read = []
    monkeypatch.setattr("grpo.view.files.parse_line", lambda line, real=parse_line: read.append(line) or real(line))
    app = make_app(Library(root))
    assert ask(app, "/api/runs").json["runs"][0]["step"] == 5000
    assert len(read) < 2000
    notes = "\n".join(ask(app, "/api/runs/run").json["notes"])
    assert "metrics.jsonl: it is very long: of its older rows only some are shown" in notes
    assert "events.jsonl: it is very long: only its end is shown" in notes
    steps = ask(app, "/api/runs/run/metrics").json["step"]
    assert (
        steps == sorted(set(steps)) and steps[0] == 1 and steps[-1] == 5000 and 40 < sum(s < 4000 for s in steps) < 60
    )
    with (root / "run" / "metrics.jsonl").open("a") as file:  # it goes on from there
        file.write(json.dumps({"step": 5001}) + "\n")
    assert ask(app, "/api/runs").json["runs"][0]["step"] == 5001


def test_a_line_without_end_costs_no_more_than_its_bytes(tmp_path):
    """Joining what was begun with each new piece would copy it again and again."""
    (tmp_path / "long").write_bytes(b"x" * 5_000_000 + b"\n" + b"y" * 3 + b"\n" + b"z" * 3_000_000)
    with (tmp_path / "long").open("rb") as file:
        found = [(line.offset, len(line.text), line.end) for line in lines(file)]
    assert found == [(0, 5_000_000, 5_000_001), (5_000_001, 3, 5_000_005)]
