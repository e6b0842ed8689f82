"""An extension of griffe, which reads the docstrings for the documentation site: their style as Markdown.

The docstrings have Google's sections, with three exceptions: doctests stand anywhere, `Raises:` is prose, and `Args:`
may end in a paragraph.
"""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import griffe

HEADING = re.compile(r"(Args|Raises|Returns|Yields|Example|Examples|Attributes):")
ENTRY = re.compile(r"[*\w]+(, [*\w]+)*: ")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """Return a docstring with doctests as code blocks, and prose of sections as paragraphs.

    >>> as_markdown("Sum.\\n\\nRaises:\\n    What x raises.")
    'Sum.\\n\\n**Raises:** What x raises.'
    """
    return "\n\n".join(filter(None, map(paragraph, re.split(r"\n\s*\n", docstring.strip("\n")))))


def paragraph(text: str) -> str:
    heading, _, rest = text.partition("\n")
    found = HEADING.fullmatch(heading)
    body = dedent(rest if found else text)
    if body.startswith(">>>"):
        return f"```pycon\n{body}\n```"
    if not found:  # what is indented here ends a section
        return body if text.startswith(" ") and not ENTRY.match(body) else text
    if found[1] in ("Raises", "Returns", "Yields") and not ENTRY.match(body):
        return f"**{found[0]}** {body}"
    return text
