"""A reward for programs: the share of the row's tests that the last ```python block of a completion passes.

The column `tests` (or `test`, `test_list`, `assertions`) holds one of

- a list of assert statements, each with what it needs before it: `"assert add(1, 2) == 3"`
- one text of such statements, each assert a test; HumanEval's `check(candidate)`, with the column `entry_point`
- a list of `{"input": …, "output": …}`: what the program reads and must print (compared without trailing blanks), or
  `{"inputs": […], "outputs": […]}`; as data or as JSON text

Programs run in a sandbox (see `sandbox`) with the standard library and nothing else. All tests together have `seconds`.

**Who decides.** Models learn to pass tests by any means: `sys.exit(0)`, an `__eq__` that says yes, a patched `abs`, a
printed "ok". So the verdict is made out here. Of an assert, only the program's own part goes into the sandbox (of
`abs(area(2) - 12.566) < 1e-3`: `area(2)`), what comes back is read as a plain value, and comparison, arithmetic and the
common builtins around it are done here; the expected value never goes in. Forging an answer is then as hard as knowing
it. What printing programs print is compared here too.

Some tests cannot be kept apart like that: statements other than top-level asserts (loops, `with`, calls of a checker),
comparisons inside comprehensions and other functions (`all(a == b for …)`), and objects that are no plain values on
either side. They run inside, next to the program, and count when the answer carries a number that was drawn for this
very question. That stops exits, prints and replays; a program that patches builtins, gives objects which agree to
everything, or goes through the frames of its caller can still pass these. Prefer plain asserts.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import operator
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from grpo.language.rewards import sandbox
from grpo.language.rewards.literals import literal, spread

LONGEST = 100_000
"""Characters of a program; a longer one is wrong."""

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def extract(completion: str) -> str | None:
    """The last closed ```python (or ```py, or plain ```) block; the whole text where no fence is in it; else None."""
    if "```" not in completion:
        return completion if completion.strip() else None
    blocks = [
        text for language, text in _FENCE.findall(completion) if language.lower() in ("", "py", "python", "python3")
    ]
    return blocks[-1] if blocks else None


@dataclass(frozen=True)
class Code:
    """The share of tests that pass, from 0 to 1; no opinion where the row has no tests."""

    seconds: float = 10.0
    """For all tests of one completion; those not reached by then have failed."""
    __name__ = "code"

    def __call__(
        self,
        completion: str,
        tests: Any = None,
        test: Any = None,
        test_list: Any = None,
        assertions: Any = None,
        entry_point: str | None = None,
    ) -> float | None:
        """One sample."""
        given = next((column for column in (tests, test, test_list, assertions) if column), None)
        if given is None:
            return None
        sandbox.require()
        wanted = _read(given, entry_point)
        program = extract(completion)
        if program is None or len(program) > LONGEST:
            return 0.0
        with _Session(program, time.monotonic() + self.seconds) as session:
            return sum(test.passes(session) for test in wanted) / len(wanted)


code = Code()


# --- the tests of a row ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asserts:
    """Statements, of which asserts are judged here and others run inside."""

    statements: Sequence[ast.stmt]

    def passes(self, session: _Session) -> bool:
        try:
            for statement in self.statements:
                if isinstance(statement, ast.Assert):
                    if not _value(statement.test, session):
                        return False
                else:
                    session.run(ast.unparse(statement))
        except Exception:  # whatever a value from inside does to an operator out here, or the end of the program
            return False
        return True


