"""How large and how entangled the package is, counted over its syntax tree; each count has a limit."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [path.relative_to(ROOT) for path in sorted((ROOT / "grpo").rglob("*.py"))]

MOST = {
    "modules that import each other": 0,
    "private names of another module": 0,
    "attributes of our own objects looked for by name": 10,
}
LINES_OF_A_FILE = 450
LINES_OF_A_FUNCTION = 60

LONG_FILES = {
    "grpo/recipes.py": "a table: a row a variant",
    "grpo/language/engines/cuda_graphs/kernels.py": "kernels",
}
LONG_FUNCTIONS: dict[str, str] = {}
"""With the reason. A Triton kernel needs none."""

FOREIGN = {
    "arrays of any library": ["array.shape", "array.detach", "inputs.shape", "first.cat", "value.dtype", "value.item"],
    "an enumeration's member or a plain word": ["value.value", "mode.name"],
    "a factory, function, network or environment of the user's": [
        *("self.env.name", "make.name", "network.layout", "given.forward", "given.parameters"),
        "talk.environment.close",
    ],
    "what somebody handed over, checked against a Protocol": ["thing.*", "source.collect"],
    "simulators and Gymnasium's environments": [
        *("env.model", "env.ale", "env.get_state", "env.set_state", "env.data", "env.spec", "env.*", "inner.*"),
        "there.*",
    ],
    "spaces of gymnax": ["theirs.n", "theirs.low"],
    "data sets": ["rows.origin", "rows.map", "rows.features"],
    "images of Pillow": ["given.convert"],
    "transformers' callbacks and trackers' modules": ["callback.*", "tracker.run"],
    "nodes of a program": ["tree.args"],
    "transformers' and PEFT's modules": [
        *("model.generate", "model.config", "getattr(engine, 'model', None).config", "module.weight", "module.eps"),
        *("causal.model", "attention.q_norm", "attention.scaling", "head.weight", "layers[-1].*", "model.peft_config"),
        *("config.quantization_config", "config.architectures"),
    ],
    "vLLM's head, which carries a mark of ours": ["head.grpo_hook", "head.head_dtype"],
    "errors of libraries": ["error.reason", "error.response"],
    "modules and the names in them": ["module.*", "builtins.*"],
}
"""Receivers that are not ours although a class of ours has an attribute of that name. `*`: a name that is computed."""
KEPT = {
    "self._llm": "a constructor that failed half way is closed, too",
    "call.function.runs_here": "a function of the user's, or a reward model of ours",
}
"""Lookups on our own objects that stay, with the reason; they count."""
TORCH = {"_parameters"}
"""Private names of torch's modules that a class of ours happens to have as well."""


@cache
def trees() -> dict[Path, ast.Module]:
    """Read by the tests, not by whoever only looks for them."""
    return {path: ast.parse((ROOT / path).read_text("utf-8")) for path in FILES}


def name_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def walked(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs: what stands under `if TYPE_CHECKING` does not."""
    waiting = [tree]
    while waiting:
        yield (node := waiting.pop())
        children = ast.iter_child_nodes(node)
        waiting += [c for c in children if not (isinstance(c, ast.If) and "TYPE_CHECKING" in ast.unparse(c.test))]


MODULES = {name_of(path) for path in FILES}


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules of the package that this one imports, also inside functions; a name is its module's."""
    for node in walked(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            wholes = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (whole if whole in MODULES else str(node.module) for whole in wholes)


def test_no_two_modules_import_each_other():
    imports = {name_of(path): set(imported(tree)) for path, tree in trees().items()}
    mutual = sorted({tuple(sorted((a, b))) for a in imports for b in imports[a] if a != b and a in imports[b]})
    assert len(mutual) <= MOST["modules that import each other"], mutual


def attributes(tree: ast.AST) -> set[str]:
    """What the classes and functions of a module define: methods, fields, what is assigned to an attribute."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def test_private_names_stay_in_their_module():
    """Imported, or reached through another object: a `_name` that only another module of ours defines."""
    defined = {path: attributes(tree) for path, tree in trees().items()}
    ours = set().union(*defined.values())
    found = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grpo"):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and node.attr in ours and node.attr not in defined[path]:
                inherited = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                names = [] if inherited else [node.attr]
            else:
                continue
            private = [name for name in names if name[0] == "_" and name[:2] != "__" and name not in TORCH]
            found += [f"{path}:{node.lineno} {name}" for name in private]
    assert len(found) <= MOST["private names of another module"], found


def looked_for(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Line and `receiver.name` of each getattr, hasattr and setattr for something that may be ours.

    Not counted: names that no class here defines, `__names__` of Python, and reading a field whose name is data
    (`getattr(config, name)` without a default): then the name is known to be there.
    """
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id not in ("getattr", "hasattr", "setattr", "delattr"):
            continue
        receiver, name = node.args[:2]
        if isinstance(name, ast.Constant):
            if name.value in ours and not name.value.startswith("__"):
                yield node.lineno, f"{ast.unparse(receiver)}.{name.value}"
        elif node.func.id != "getattr" or len(node.args) > 2:
            yield node.lineno, f"{ast.unparse(receiver)}.*"


def test_our_own_objects_say_what_they_can_do():
    """A capability is a Protocol of `grpo.capabilities`, asked for by isinstance: a typing error is then no silence."""
    ours = set()
    for tree in trees().values():
        ours |= set().union(*(attributes(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)), set())
    foreign = {entry for entries in FOREIGN.values() for entry in entries}
    found = defaultdict(list)
    for path, tree in trees().items():
        for line, what in looked_for(tree, ours):
            if what not in foreign:
                found[what].append(f"{path}:{line}")
    places = sum(map(len, found.values()))
    assert places <= MOST["attributes of our own objects looked for by name"], dict(found)
    assert {*KEPT} == {*found}, "each has its reason in KEPT, and is there"


def test_files_are_short():
    lines = {str(path): len((ROOT / path).read_text("utf-8").splitlines()) for path in FILES}
    long = {path: count for path, count in lines.items() if count > LINES_OF_A_FILE}
    assert {*long} <= {*LONG_FILES}, {path: count for path, count in long.items() if path not in LONG_FILES}
    assert {*LONG_FILES} <= {*long}, "short now: take it out of LONG_FILES"


def test_functions_are_short():
    """Triton's kernels are not: they are one piece of arithmetic each."""
    long = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if any("triton" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            if (count := (node.end_lineno or node.lineno) - node.lineno + 1) > LINES_OF_A_FUNCTION:
                long[f"{path} {node.name}"] = count
    assert {*long} <= {*LONG_FUNCTIONS}, {name: count for name, count in long.items() if name not in LONG_FUNCTIONS}
    assert {*LONG_FUNCTIONS} <= {*long}, "short now: take it out of LONG_FUNCTIONS"


def test_the_counts_find_what_they_count():
    tree = ast.parse("getattr(a, 'go')\nhasattr(a, 'no')\ngetattr(a, name)\ngetattr(a, name, None)\nx.__len__")
    assert list(looked_for(tree, {"go"})) == [(1, "a.go"), (4, "a.*")]
    assert list(imported(ast.parse("if TYPE_CHECKING:\n    import grpo.cli\nfrom grpo.core import kl"))) == [
        "grpo.core.kl"
    ]
    assert attributes(ast.parse("class A:\n    x: int\n    def f(self):\n        self._y = 1")) == {"A", "x", "f", "_y"}
