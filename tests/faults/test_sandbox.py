"""Whatever a program does, it ends as wrong, costs seconds, and leaves no trace."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo.config import ConfigError
from grpo.language.rewards import sandbox
from grpo.language.rewards.code import Code
from grpo.workers import Pool

REASON = sandbox.self_test() or ""
pytestmark = pytest.mark.skipif(bool(REASON) and "does not hold" not in REASON, reason=REASON)

ASSERTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
PRINTS = [{"input": "1 2\n", "output": "3\n"}]


def judge(program, tests=ASSERTS, seconds=30.0):
    return Code(seconds)(f"Like this:\n```python\n{program}\n```\n", tests=tests)


def test_the_sandbox_holds():
    assert sandbox.self_test() is None


# --- programs that mean well ----------------------------------------------------------------------------------------


def test_right_programs_are_right():
    assert judge("def add(a, b):\n    return a + b") == 1.0
    assert judge("print(sum(map(int, input().split())))", PRINTS) == 1.0


def test_the_reward_is_the_share_of_tests_that_pass():
    assert judge("def add(a, b):\n    return 3") == 0.5
    assert judge("def add(a, b):\n    return [][0] if a == 2 else 3") == 0.5
    assert judge("print(input())", [*PRINTS, {"input": "3\n", "output": "3"}]) == 0.5


GENEROUS = """
import asyncio, dataclasses, json, threading
from collections import Counter

@dataclasses.dataclass
class Point:
    x: int = 1

class Stack(list):
    push = list.append

def count(text): return Counter(text)
def up_to(n): yield from range(n)
def area(r): return 3.14159 * r * r
def nothing(): print("noise"); return None
def odd(): return "é\\n\\0"
def infinite(): return float("inf")
def raises(): raise ValueError
async def later(): return 5
def wait(): return asyncio.run(later())
def threaded():
    found = []
    thread = threading.Thread(target=found.append, args=(1,))
    thread.start(); thread.join()
    return found
def scratch():
    with open("notes", "w") as file: file.write("x")
    with open("notes") as file: return file.read()
"""


ORDINARY = [
    "assert Point().x == 1",
    "assert Point(2) == Point(2)",
    "assert not Point(2) == Point(3)",
    "s = Stack()\ns.push(4)\nassert s.pop() == 4",
    "assert count('aab') == {'a': 2, 'b': 1}",
    "assert list(up_to(3)) == [0, 1, 2]",
    "assert sorted(up_to(3), reverse=True) == [2, 1, 0]",
    "assert len(list(up_to(3))) == 3 and sum(up_to(3)) == 3",
    "assert abs(area(2) - 12.566) < 1e-3",
    "import math\nassert math.isclose(area(2), 12.56636)",
    "assert 12 < area(2) < 13",
    "assert round(area(2), 1) == 12.6",
    "assert nothing() is None, 'a message'",
    "assert odd() == 'é\\n\\0'",
    "assert odd() + 'x' == 'é\\n\\0x'",
    "assert infinite() > 10**100",
    "assert 'a' in count('aab')",
    "assert (area(0), nothing()) == (0.0, None)",
    "assert wait() == 5",
    "assert threaded() == [1]",
    "assert scratch() == 'x'",
    "for n in range(3):\n    assert len(list(up_to(n))) == n",
    "try:\n    raises()\nexcept ValueError:\n    pass\nelse:\n    assert False",
]


def test_ordinary_tests_mean_what_they_say():
    assert judge(GENEROUS, ORDINARY) == 1.0
    assert judge(GENEROUS.replace("def ", "def not_").replace("class ", "class Not"), ORDINARY) == 0.0


def test_a_check_is_taken_apart():
    check = "def check(candidate):\n    assert candidate(2) > 12\n    assert candidate(2) > 13\n"
    assert judge(GENEROUS, check + "check(area)") == 0.5
    assert Code(30.0)(f"```python\n{GENEROUS}\n```", test=check, entry_point="area") == 0.5


# --- programs that do not ------------------------------------------------------------------------------------------

HOME = str(Path.home())
ESCAPES = {
    "exit": "import sys; sys.exit(0)",
    "exit at once": "import os; os._exit(0)",
    "exit in the function": "def add(a, b):\n    import os\n    os._exit(0)",
    "quit in the function": "def add(a, b): raise SystemExit(0)",
    "agree to everything": """
class Yes:
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = lambda *_: True
    __sub__ = __rsub__ = __abs__ = __add__ = __radd__ = lambda self, *_: self
def add(a, b): return Yes()""",
    "an int that agrees": """
class Yes(int):
    __eq__ = lambda *_: True
    __repr__ = __str__ = lambda _: '3 if True else 4'
def add(a, b): return Yes(9)""",
    "patch the builtins": """
import builtins
for name in ('abs', 'round', 'sorted', 'repr', 'ascii', 'len', 'compile', 'isinstance', 'eval', 'exec'):
    setattr(builtins, name, lambda *_, **__: True)