@dataclass(frozen=True)
class _Printed:
    """Input and the output it must lead to."""

    given: str
    wanted: str

    def passes(self, session: _Session) -> bool:
        try:
            code, printed = sandbox.run(session.program, self.given, session.seconds_left())
        except sandbox.Stopped:
            return False
        return code == 0 and _lines(printed) == _lines(self.wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _read(given: Any, entry_point: str | None) -> list[_Asserts | _Printed]:
    """A column's tests. ValueError: which of them cannot be read, and why."""
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        try:
            given = json.loads(given)
        except ValueError:
            given = _literal_of(given)
    if isinstance(given, str):
        return _read_text(given, entry_point)
    if isinstance(given, dict) and "inputs" in given:
        given = [{"input": i, "output": o} for i, o in zip(given["inputs"], given["outputs"], strict=True)]
    elif isinstance(given, dict):
        given = [given]
    tests: list[_Asserts | _Printed] = []
    for at, test in enumerate(given):
        if isinstance(test, str):
            tests.append(_Asserts(_statements(test, f"tests[{at}]")))
        elif isinstance(test, dict) and {"input", "output"} <= set(test):
            tests.append(_Printed(_text(test["input"]), _text(test["output"])))
        else:
            raise ValueError(f"tests[{at}]: neither an assert statement nor {{'input', 'output'}}: {str(test)[:60]}")
    return tests


def _literal_of(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _text(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else str(lines)


def _statements(text: str, where: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{where}: not Python: {error}") from None


def _read_text(text: str, entry_point: str | None) -> list[_Asserts | _Printed]:
    """One text: a test ends with each assert; what follows the last one is a test of its own."""
    statements = list(_unwrapped(_statements(text, "tests"), entry_point))
    tests: list[_Asserts | _Printed] = []
    begin = 0
    for at, statement in enumerate(statements):
        if isinstance(statement, ast.Assert) or at == len(statements) - 1:
            tests.append(_Asserts(statements[begin : at + 1]))
            begin = at + 1
    if not tests:
        raise ValueError("tests: no statement in it")
    return tests


def _unwrapped(statements: Sequence[ast.stmt], entry_point: str | None) -> Iterator[ast.stmt]:
    """HumanEval's `def check(candidate): …` as the statements in it, so that its asserts are judged here."""
    for statement in statements:
        called = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(statement, ast.FunctionDef) and statement.name == "check" and len(statement.args.args) == 1:
            target = entry_point or _checked(statements)
            if target is None:
                raise ValueError("tests: check(candidate) needs the column entry_point with the function's name")
            yield from ast.parse(f"{statement.args.args[0].arg} = {target}").body
            yield from statement.body
        elif not (isinstance(called, ast.Call) and isinstance(called.func, ast.Name) and called.func.id == "check"):
            yield statement


def _checked(statements: Sequence[ast.stmt]) -> str | None:
    """The function's name in a call of check."""
    for statement in statements:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "check" and len(call.args) == 1:
            return ast.unparse(call.args[0])
    return None


# --- the judge, out here --------------------------------------------------------------------------------------------


class _Wrong(Exception):
    """The program raised, or gave what cannot be judged."""


class _NotPlain(_Wrong):
    """The program gave an object."""


_BUILTINS: dict[str, Callable[..., Any]] = {
    name: getattr(builtins, name)
    for name in (
        *(
            "abs",
            "all",
            "any",
            "bool",
            "dict",
            "float",
            "frozenset",
            "int",
            "len",
            "list",
            "max",
            "min",
            "round",
            "set",
        ),
        *("sorted", "str", "sum", "tuple"),
    )
} | {"math.isclose": math.isclose}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
# No * and no **, which could be made to fill this process's memory.
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CONTAINERS: dict[type[ast.expr], Callable[[Any], Any]] = {ast.List: list, ast.Tuple: tuple, ast.Set: set}


def _value(node: ast.expr, session: _Session) -> Any:
    """An expression of a test, worked out here but for what only the program knows."""
    if _is_literal(node):
        return ast.literal_eval(node)
    match node:
        case ast.BoolOp(op=ast.And()):
            return all(_value(part, session) for part in node.values)
        case ast.BoolOp():
            return any(_value(part, session) for part in node.values)
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, session)
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, session)
        case ast.Compare():
            return _compared(node, session)
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            left, right = _value(node.left, session), _value(node.right, session)
            numbers = all(isinstance(side, int | float | complex) for side in (left, right))
            if not numbers and not isinstance(node.op, ast.Add):  # "%9999999999d" % 1
                raise _Wrong(f"not plain numbers: {ast.unparse(node)[:60]}")
            return _ARITHMETIC[type(node.op)](left, right)
        case ast.Call() if _is_ours(node):
            return _called(node, session)
        case ast.List() | ast.Tuple() | ast.Set():
            return _CONTAINERS[type(node)](_value(part, session) for part in node.elts)
    return session.value(ast.unparse(node))


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _nothing_given(*nodes: ast.expr) -> bool:
    """Whether nothing in them could be an expected value: no literal stands there by itself."""
    return not any(_is_literal(node) or isinstance(node, ast.BinOp | ast.Compare) for node in nodes)


def _is_ours(call: ast.Call) -> bool:
    """A builtin around something of the program's. One around literals only is what is tested: `max(1, 2) == 2`."""
    name = ast.unparse(call.func)
    settings = {keyword.arg for keyword in call.keywords}
    return (
        name in _BUILTINS
        and not all(_is_literal(argument) for argument in call.args)
        and not any(isinstance(argument, ast.Starred | ast.GeneratorExp) for argument in call.args)
        and settings <= {"rel_tol", "abs_tol", "reverse", "ndigits", "default"}
    )


def _called(call: ast.Call, session: _Session) -> Any:
    try:
        arguments = [_value(argument, session) for argument in call.args]
    except _NotPlain:
        if _nothing_given(*call.args):  # list(generator(3)): made plain inside
            return session.value(ast.unparse(call))
        raise
    settings = {str(keyword.arg): _value(keyword.value, session) for keyword in call.keywords}
    if ast.unparse(call.func) in ("set", "frozenset", "dict"):
        arguments = [spread(argument) if isinstance(argument, list | tuple) else argument for argument in arguments]
    return _BUILTINS[ast.unparse(call.func)](*arguments, **settings)


def _compared(node: ast.Compare, session: _Session) -> bool:
    values = []
    for side in (node.left, *node.comparators):
        try:
            values.append(_value(side, session))
        except _NotPlain:
            values.append(_NotPlain)
    if all(value is _NotPlain for value in values):  # the program's objects among themselves
        return bool(session.value(ast.unparse(node)))
    if any(value is _NotPlain for value in values):
        raise _NotPlain(ast.unparse(node)[:60])
    return all(
        _COMPARE[type(compare)](one, other) for one, compare, other in zip(values, node.ops, values[1:], strict=False)
    )


# --- the program, inside --------------------------------------------------------------------------------------------

_SERVE = f"""
import json, os, sys, types
def text(value):
    if value is None or value is True or value is False:
        return repr(value)
    if isinstance(value, float) and value in (1e999, -1e999):
        return "1e999" if value > 0 else "-1e999"
    for kind in (int, float, complex, str, bytes):
        if isinstance(value, kind):
            return ascii(kind(value))
    if isinstance(value, dict):
        return "{{" + ", ".join(text(k) + ": " + text(v) for k, v in value.items()) + "}}"
    if isinstance(value, list):
        return "[" + ", ".join(map(text, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(text(v) + ", " for v in value) + ")"
    if isinstance(value, (set, frozenset)):
        return "{{" + ", ".join(map(text, value)) + "}}" if value else "set()"
    raise TypeError
def serve():
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", 0)
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 0), os.dup2(nowhere, 1)
    solution = sys.modules["solution"] = types.ModuleType("solution")
    with open({sandbox.PROGRAM!r}, encoding="utf-8") as file:
        source = file.read()
    exec(compile(source, "solution.py", "exec"), solution.__dict__)
    for line in requests:
        request = json.loads(line)
        try:
            if request["run"]:
                exec(compile(request["code"], "test.py", "exec"), solution.__dict__)
                reply = "done"
            else:
                value = eval(compile(request["code"], "test.py", "eval"), solution.__dict__)
                try:
                    reply = "value " + text(value)
                except TypeError:
                    reply = "object"
        except BaseException:
            reply = "error"
        replies.write((request["number"] + " " + reply + "\\n").encode())
serve()
"""


class _Session:
    """A program that has been loaded in a sandbox and answers questions; nothing starts before the first one."""

    def __init__(self, program: str, deadline: float) -> None:
        self.program, self._deadline = program, deadline
        self._box: sandbox.Box | None = None
        self._over = False

    def seconds_left(self) -> float:
        """Until all tests have to be done."""
        return max(0.0, self._deadline - time.monotonic())

    def value(self, expression: str) -> Any:
        """What an expression is in the program, when that is a plain value."""
        status, _, text = self._ask(expression, run=False).partition(" ")
        if status == "value":
            value = literal(text)
            if not self.seconds_left():
                raise sandbox.Stopped("out of time")
            return value
        raise _NotPlain(expression[:60]) if status == "object" else _Wrong(expression[:60])

    def run(self, statement: str) -> None:
        """Carry out a statement in the program."""
        if self._ask(statement, run=True) != "done":
            raise _Wrong(statement[:60])

    def _ask(self, code: str, run: bool) -> str:
        if self._over:
            raise sandbox.Stopped("it is over")
        number = secrets.token_hex(16)
        try:
            if self._box is None:
                self._box = sandbox.Box(_SERVE, self.program, self.seconds_left())
            reply = self._box.ask(json.dumps({"number": number, "code": code, "run": run}).encode())
        except sandbox.Stopped:
            self._over = True
            raise
        said, _, rest = reply.decode("utf-8", "replace").partition(" ")
        if said != number:  # a line that the program wrote by itself: nothing after it can be trusted
            self._over = True
            raise sandbox.Stopped("it spoke out of turn")
        return rest

    def __enter__(self) -> _Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._box is not None:
            self._box.close()
