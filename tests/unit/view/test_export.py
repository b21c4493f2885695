"""One file that holds the page and its answers, and what a notebook shows."""

import base64
import json
import re

import numpy as np
import pytest

import grpo
from grpo.view.export import embedded, export_html, wanted, write_export
from grpo.view.launch import folder_of, library_of
from grpo.view.library import Library
from tests.unit.view.folders import add_samples, end, make_run, try_row, two_groups

HOSTILE = "</script><script>alert(1)</script><!-- \u202e \x1b[31m \0 \ud800 ]]> & &lt;"


@pytest.fixture
def folder(tmp_path):
    folder = make_run(tmp_path / "run")
    for step in range(1, 11):
        two_groups(folder, step)
    end(folder)
    return folder


def content(html: str) -> dict:
    """What is embedded, read as a browser reads it: up to the first </script."""
    begin = html.index('id="grpo-export">') + len('id="grpo-export">')
    return json.loads(html[begin : html.lower().index("</script", begin)])


def test_the_file_holds_the_answers_of_the_server(folder):
    library = Library(folder.path.parent)
    found = content(export_html(library, "run", groups=5))
    answers = found["responses"]
    assert found["start"] == "#/run/run" and answers["/api/runs"]["export"] is True
    for path in ("metrics", "timing", "config"):
        assert answers[f"/api/runs/run/{path}"] == library.answer(f"/api/runs/run/{path}")
    steps = answers["/api/runs/run"]["sample_steps"]["list"]
    assert steps == [1, 4, 7, 10]
    groups = answers["/api/runs/run/groups"]["groups"]
    assert len(groups) == 5 and {group["step"] for group in groups} == {*steps}
    for group in groups:
        path = f"/api/runs/run/steps/{group['step']}/groups/{group['group']}"
        assert answers[path]["samples"] == library.answer(path)["samples"]
        assert answers[f"{path}/tokens"] == library.answer(f"{path}/tokens")
    walk, at = [], groups[0]
    while at is not None:
        walk.append((at["step"], at["group"]))
        at = answers[f"/api/runs/run/steps/{at['step']}/groups/{at['group']}"]["next"]
    assert walk == [(group["step"], group["group"]) for group in groups]


def test_groups_can_be_chosen(folder):
    library = Library(folder.path.parent)
    found = content(export_html(library, "run", wanted("7/1,2/0")))["responses"]
    assert [(g["step"], g["group"]) for g in found["/api/runs/run/groups"]["groups"]] == [(7, 1), (2, 0)]
    assert found["/api/runs/run/steps/2/groups"]["next"] == 7
    assert found["/api/runs/run/steps/7/groups/1"]["next"] == {"step": 2, "group": 0}
    with pytest.raises(LookupError, match="no group 9"):
        export_html(library, "run", [(7, 9)])
    for wrong in ("", "0", "x", "1/", "1/2,", "-1/2", "1/2/3"):
        with pytest.raises(ValueError, match="STEP/GROUP"):
            wanted(wrong)


def test_hostile_text_stays_text(tmp_path):
    folder = make_run(tmp_path / "run", **{"x": 1.0})
    add_samples(folder, 1, [try_row(0, 0, HOSTILE, [1.0, 0.0], prompt=HOSTILE, error=HOSTILE)])
    html = export_html(Library(tmp_path), "run")
    assert "alert(1)</script>" not in html
    assert html.lower().count("</script") == html.lower().count("<script")
    (sample,) = content(html)["responses"]["/api/runs/run/steps/1/groups/0"]["samples"]
    assert sample["completion"] == HOSTILE and sample["error"] == HOSTILE
    assert "<" not in embedded({"a": HOSTILE}) and "&" not in embedded({"a": HOSTILE})


def test_the_policy_admits_the_pages_own_scripts_alone(folder):
    first, second = (export_html(Library(folder.path.parent), "run") for _ in range(2))
    policies = [
        re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)[1] for html in (first, second)
    ]
    nonces = [re.search(r"script-src &#x27;nonce-([\w-]+)&#x27;;", policy)[1] for policy in policies]
    assert nonces[0] != nonces[1]
    assert "unsafe" not in policies[0] and "default-src &#x27;none&#x27;" in policies[0] and "http:" not in policies[0]
    head = first[: first.index("Content-Security-Policy")]
    assert "<script" not in head and "<style" not in head  # nothing before the policy holds
    scripts = re.findall(r"<script\b[^>]*>", first)
    assert all(f'nonce="{nonces[0]}"' in tag or "application/json" in tag for tag in scripts)
    assert not re.findall(r'\b(?:src|href)="(?!data:|#)[^"]*"', first[: first.index('id="grpo-export"')])


def test_every_import_of_the_page_is_in_the_file(folder):
    html = export_html(Library(folder.path.parent), "run")
    table = json.loads(re.search(r'<script type="importmap"[^>]*>(.*?)</script>', html, re.S)[1])["imports"]
    modules = {name: base64.b64decode(url.partition(",")[2]).decode() for name, url in table.items()}
    assert "page:app.js" in modules
    for name, text in modules.items():
        code = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        wanted = re.findall(r'(?:^|[;}\s])(?:import|export)\b[^"\';]*?\bfrom\s*["\']([^"\']+)', code)
        wanted += re.findall(r'(?:^|[;}\s])import\s*["\']([^"\']+)', code)
        assert {*wanted} <= {*modules}, name


def test_videos_are_embedded_and_large_ones_left_out(folder, monkeypatch):
    (folder.path / "video.mp4").write_bytes(b"film")
    assert content(export_html(Library(folder.path.parent), "run"))["media"] == {
        "media/run/video.mp4": "data:video/mp4;base64," + base64.b64encode(b"film").decode()
    }
    monkeypatch.setattr("grpo.view.export.MOST_MEDIA", 6)
    assert content(export_html(Library(folder.path.parent), "run"))["media"] == {}


