"""Notebooks as pages: cells as they are stored, with what they printed and drew. Nothing is executed here."""

import json

from myst_parser.parsers.sphinx_ import MystParser


def page(told: str, name: str) -> str:
    """A notebook as Markdown; pictures travel inside of it."""
    parts = []
    for cell in json.loads(told)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [shown for output in cell["outputs"] if (shown := _output(output))]
    heading, _, rest = "\n\n".join(parts).partition("\n\n")
    note = f"*A notebook ({{download}}`{name}`), with what it printed and drew when it was stored.*"
    return f"{heading}\n\n{note}\n\n{rest}\n"


def _output(output: dict) -> str:
    """What a cell printed or drew."""
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output.get("data", {})
    if "image/png" in data:
        return f"![what the cell drew](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})"
    return f"```text\n{''.join(data['text/plain']).rstrip()}\n```" if "text/plain" in data else ""


class NotebookParser(MystParser):
    """Reads a notebook as the Markdown that it amounts to."""

    supported = ("notebook",)

    def parse(self, inputstring, document):
        name = document.settings.env.docname.rpartition("/")[2] + ".ipynb"
        super().parse(page(inputstring, name), document)


def setup(app):
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True}