def add(a, b): return 9""",
    "patch the assertion": "import builtins; builtins.AssertionError = ValueError\ndef add(a, b): return 9",
    "patch json and the streams": """
import json, os, sys
json.loads = lambda line: {'number': '', 'code': '3', 'run': False}
os.write(1, b'done\\n' * 100)
sys.stdout = sys.__stdout__ = open(1, 'w')
print('value 3')""",
    "answer before being asked": """
import os
for descriptor in range(64):
    try:
        os.write(descriptor, b'value 3\\ndone\\nok\\n1.0\\n')
    except OSError:
        pass
def add(a, b): return 9""",
    "go through the frames": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for name, value in list(frame.f_locals.items()):
            if name == 'request':
                value['code'] = '3'; value['run'] = True
        frame = frame.f_back
    return 9""",
    "kill the parent": """
import os, signal
for pid in (os.getppid(), 1, -1, 0):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass""",
    "loop": "while True:\n    pass",
    "loop deaf to signals": """
import signal
for number in range(1, 64):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass""",
    "sleep with closed pipes": "import os, time\nos.closerange(0, 64)\ntime.sleep(1000)",
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "fork bomb that retries": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "thread bomb": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(1000,)).start()",
    "ten gigabytes": "x = bytearray(10 << 30)",
    "ten gigabytes, bit by bit": "x = []\nwhile True:\n    x.append(bytearray(1 << 20))",
    "ten gigabytes of output": "import os\nwhile True:\n    os.write(1, b'x' * 65536)\n    print('x' * 65536)",
    "ten gigabytes returned": "def add(a, b): return 'x' * (100 << 20)",
    "ten gigabytes of files": """
for number in range(10000):
    with open(f'/tmp/{number}', 'wb') as file:
        file.write(b'x' * (10 << 20))""",
    "an endless structure": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "deep nesting": "def add(a, b):\n    x = []\n    for _ in range(900): x = [x]\n    return x",
    "a huge number": "def add(a, b): return 10 ** 4000 * 10 ** 4000",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "not Python": "def add(a, b) return a + b",
    "a NUL": "def add(a, b): return 9\0",
    "too long": "#" * 200_000,
}


@pytest.fixture(scope="module")
def verdicts():
    """Two at a time, in killable processes, as in training."""
    with Pool(escape, workers=2, timeout=120.0) as pool:
        return dict(zip(ESCAPES, pool.map(ESCAPES), strict=True))


def escape(what):
    """Also as a program that is judged by what it prints."""
    return [judge(ESCAPES[what], tests, seconds=1.0) for tests in (ASSERTS, PRINTS)]


@pytest.mark.parametrize("what", ESCAPES)
def test_ends_as_wrong(what, verdicts):
    assert verdicts[what].error is None
    assert verdicts[what].value == [0.0, 0.0]


@pytest.mark.parametrize(
    "test",
    [
        "assert abs(add(1, 2) - 3) < 1e-6",
        "assert math.isclose(add(1, 2), 3)",
        "assert add(1, 2) in [3]",
        "assert 3 == add(1, 2)",
    ],
)
def test_neither_patched_functions_nor_odd_objects_help(test):
    assert judge(ESCAPES["agree to everything"] + "\nimport math\nabs = math.isclose = lambda *_: True", [test]) == 0.0
    assert judge(ESCAPES["patch the builtins"] + "\nimport math\nabs = math.isclose = lambda *_: 0", [test]) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        ESCAPES["exit"],
        ESCAPES["exit at once"],
        ESCAPES["answer before being asked"],
        "def add(a, b): raise SystemExit(0)",
    ],
)
def test_tests_that_run_inside_need_more_than_an_exit_or_a_print(program):
    assert judge(program, ["for n in range(3):\n    assert add(n, n) == 2 * n"]) == 0.0


def test_the_expected_value_never_goes_in():
    """A program that looks at everything it can reach finds the question, not the answer."""
    program = """
import sys
def add(a, b):
    frame, seen = sys._getframe(), ''
    while frame:
        seen += repr([value for name, value in frame.f_locals.items() if name != 'seen'])
        frame = frame.f_back
    return ['add(1, 2)' in seen, str(314158 + a) in seen]"""
    assert judge(program, ["assert add(1, 2) == [True, False] or add(1, 2) == 314159"]) == 1.0


# --- what it can reach ----------------------------------------------------------------------------------------------


def printed(program, data=""):
    code, text = sandbox.run(program, data, 60.0)
    assert code == 0, text
    return text.strip()


