"""The command: what it prints, what it refuses, what it opens."""

import pytest

from grpo.bandit import BanditConfig
from grpo.bandit import make_trainer as make_bandit
from grpo.cli import main
from grpo.view import launch, others
from tests.unit.view.folders import make_run, two_groups


@pytest.fixture
def root(tmp_path):
    two_groups(make_run(tmp_path / "runs" / "run"), 5)
    return tmp_path / "runs"


@pytest.fixture
def served(monkeypatch):
    """`view` with a server that ends at once, and the links that a browser was sent to."""
    opened = []
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: sockets[0].close())
    monkeypatch.setattr("webbrowser.open", opened.append)
    return opened


def at_a_screen(monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)


def test_a_browser_is_opened_at_the_run_where_there_is_a_screen(root, served, alone, monkeypatch, capsys):
    at_a_screen(monkeypatch)
    assert main(["view", str(root / "run")]) == 0
    (url,) = served
    assert url.startswith("http://127.0.0.1:") and url.endswith("/#/run/run")
    assert url in capsys.readouterr().out


def test_no_browser_where_none_is_wanted(root, served, monkeypatch, capsys):
    at_a_screen(monkeypatch)
    assert main(["view", str(root), "--no-browser"]) == 0
    assert served == [] and "ssh -L" not in capsys.readouterr().out


def test_over_ssh_the_line_for_a_tunnel_is_printed(root, served, alone, monkeypatch, capsys):
    at_a_screen(monkeypatch)
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 1 10.0.0.2 22")
    assert main(["view", str(root)]) == 0
    out = capsys.readouterr().out
    port = out.split("http://127.0.0.1:")[1].split("/")[0]
    assert served == [] and f"ssh -L {port}:127.0.0.1:{port} " in out


def test_every_start_on_another_interface_has_a_token_of_its_own(root, served, capsys):
    for _ in range(2):
        assert main(["view", str(root), "--host", "0.0.0.0", "--no-browser"]) == 0
    first, second = (
        line.partition("token=")[2].split()[0] for line in capsys.readouterr().out.splitlines() if "token=" in line
    )
    assert first != second and len(first) >= 32


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(others, "present", lambda: [])
    monkeypatch.setattr(others, "allowed", lambda: [])


def test_where_others_are_at_work_the_link_has_a_token(root, served, monkeypatch, capsys):
    """The loopback address belongs to everybody on the machine."""
    at_a_screen(monkeypatch)
    monkeypatch.setattr(others, "present", lambda: ["ada", "bob", "cleo", "dan"])
    assert main(["view", str(root / "run")]) == 0
    (url,), out = served, capsys.readouterr().out
    assert (
        "/login?token=" in url and url.endswith("#/run/run") and "Others share this machine (ada, bob, cleo, …)" in out
    )
    assert main(["view", str(root), "--no-token"]) == 0
    assert "token=" not in served[1]


def test_where_others_could_be_it_says_so(root, served, alone, monkeypatch, capsys):
    at_a_screen(monkeypatch)
    monkeypatch.setattr(others, "allowed", lambda: ["ada"])
    assert main(["view", str(root)]) == 0
    assert "token=" not in served[0] and "Other users of this machine (ada) can read along" in capsys.readouterr().out
    assert main(["view", str(root), "--token"]) == 0
    assert "token=" in served[1] and "Other users" not in capsys.readouterr().out


def test_alone_nothing_is_asked_or_said(root, served, alone, monkeypatch, capsys):
    at_a_screen(monkeypatch)
    assert main(["view", str(root)]) == 0
    assert "token" not in served[0] and capsys.readouterr().out.count("\n") == 1


def test_people_are_told_from_services(tmp_path, monkeypatch):
    import pwd

    monkeypatch.setattr("os.getuid", lambda: 1000)
    names = {0: "root", 33: "www", 1000: "me", 1001: "ada", 61200: "dynamic", 65534: "nobody"}
    entries = {uid: pwd.struct_passwd((name, "x", uid, uid, "", "/", "/bin/sh")) for uid, name in names.items()}
    monkeypatch.setattr("pwd.getpwuid", lambda uid: entries[uid])  # 100001 is a container's: nobody's name
    monkeypatch.setattr("pwd.getpwall", lambda: list(entries.values()))
    monkeypatch.setattr(others, "_owner", lambda path: int(path.name))
    for uid in [*names, 100001]:
        (tmp_path / str(uid)).touch()
    listed = tmp_path / "passwd"
    listed.write_text("root:x:0\nme:x:1000\n")
    assert others.present(tmp_path, listed) == ["ada"] and others.allowed() == ["ada"]
    listed.write_text("root:x:0\n")
    assert others.present(tmp_path, listed) == ["ada", "the accounts of your network"]


def test_a_taken_port_is_passed_over_unless_it_was_asked_for(root, served, alone, monkeypatch, capsys):
    with launch._listen("127.0.0.1", None) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(launch, "PORT", port)
        assert main(["view", str(root), "--no-browser"]) == 0
        assert f":{port}/" not in capsys.readouterr().out
        assert main(["view", str(root), "--no-browser", "--port", str(port)]) == 2
        assert "choose another --host or --port" in capsys.readouterr().err


def test_an_export_is_written_and_named(root, tmp_path, capsys):
    assert main(["view", str(root / "run"), "--export", str(tmp_path / "r.html"), "--groups", "1"]) == 0
    assert str(tmp_path / "r.html") in capsys.readouterr().out
    small = (tmp_path / "r.html").stat().st_size
    assert main(["view", str(root / "run"), "--export", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").stat().st_size > small


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["no-such-folder"], "no-such-folder is not there; name a run folder"),
        (["--export", "x.html", "--port", "80"], "--port means nothing with --export"),
        (["--export", "x.html", "--host", "::"], "--host means nothing with --export"),
        (["--export", "x.html", "--no-browser"], "--no-browser means nothing with --export"),
        (["--host", "0.0.0.0", "--no-token"], "leave --no-token out"),
        (["--export", "x.html", "--token"], "--token means nothing with --export"),
        (["--groups", "3"], "--groups is for --export"),
        (["runs/run", "--export", "x.html", "--groups", "0"], "groups are a number (12), or STEP/GROUP"),
        (["runs/run", "--export", "x.html", "--groups", "5/9"], "has no group 9"),
        (["--host", "no such host"], "choose another --host or --port"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(root, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(root.parent)
    assert main(["view", *flags]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--port", "0"], ["--port", "99999"], ["--port", "x"], ["--other"]])
def test_flags_that_are_none_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as error:
        main(["view", *flags])
    assert error.value.code == 2


def test_without_runs_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["view"]) == 2
    assert "runs is not there; train something first" in capsys.readouterr().err


def test_a_missing_package_is_named(root, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    assert main(["view", str(root)]) == 2
    assert "which the extra view brings; grpo doctor says how" in capsys.readouterr().err


def test_a_mistyped_run_is_answered_with_the_nearest(root, capsys):
    assert main(["view", str(root / "rum")]) == 2
    said = capsys.readouterr().err
    assert (
        f'{root / "rum"} is not there; name a run folder, or a folder of runs; did you mean "{root / "run"}"?' in said
    )


def test_a_trainer_that_left_nothing_says_how_it_is_kept():
    with pytest.raises(launch.Bad, match=r"has not trained into a folder yet: trainer.train\(…, folder='runs/mine'\)"):
        launch.show(make_bandit(BanditConfig()))
    with pytest.raises(launch.Bad, match="not int"):
        launch.show(3)
