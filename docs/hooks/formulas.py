"""Turns the formulas of a page into MathML, which browsers show by themselves: no script, nothing to fetch."""

import html
import re

_MARKED = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_) -> str:
    """Replaces what pymdownx.arithmatex marked; called by MkDocs for every page."""
    # Imported here: only building the site needs it, not collecting tests.
    from latex2mathml.converter import convert

    def mathml(marked: re.Match[str]) -> str:
        display = "inline" if marked[2] == "(" else "block"
        return convert(html.unescape(marked[3]), display=display)

    return _MARKED.sub(mathml, content)