def test_films_of_the_chosen_groups_are_embedded_and_what_is_not_there_is_left_out(tmp_path):
    folder = make_run(tmp_path / "run")
    media = [{"kind": "video", "name": "episode", "file": f"step-00000010-film-{i}.mp4"} for i in range(2)]
    rows = [{"row": i, "group": 0, "reward": i, "advantage": 0, "actions": [i], "media": media} for i in range(2)]
    add_samples(folder, 10, rows)
    (folder.path / "samples" / media[0]["file"]).write_bytes(b"film")
    assert content(export_html(Library(tmp_path), "run"))["media"] == {
        f"media/run/samples/{media[0]['file']}": "data:video/mp4;base64," + base64.b64encode(b"film").decode()
    }


def test_several_runs_are_compared_and_a_broken_one_is_listed(folder):
    two_groups(make_run(folder.path.parent / "other", seed=1), 3)
    make_run(folder.path.parent / "broken")
    (folder.path.parent / "broken" / "run.json").write_text("{")
    found = content(export_html(Library(folder.path.parent), None))["responses"]
    assert {line["name"]: line["state"] for line in found["/api/runs"]["runs"]}["broken"] == "unreadable"
    assert {line["name"] for line in found["/api/compare"]["runs"]} == {"run", "other"}


def test_a_prompt_seen_twice_has_its_history(folder):
    found = content(export_html(Library(folder.path.parent), "run"))["responses"]
    histories = [answer for path, answer in found.items() if path.startswith("/api/prompts/")]
    assert len(histories) == 2 and all(len(history["entries"]) == 10 for history in histories)


def test_a_prompt_of_several_runs_has_the_entries_of_all(folder):
    two_groups(make_run(folder.path.parent / "other", seed=1), 3)
    found = content(export_html(Library(folder.path.parent), None))["responses"]
    histories = [answer for path, answer in found.items() if path.startswith("/api/prompts/")]
    assert histories
    for history in histories:
        places = [(entry["run"], entry["step"]) for entry in history["entries"]]
        assert places == [("other", 3), *(("run", step) for step in range(1, 11))]


def test_what_is_not_finite_is_null(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = [try_row(0, 0, "a", [1.0, 0.0])]
    add_samples(folder, 1, rows)
    (folder.path / "samples" / "step-00000001.jsonl").write_text(json.dumps(rows[0] | {"odd": float("nan")}) + "\n")
    html = export_html(Library(tmp_path), "run")
    (sample,) = content(html)["responses"]["/api/runs/run/steps/1/groups/0"]["samples"]
    assert sample["fields"] == {"odd": None} and ":NaN" not in html


def test_more_than_a_browser_can_read_is_refused(folder, monkeypatch):
    monkeypatch.setattr("grpo.view.export.MOST_TEXT", 1000)
    with pytest.raises(ValueError, match="choose fewer"):
        export_html(Library(folder.path.parent), "run", 5)


def test_nothing_is_written_through_a_link_that_lies_in_wait(folder, tmp_path, monkeypatch):
    other = tmp_path / "other.txt"
    other.write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda count: "guessed")
    (tmp_path / ".guessed.tmp").symlink_to(other)
    with pytest.raises(ValueError, match="name another file"):
        write_export(Library(folder.path.parent), tmp_path / "r.html", "run")
    assert other.read_text() == "mine"


def test_damaged_samples_leave_the_rest(folder):
    (folder.path / "samples" / "step-00000001.jsonl").write_bytes(b"\xff\xfe no json")
    (folder.path / "samples" / "step-00000004.npz").write_bytes(b"PK")
    found = content(export_html(Library(folder.path.parent), "run"))["responses"]
    assert found["/api/runs/run"]["sample_steps"]["list"] == [4, 7, 10]
    group = next(path for path in found if path.startswith("/api/runs/run/steps/4/groups/"))
    assert "no token numbers" in found[group]["notes"][0]


def test_a_file_that_cannot_be_written_is_named(folder, tmp_path):
    library = Library(folder.path.parent)
    assert write_export(library, tmp_path / "r.html", "run").read_text().startswith("<!doctype html>")
    with pytest.raises(ValueError, match=r"no/r\.html.*name another file"):
        write_export(library, tmp_path / "no" / "r.html", "run")


def test_a_notebook_shows_a_folder_or_a_trainer(folder):
    class Trainer:
        run_folder = folder.path

    for what in (folder.path, str(folder.path), folder, Trainer()):
        shown = grpo.show(what, groups=1)._repr_html_()
        assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;') and 'sandbox="allow-scripts"' in shown
        assert shown.count("<") == 2  # all of the page is inside the attribute
    with pytest.raises(ValueError, match="takes a run folder"):
        grpo.show(3)
    assert folder_of(folder) == folder.path


def test_a_path_is_a_run_or_a_folder_of_runs(folder, tmp_path):
    assert library_of(folder.path)[1] == "run"
    assert library_of(folder.path.parent)[1] is None
    with pytest.raises(ValueError, match="not there"):
        library_of(tmp_path / "nothing")


def test_arrays_without_tokens_export_too(tmp_path):
    folder = make_run(tmp_path / "run", task="control")
    row = {"group": 0, "reward": 1.0, "advantage": 0.0, "status": "ok", "actions": [0, 1], "length": 2}
    add_samples(folder, 1, [{"row": n, **row} for n in range(2)], entropy=np.ones((2, 2), np.float16))
    found = content(export_html(Library(tmp_path), "run"))["responses"]
    assert found["/api/runs/run/steps/1/groups/0/tokens"]["rows"][0]["entropy"] == [1, 1]
