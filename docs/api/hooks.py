"""For the site: what is made of the code when it is built, so that it cannot be older than the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looptim.base.markup import markdown_table
from looptim.recipe import Key, keys

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Each notebook also as a page, with what its cells showed when it was executed."""
    # A test reads this file where there is no mkdocs.
    from mkdocs.structure.files import File

    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        assert notebook.abs_src_path is not None
        text = "\n\n".join(part for part, _ in parts_of(Path(notebook.abs_src_path))) + "\n"
        files.append(File.generated(config, notebook.src_uri.replace(".ipynb", ".md"), content=text))
    return files


def parts_of(notebook: Path) -> list[tuple[str, str]]:
    """A notebook's cells and outputs as Markdown; of those that are HTML, a place for it, and the HTML itself."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append((source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```", ""))
        for output in cell.get("outputs", []):
            shown = output.get("data", {})
            if "text/html" in shown:
                parts.append((f'<div class="output" id="output{len(parts)}"></div>', "".join(shown["text/html"])))
            else:
                text = "".join(output.get("text", shown.get("text/plain", "")))
                parts.append((f"```text\n{text.rstrip()}\n```", ""))
    return parts


def on_page_content(html: str, page: Page, config: Any, **_: Any) -> str:
    """A notebook's page with what its cells showed, which Markdown would have changed."""
    notebook = Path(config["docs_dir"], page.file.src_uri).with_suffix(".ipynb")
    for place, shown in parts_of(notebook) if notebook.is_file() else []:
        if shown:
            html = html.replace(place, place.replace("></div>", f">{shown}</div>"))
    return html


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page with the table of all keys in its place, and its links to notebooks leading to their pages."""
    markdown = markdown.replace("(notebooks/paper.ipynb)", "(notebooks/paper.md)")
    return markdown.replace("<!-- every key -->", markdown_table(Key._fields, keys()))
