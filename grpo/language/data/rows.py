"""Rows of a data set from wherever they are: a local file, a folder, the hub.

JSON and CSV are read here and not by `datasets`, so that whatever is wrong is named by file and line, and so that cells
of a CSV file stay the text they are.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from grpo.errors import ConfigError, install
from grpo.run.files import FolderError, parse_json
from grpo.run.inside import open_regular

Row = dict[str, Any]

MOST_LISTED = 20
"""Problems of one file that are told at a time."""
BY_DATASETS = {".parquet": "parquet"}
OURS = (".jsonl", ".json", ".csv")
LONGEST_CELL = 1 << 30
UNNAMED = "Unnamed: "
"""Before the number of a CSV column without a name, such as the index that pandas writes; pandas reads it so."""
BY_NUMBER = " row "
"""Between a file's name and a row's number, counted from 0 as everywhere; lines are counted from 1."""
EXAMPLE = '{"prompt": "2 + 2 = ?", "answer": "4"}'


class Rows(list[Row]):
    """Rows that know where they stand in their file."""

    def __init__(self, rows: Iterable[Row], origin: str, numbers: Sequence[int] | None = None, mark: str = ":") -> None:
        super().__init__(rows)
        self.origin, self._mark = origin, mark
        self._numbers = range(len(self)) if numbers is None else numbers

    def place(self, i: int) -> str:
        """Where row i stands: file:line, or the file and the row's number where rows are not lines."""
        return f"{self.origin}{self._mark}{self._numbers[i]}"

    def select(self, chosen: Sequence[int]) -> Rows:
        """Some of them, at the places they had."""
        return Rows([self[i] for i in chosen], self.origin, [self._numbers[i] for i in chosen], self._mark)


def load(name: str, config: str | None = None, split: str = "train") -> Any:
    """The rows of a local file, of a folder, or of a data set on the hub; `split` may hold slices (train[:10%])."""
    path = Path(name).expanduser()
    if config is not None and path.suffix in (*OURS, *BY_DATASETS):
        raise ConfigError(f"{name}: a file has no configurations; leave out dataset_config={config}")
    if path.suffix in OURS:
        return _cut(read_rows(path), split)
    if path.suffix in BY_DATASETS:
        return _loaded_file(path, split)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        saved = _datasets().load_from_disk(str(path))
        parts = saved if isinstance(saved, dict) else {"train": saved}
        chosen = [parts[part].select(numbers) for part, numbers in _numbers(name, split, parts)]
        return chosen[0] if len(chosen) == 1 else _datasets().concatenate_datasets(chosen)
    return _loaded(name, split, str(path) if path.is_dir() else name, config)


def read_rows(path: str | Path) -> Rows:
    """The rows of a .jsonl, .json, .parquet or .csv file; whatever is wrong is named by file, line and column."""
    path = Path(path)
    if path.suffix in BY_DATASETS:
        return Rows(_loaded_file(path, "train"), str(path), mark=BY_NUMBER)
    try:
        with open_regular(path) as file:
            data = file.read()
        text = data.decode("utf-8-sig")
    except FolderError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 at byte {error.start} of the file; save it as UTF-8") from None
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty; it takes one row a line, such as {EXAMPLE}")
    if path.suffix == ".csv":
        return _cells(text, path)
    rows = (_whole(text, path) if path.suffix == ".json" else None) or _lines(text, path)
    _one_type_a_column(rows)
    return rows


def _lines(text: str, path: Path) -> Rows:
    """A row a line."""
    rows, numbers, problems = [], [], []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold other line separators as text
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except json.JSONDecodeError as error:
            problems.append(f"{path}:{number}:{error.colno}: {error.msg}")
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
        else:
            if wrong := _wrong(row):
                problems.append(f"{path}:{number}: {wrong}")
            rows.append(row)
            numbers.append(number)
    _refuse(problems)
    return Rows(rows, str(path), numbers)


def _cells(text: str, path: Path) -> Rows:
    """A row a record of a CSV file, every cell as the text it is: 007, NA and null stay what they are."""
    rows: list[Row] = []
    numbers, problems, line = [], [], 0
    most = csv.field_size_limit(LONGEST_CELL)
    try:
        records = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = next(records)
        line = records.line_num
        names = [name or f"{UNNAMED}{i}" for i, name in enumerate(header)]
        # A comma may end the first line alone: what stands below it must be empty.
        fewest = max((i for i, name in enumerate(header, 1) if name), default=len(header))
        if len(set(names)) < len(names):
            raise ConfigError(
                f"{path}:1: the first line names the columns, each once; it reads {','.join(names)[:200]}"
            )
        for cells in records:
            begin, line = line + 1, records.line_num  # a quoted cell may hold line breaks
            if cells and (not fewest <= len(cells) <= len(names) or any(cells[fewest:])):
                problems.append(
                    f"{path}:{begin}: {len(cells)} cells for the {fewest} columns {', '.join(names[:fewest])}; a comma "
                    'inside a cell needs quotes around the cell: "a, b"'
                )
            if cells:
                rows.append(dict(zip(names, cells, strict=False)))
                numbers.append(begin)
    except csv.Error as error:
        raise ConfigError(
            f"{path}:{line + 1}: {error}; quotes inside a cell are doubled, and the cell is quoted"
        ) from None
    finally:
        csv.field_size_limit(most)
    _refuse(problems)
    return Rows(rows, str(path), numbers)


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        more = len(problems) - MOST_LISTED
        raise ConfigError("\n".join([*problems[:MOST_LISTED], *([f"… and {more} more lines"] if more > 0 else [])]))


