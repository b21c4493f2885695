"""One group: its tries side by side, every token's numbers, and the same prompt in other steps and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo.run.folder import FolderError, Row
from grpo.run.inside import Gone, open_inside
from grpo.view.files import npz_rows, shown, shown_all
from grpo.view.groups import Groups, media_of
from grpo.view.index import badges, key_text, length_of, reward_of
from grpo.view.objective import describe, held, kl_of, limits

LONGEST = 200_000
"""Characters of a text in one answer."""
LONGEST_TRACE = 2_000
MOST_TOKENS = 8_192
"""Of one try in one answer."""
MOST_CELLS = 1 << 18
"""Of an array in one answer."""
KNOWN = frozenset((
    "row", "group", "reward", "reward_parts", "rewards", "advantage", "status", "decisions", "teaching", "attempt",
    "length", "media", "data_row", "prompt", "completion", "stop", "tokens", "extras", "messages", "error", "traceback",
    "actions", "observations", "weights", "arm", "signal", "answer", "state", "action",
))  # fmt: skip
"""What has a place of its own; other keys of a row are shown as they are."""
ARRAYS = ("advantage", "old_logp", "logp", "ref_logp", "sampled_logp", "entropy", "ratio", "kl", "term",
          "penalty", "mismatch", "weight", "sampler")  # fmt: skip


def detail(groups: Groups, step: int, group: int) -> Row:
    """Everything about one group but its tokens."""
    run = groups.run
    index, place, rows = groups.rows(step, group)
    names, weights = _names(rows, run.rewards()[0]), run.rewards()[1]
    longest = min(max((_columns(row) for _, row in rows), default=0), MOST_CELLS // max(len(rows), 1))
    arrays, notes = _arrays(groups, step, [number for number, _ in rows], 0, longest)
    bounds = limits(run.recipe())
    samples = [_sample(groups, number, row, names, weights) for number, row in rows]
    if arrays is not None:
        for i, sample in enumerate(samples):
            sample["clipped"] = _clip_counts(arrays, i, bounds)
    if (count := len(index.members(place))) > len(rows):
        notes.append(f"{len(rows)} of {count} tries are shown")
    samples.sort(key=lambda sample: (sample["advantage"] is None, -(sample["advantage"] or 0.0), sample["row"]))
    return {
        "run": run.id,
        "step": step,
        "group": group,
        "task": run.task,
        "prompt": next((_cut(row["prompt"]) for _, row in rows if isinstance(row.get("prompt"), str)), None),
        "answer": next((_cut(row["answer"]) for _, row in rows if isinstance(row.get("answer"), str)), None),
        "prompt_key": key_text(int(index.groups_P["key"][place])),
        "mean": shown(index.groups_P["mean"][place]),
        "std": shown(index.groups_P["std"][place]),
        "badges": badges(int(index.groups_P["badges"][place])),
        "objective": describe(run.recipe()),
        "reward_names": names,
        "reward_weights": weights,
        "samples": samples,
        "arrays": sorted(arrays) if arrays is not None else [],
        **_beside(groups, step, place),
        "notes": notes,
    }


def _sample(groups: Groups, number: int, row: Row, names: Sequence[str], weights: Sequence[float] | None) -> Row:
    found: Row = {
        "row": number,
        "reward": shown(reward_of(row, weights)),
        "advantage": shown(row.get("advantage")),
        "status": row.get("status") if isinstance(row.get("status"), str) else "ok",
        "parts": _parts(row, names, weights),
        "length": length_of(row),
        "kind": "other",
        "clipped": None,
        "media": media_of(groups.run, row),
        "fields": {key: value for key, value in row.items() if key not in KNOWN},
    }
    if isinstance(text := row.get("completion"), str):
        found |= {"kind": "text", "completion": _cut(text)}
        found |= {"completion_cut": len(text)} if len(text) > LONGEST else {}
        found["token_count"] = len(row["tokens"]) if isinstance(row.get("tokens"), list) else 0
        if isinstance(row.get("messages"), list):
            said = [m for m in row["messages"] if isinstance(m, dict)]
            found["messages"] = [
                {"role": str(m.get("role"))[:100], "content": _cut(_plain(m.get("content")))} for m in said
            ]
    elif isinstance(row.get("actions"), list):
        found |= {"kind": "trace", "trace": _trace(row)}
    elif "arm" in row:
        found |= {"kind": "arm", "arm": row["arm"]}
    elif "state" in row and "action" in row:
        found |= {"kind": "pair", "state": _cut(_plain(row["state"])), "action": _cut(_plain(row["action"]))}
    for name in ("stop", "extras", "error", "traceback", "attempt", "data_row"):
        if row.get(name) is not None:
            found[name] = _cut(row[name]) if isinstance(row[name], str) else row[name]
    return found


def _parts(row: Row, names: Sequence[str], weights: Sequence[float] | None) -> list[Row]:
    """Each part of the reward with its weight."""
    values = row.get("reward_parts")
    if not isinstance(values, list):
        values = list(row["rewards"].values()) if isinstance(row.get("rewards"), dict) else []
    scales = weights if weights is not None and len(weights) == len(values) else [1.0] * len(values)
    labels = [*names, *(str(k) for k in range(len(names), len(values)))]
    return [
        {"name": label, "value": shown(value), "weight": shown(scale)}
        for label, value, scale in zip(labels, values, scales, strict=False)
    ]


def _names(rows: Sequence[tuple[int, Row]], default: Sequence[str]) -> list[str]:
    """Of the reward's parts, as the rows have them."""
    return next((list(row["rewards"]) for _, row in rows if isinstance(row.get("rewards"), dict)), list(default))