def test_the_callers_files_are_not_there(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    program = "import os\nprint([p for p in input().split('|') if os.path.exists(p)])"
    places = [secret, __file__, Path.cwd(), pytest.__file__, HOME + "/.ssh", HOME + "/.bashrc"]
    places += ["/etc/passwd", "/proc", "/sys", "/bin/sh", "/usr/share"]
    assert printed(program, "|".join(map(str, places)) + "\n") == "[]"
    walk = """
import os
for _, folders, files in os.walk('/'):
    print(*files)
    folders[:] = set(folders) - {'usr', 'lib'}"""
    known = {"program.py", "ld.so.cache", "null", "urandom", Path(sys.executable).resolve().name}
    assert set(printed(walk).split()) <= known


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("TOKEN", "a-planted-secret")
    found = printed("import os\nprint(dict(os.environ))\nprint(os.path.exists('/proc/1/environ'))")
    assert "a-planted-secret" not in found and "HOME" not in found and found.endswith("False")


def test_nothing_can_be_written_but_a_little_in_tmp(tmp_path):
    program = """
import os
for place in ('/', '/usr/lib', '/box', '/root', '/dev', '/etc', os.path.dirname(os.__file__), input()):
    try:
        with open(os.path.join(place, 'written'), 'w') as file:
            file.write('x')
    except OSError:
        continue
    print(place)
"""
    assert printed(program, f"{tmp_path}\n") == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 22))",
        "import urllib.request; urllib.request.urlopen('http://example.com')",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import subprocess; subprocess.run(['/bin/sh', '-c', 'true'])",
        "import os; os.fork()",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        "import os; os.setuid(0)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
        "import ctypes; assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
        "import ctypes; assert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0",
        "import ctypes; assert ctypes.CDLL(None).semget(0, 1, 0o1600) >= 0",
        "import ctypes; assert ctypes.CDLL(None).msgget(0, 0o1600) >= 0",
        "import ctypes; assert ctypes.CDLL(None).mq_open(b'/queue', 0o102, 0o600, None) >= 0",
        "import os; os.memfd_create('x')",
        "import numpy",
        "import grpo",
    ],
)
def test_is_refused(attempt):
    assert sandbox.run(attempt, seconds=60.0)[0] != 0


@pytest.mark.parametrize(
    "make", ["os.close(os.open(str(n), os.O_CREAT))", "os.mkdir(str(n))", "os.symlink('x', str(n))"]
)
def test_files_are_counted(make):
    """A file without a byte in it is memory of the host, of which the size of /tmp says nothing."""
    program = f"import os\nfor n in range(10**7):\n    {make}\n    n % 100 or print(n, flush=True)"
    with sandbox.Box(sandbox.RUN, program, 60.0) as box:
        with pytest.raises(sandbox.Stopped, match="too many files"):
            box.finish(b"")
        made = int(box.printed.split()[-1])
    assert made < 100_000


def test_no_box_without_a_count_of_its_files(monkeypatch):
    monkeypatch.setattr("os.statvfs", lambda path: (_ for _ in ()).throw(PermissionError(path)))
    assert "files cannot be counted" in sandbox.self_test.__wrapped__()


COLLIDING = "[i * (2**61 - 1) for i in range(5000)]"


@pytest.mark.parametrize(
    ("value", "test"),
    [
        (f"dict.fromkeys({COLLIDING})", "assert add(1, 2) == {1: 2}"),
        (f"[set({COLLIDING})]", "assert add(1, 2) == [{1}]"),
        (COLLIDING, "assert len(set(add(1, 2))) == 5000"),
        (COLLIDING, "assert sorted(frozenset(add(1, 2))) == [1]"),
    ],
)
def test_keys_whose_hashes_collide_are_not_put_together_out_here(value, test, monkeypatch):
    """The sandbox ends with its time; what is built of its answer here would take as long as the program likes."""
    monkeypatch.setattr("grpo.language.rewards.literals.MOST_ALIKE", 4999)
    assert judge(f"def add(a, b):\n    return {value}", [test]) == 0.0
    if "len" in test:
        monkeypatch.setattr("grpo.language.rewards.literals.MOST_ALIKE", 5001)
        assert judge(f"def add(a, b):\n    return {value}", [test]) == 1.0


def test_ordinary_sets_and_dicts_come_back_as_they_are():
    value = "{(-1, 'a'): {1.5, -2, None}, b'x': [set(), {}, ()], True: 2 - 3j}"
    assert judge(f"def add(a, b):\n    return {value}", [f"assert add(1, 2) == {value}"]) == 1.0
    assert judge("def add(a, b):\n    return {i: -i for i in range(9000)}", ["assert len(add(1, 2)) == 9000"]) == 1.0


def test_nothing_outlives_its_caller(tmp_path):
    """Killed in the middle, without a chance to clean up."""
    script = tmp_path / "script.py"
    script.write_text(
        "from grpo.language.rewards.sandbox import RUN, Box\n"
        "box = Box(RUN, 'import time; print(1, flush=True); time.sleep(1000)', 600.0)\n"
        "box.ask(b'')\n"
        "print(box._process.pid, flush=True)\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, env=environment, timeout=120)
    for _ in range(600):
        try:
            status = Path(f"/proc/{int(ended.stdout)}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        if status.rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the sandbox is still there")


def test_no_sandbox_no_run(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    sandbox.self_test.cache_clear()
    try:
        assert "apt install bubblewrap" in sandbox.self_test()
        with pytest.raises(ConfigError, match="apt install bubblewrap"):
            judge("def add(a, b): return a + b")
    finally:
        sandbox.self_test.cache_clear()