def _whole(text: str, path: Path) -> Rows | None:
    """A list of rows, or an object that holds one; None: it is rather a row a line."""
    try:
        found = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return None
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: {error.msg}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if isinstance(found, dict):
        lists = [value for value in found.values() if _is_table(value)]
        found = lists[0] if len(lists) == 1 else [found]
    if not isinstance(found, list):
        raise ConfigError(f"{path}: {_kind(found)}, not a list of rows such as [{EXAMPLE}]")
    if not found:
        raise ConfigError(f"{path}: the list is empty; it takes rows such as {EXAMPLE}")
    rows = Rows(found, str(path), mark=BY_NUMBER)
    if problems := [f"{rows.place(i)}: {wrong}" for i, row in enumerate(rows) if (wrong := _wrong(row))]:
        raise ConfigError("\n".join(problems[:MOST_LISTED]))
    return rows


def _wrong(row: Any) -> str | None:
    """Why this cannot be a row."""
    if not isinstance(row, dict):
        return f"{_kind(row)}, not an object; a row is such as {EXAMPLE}"
    for name, value in row.items():
        try:
            (name + json.dumps(value, ensure_ascii=False)).encode()
        except UnicodeEncodeError:
            return f"{name!a} holds a lone surrogate (half a character, \\ud800 to \\udfff); repair the text"
    return None


def _one_type_a_column(rows: Rows) -> None:
    """A column holds one type in all rows; prompts may be text in some and messages in others."""
    first: dict[tuple[str, bool], tuple[str, int]] = {}
    for i, row in enumerate(rows):
        for name, value in row.items():
            if value is None:
                continue
            kind, (was, where) = _kind(value), first.setdefault((name, _is_conversation(value)), (_kind(value), i))
            if kind != was:
                raise ConfigError(
                    f"{rows.place(i)}: {name} is {kind}, but {was} in {rows.place(where)}; give the column one type"
                )


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, dict) and "role" in x for x in value)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and not _is_conversation(value)


def _kind(value: Any) -> str:
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null" if value is None else f"a {type(value).__name__}")


def _cut(rows: Rows, split: str) -> Rows:
    """The part of a file that `split` names; a file is one split, train."""
    if split == "train":
        return rows
    numbers = [i for _, part in _numbers(rows.origin, split, {"train": rows}) for i in part]
    return rows.select(numbers)


def _numbers(name: str, split: str, parts: dict[str, Any]) -> list[tuple[str, range]]:
    """Split and row numbers that `split` asks for, read the way `datasets` does."""
    try:
        wanted = _datasets().ReadInstruction.from_spec(split).to_absolute({part: len(x) for part, x in parts.items()})
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{name}: {error}") from None
    return [(one.splitname, range(len(parts[one.splitname]))[one.from_ : one.to]) for one in wanted]


def _loaded_file(path: Path, split: str) -> Any:
    try:
        open_regular(path).close()
    except FolderError as error:
        raise ConfigError(str(error)) from None
    return _loaded(str(path), split, BY_DATASETS[path.suffix], data_files=str(path))


def _loaded(name: str, split: str, *arguments: Any, **settings: Any) -> Any:
    """`datasets.load_dataset`, with its many errors told in one line."""
    datasets = _datasets()
    try:
        return datasets.load_dataset(*arguments, split=split, **settings)
    except Exception as error:  # of datasets, huggingface_hub, httpx, fsspec, pyarrow, pandas: no common family
        reason = _root(error)
        if _unreachable(error):
            reason = f"the hub cannot be reached ({reason}); go online, or give a local file (.jsonl, .parquet, …)"
        elif isinstance(error, datasets.exceptions.DatasetNotFoundError):
            reason = f"no such file, and no such data set on the hub ({reason})"
        raise ConfigError(f"{name}: {reason}") from error


def _unreachable(error: Exception) -> bool:
    """Whether it is the network that failed."""
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    unanswered = not packages.isdisjoint({"httpx", "requests"}) and getattr(error, "response", None) is None
    offline = type(error).__name__ in ("LocalEntryNotFoundError", "OfflineModeIsEnabled")
    return unanswered or offline or isinstance(error, ConnectionError | TimeoutError)


def _root(error: BaseException) -> str:
    """The first line of what is behind an error: `datasets` hides the cause."""
    while error.__cause__ is not None and type(error).__module__.startswith("datasets"):
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"this data set needs the package datasets: {install('language')}") from None
    return datasets