def _trace(row: Row) -> Row:
    """Actions, rewards and what else the room kept of each decision, thinned where there are very many."""
    length = length_of(row)
    stride = max(-(-length // LONGEST_TRACE), 1)
    series = {
        name: row[name] for name in ("actions", "rewards", "observations", "weights") if isinstance(row.get(name), list)
    }
    return {"length": length, "stride": stride, **{name: values[::stride] for name, values in series.items()}}


def _beside(groups: Groups, step: int, place: int) -> Row:
    """The groups before and after, running over into neighbour steps."""
    index = groups.index(step)
    found: Row = {}
    for name, at, edge in (("previous", place - 1, -1), ("next", place + 1, 0)):
        if 0 <= at < len(index):
            found[name] = {"step": step, "group": int(index.groups_P["group"][at])}
            continue
        other = groups.neighbours(step)[name]
        try:
            found[name] = (
                None if other is None else {"step": other, "group": int(groups.index(other).groups_P["group"][edge])}
            )
        except (FolderError, LookupError, IndexError):
            found[name] = None
    return found


# --- text and tokens ------------------------------------------------------------------------------------------------


def text(groups: Groups, step: int, group: int, number: int, begin: int, end: int) -> Row:
    """A part of a long completion."""
    row = dict(groups.rows(step, group)[2]).get(number)
    whole = row.get("completion") if row is not None else None
    if not isinstance(whole, str):
        raise LookupError(f"group {group} of step {step} has no completion in row {number}")
    end = min(end, begin + LONGEST, len(whole))
    return {"text": whole[begin:end], "from": begin, "to": max(end, begin), "total": len(whole)}


def tokens(groups: Groups, step: int, group: int, wanted: Sequence[int] | None, begin: int, end: int) -> Row:
    """Every number of every decision of some tries."""
    rows = dict(groups.rows(step, group)[2])
    chosen = [number for number in rows if wanted is None or number in wanted]
    if wanted is not None and len(chosen) < len(set(wanted)):
        raise LookupError(
            f"group {group} of step {step} has the rows {', '.join(map(str, rows))[:200]}, not all of those asked for"
        )
    end = min(end, begin + min(MOST_TOKENS, MOST_CELLS // max(len(chosen), 1)))
    arrays, notes = _arrays(groups, step, chosen, begin, end)
    recipe, found = groups.run.recipe(), []
    for i, number in enumerate(chosen):
        mine = None if arrays is None else {name: array[i] for name, array in arrays.items()}
        found.append({"row": number, **_tokens(rows[number], mine, begin, end, recipe)})
    longest = max((row["total"] for row in found), default=0)
    return {
        "from": begin,
        "to": max(min(end, longest), begin),
        "rows": found,
        "objective": describe(recipe),
        "notes": notes,
    }


def _tokens(row: Row, arrays: Mapping[str, np.ndarray] | None, begin: int, end: int, recipe: Row) -> Row:
    """One try's tokens from `begin` on, `arrays` beginning there; what older folders lack is computed."""
    words = row.get("tokens") if isinstance(row.get("tokens"), list) else None
    total = _columns(row)
    last = max(min(end, total), begin)
    found: Row = {"total": total, "tokens": None if words is None else [_plain(word) for word in words[begin:last]]}
    found |= dict.fromkeys(("mask", "gate", *ARRAYS, "clip"))
    if arrays is None:
        return found
    mine = {name: array[: last - begin] for name, array in arrays.items()}
    for name in ("mask", "gate"):
        if name in mine:
            found[name] = mine[name].astype(int).tolist()
    wide = {name: mine[name].astype(np.float32) for name in ARRAYS if name in mine}
    if "ratio" not in wide and {"logp", "old_logp"} <= wide.keys() and recipe.get("ratio", "token") == "token":
        wide["ratio"] = np.exp(np.clip(wide["logp"] - wide["old_logp"], -20, 20))
    if "kl" not in wide and {"logp", "ref_logp"} <= wide.keys():
        wide["kl"] = kl_of(wide["logp"], wide["ref_logp"], recipe)
    if "sampler" not in wide and {"old_logp", "sampled_logp"} <= wide.keys():
        wide["sampler"] = wide["old_logp"] - wide["sampled_logp"]
    if {"ratio", "advantage"} <= wide.keys():
        found["clip"] = held(wide["ratio"], wide["advantage"], *limits(recipe)).tolist()
    return found | {name: shown_all(values) for name, values in wide.items()}


def _columns(row: Row) -> int:
    """What the arrays have of a try: its tokens, also those that others said, or its decisions."""
    return len(row["tokens"]) if isinstance(row.get("tokens"), list) else length_of(row)


def _clip_counts(
    arrays: Mapping[str, np.ndarray], i: int, bounds: tuple[float | None, float | None]
) -> list[int] | None:
    """Decisions held at the lower and at the upper bound."""
    if bounds[0] is None or not {"ratio", "advantage", "mask"} <= arrays.keys():
        return None
    clip_T = held(arrays["ratio"][i].astype(np.float32), arrays["advantage"][i].astype(np.float32), *bounds)
    made_T = arrays["mask"][i].astype(bool)
    return [int((clip_T[made_T] == -1).sum()), int((clip_T[made_T] == 1).sum())]


def _arrays(
    groups: Groups, step: int, rows: Sequence[int], begin: int, end: int
) -> tuple[dict[str, np.ndarray] | None, list[str]]:
    """Per-decision arrays of some tries; None and a note where the file is missing or damaged."""
    path = f"samples/step-{step:08d}.npz"
    try:
        with open_inside(groups.run.root, f"{groups.run.path}/{path}") as file:
            found = npz_rows(file, rows, begin, end)
    except Gone:
        return None, [f"{path} is not there: no token numbers"]
    except FolderError as error:
        return None, [f"{path} {error}: no token numbers"]
    if "log_ratio" in found:  # kept so for its digits
        found["ratio"] = np.exp(np.clip(found.pop("log_ratio").astype(np.float32), -88.0, 88.0))
    return found, []


# --- one prompt through time ----------------------------------------------------------------------------------------


def through_time(several: Sequence[Groups], key: int, limit: int) -> Row:
    """The groups with one prompt, by run and step."""
    entries: list[Row] = []
    complete, scanned, of, prompt, answer = True, 0, 0, None, None
    for groups in several:
        places, whole, done, steps = groups.with_prompt(key)
        complete, scanned, of = complete and whole, scanned + done, of + steps
        for line in groups.lines(places[:limit]):
            try:
                _, _, rows = groups.rows(line["step"], line["group"])
            except (FolderError, LookupError):
                continue  # written anew or deleted meanwhile
            prompt = prompt or next(
                (_cut(row["prompt"]) for _, row in rows if isinstance(row.get("prompt"), str)), None
            )
            answer = answer or next(
                (_cut(row["answer"]) for _, row in rows if isinstance(row.get("answer"), str)), None
            )
            entries.append(_entry(groups, line, rows))
    told = {"prompt": prompt, "answer": answer}
    return told | {"entries": entries, "complete": complete, "scanned": scanned, "of": of, "notes": []}


def _entry(groups: Groups, line: Row, rows: Sequence[tuple[int, Row]]) -> Row:
    weights = groups.run.rewards()[1]
    samples = [
        {
            "row": number,
            "reward": shown(reward_of(row, weights)),
            "advantage": shown(row.get("advantage")),
            "status": row.get("status"),
            "completion": row["completion"][:20_000] if isinstance(row.get("completion"), str) else None,
            "length": length_of(row),
        }
        for number, row in rows
    ]
    samples.sort(key=lambda sample: (sample["reward"] is None, -(sample["reward"] or 0.0), sample["row"]))
    kept = ("step", "group", "mean", "std", "badges")
    return {
        "run": groups.run.id,
        "run_name": groups.run.path,
        **{name: line[name] for name in kept},
        "samples": samples,
    }


def _cut(text: str) -> str:
    return text[:LONGEST]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)
