"""html_page: stages of an explanation as one HTML page without references to other files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
body { font-family: sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222; background: #fff }
pre { background: #f5f5f5; padding: 0.8em; overflow-x: auto; line-height: 1.25 }
h1 { font-size: 1.5em; overflow-wrap: anywhere }
summary { overflow-wrap: anywhere; cursor: pointer; font-weight: bold; padding: 0.3em 0 }
"""


def html_page(title: str, summary: str, stages: Sequence[tuple[str, str]]) -> str:
    """Return a page that shows the summary, and each stage (title, text) when it is unfolded."""
    folded = "\n".join(
        f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>" for name, text in stages
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n<pre>{escape(summary)}</pre>\n"
        f"{folded}\n</body></html>\n"
    )
