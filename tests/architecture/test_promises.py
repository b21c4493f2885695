"""The list of promises names tests that exist and protections that are there; docs/reliability.md is made from it."""

import ast
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "mutations.py"))
PROMISES = SCRIPT["promises"]()


def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_entry_is_whole():
    keys = {"area", "fault", "promise", "tests"}
    wrong = [p for p in PROMISES if {*p} - {"mutation"} != keys or p["area"] not in SCRIPT["AREAS"] or not p["tests"]]
    wrong += [p for p in PROMISES if "mutation" in p and {*p["mutation"]} != {"file", "find", "replace"}]
    assert wrong == []
    faults = [(p["area"], p["fault"], str(p.get("mutation"))) for p in PROMISES]
    assert len({*faults}) == len(faults), "an entry stands there twice"


def test_every_test_exists():
    found: dict[str, set[str]] = {}
    missing = []
    for test in {test for promise in PROMISES for test in promise["tests"]}:
        path, _, name = test.partition("::")
        if (ROOT / path).is_file():
            found.setdefault(path, functions_in(ROOT / path))
        name = name.rpartition("::")[2].partition("[")[0]
        if name not in found.get(path, ()):
            missing.append(test)
    assert missing == []


def test_every_protection_is_there_once():
    changes = [promise["mutation"] for promise in PROMISES if "mutation" in promise]
    counts = {(c["file"], c["find"]): (ROOT / c["file"]).read_text("utf-8").count(c["find"]) for c in changes}
    assert {change: count for change, count in counts.items() if count != 1} == {}
    assert [c for c in changes if c["find"] == c["replace"]] == []


def test_what_is_changed_still_compiles():
    """A mutation that is no Python would be noticed by every test."""
    for promise in PROMISES:
        if change := promise.get("mutation"):
            text = (ROOT / change["file"]).read_text("utf-8").replace(change["find"], change["replace"])
            compile(text, change["file"], "exec") if change["file"].endswith(".py") else None
