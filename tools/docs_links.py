"""A hook of mkdocs: what pages of docs/ link to outside of docs/.

In the repository such a link leads to the file. On the site, a script gets a page with its source, a notebook one with
its cells and their outputs, and any other link becomes its text. A link whose text is the name of a page, which is
clear in a clone, gets the page's title from the navigation.
"""

from __future__ import annotations

import json
import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
PAGES = (".py", ".ipynb")  # of what there are pages
BY_NAME = re.compile(r"\[[\w./-]+\.md\]\(([\w./-]+\.md)(#[^)]*)?\)")
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> None:
    """Add a page for each script and notebook that a page links to."""
    for page in list(files.documentation_pages()):
        for _, up, path, _ in LINK.findall(page.content_string):
            if not leaves(page.src_uri, up):
                continue
            if not (ROOT / path).exists():
                raise FileNotFoundError(f"docs/{page.src_uri}: {path} does not exist")
            if path.endswith(PAGES) and files.get_file_from_path(f"{path}.md") is None:
                text = (ROOT / path).read_text()
                back = "../" * path.count("/")
                if path.endswith(".ipynb"):
                    content = f"[All notebooks]({back}notebooks.md)\n\n{page_of_notebook(text)}"
                else:
                    content = f"[All scripts]({back}getting-started.md#next)\n\n# {path}\n\n{fenced(text, 'python')}"
                file = File.generated(config, f"{path}.md", content=content)
                file.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(file)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links to scripts and notebooks lead to their pages, and replace other links out of docs/ by their text."""

    def rewritten(link: re.Match[str]) -> str:
        text, up, path, _ = link.groups()
        if not leaves(page.file.src_uri, up):
            return link[0]
        back = "../" * page.file.src_uri.count("/")
        return f"[{text}]({back}{path}.md)" if path.endswith(PAGES) else text

    def titled(link: re.Match[str]) -> str:
        uri = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link[1]))
        file = files.get_file_from_path(uri)
        if file is None or file.page is None or file.page.title is None:
            return link[0]
        return f"[{file.page.title}]({link[1]}{link[2] or ''})"

    return BY_NAME.sub(titled, LINK.sub(rewritten, markdown))


def leaves(page: str, up: str) -> bool:
    """Return whether a link that starts with `up` leaves docs/."""
    return up.count("../") > page.count("/")


def page_of_notebook(text: str) -> str:
    """Return the cells of a notebook and their outputs as Markdown."""
    parts: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else fenced(source, "python"))
        parts += [_shown(output) for output in cell.get("outputs", [])]
    return "\n\n".join(parts)


def _shown(output: dict[str, Any]) -> str:
    """Return an output as a notebook shows it: a picture, HTML, or else text."""
    if output["output_type"] == "stream":
        return fenced("".join(output["text"]), "text")
    data = {kind: "".join(lines) for kind, lines in output["data"].items()}
    if "image/png" in data:
        picture = data["image/png"].replace("\n", "")
        return f'<img alt="{escape(data["text/plain"])}" src="data:image/png;base64,{picture}">'
    return data["text/html"] if "text/html" in data else fenced(data["text/plain"], "text")


def fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
