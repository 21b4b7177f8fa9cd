"""Sphinx configuration of the documentation site: MyST Markdown with the furo theme. `make docs` builds it, strict."""

import re

from sphinx.application import Sphinx

project = "rolecall"
copyright = "the rolecall authors"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "rolecall"
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["images/*.mmd"]
myst_heading_anchors = 3
suppress_warnings: list[str] = []

_OUTSIDE = re.compile(r"\]\((\.\./(?:\.\./)*(?:benchmarks|deploy|rolecall|tests|tools|[A-Z]+\.\w+)[^)#]*)(?:#[^)]*)?\)")


def _link_repository_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Pages link repository files by relative path, as a code host shows them; the site offers those as downloads."""
    source[0] = _OUTSIDE.sub(r"](<path:\1>)", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _link_repository_files)
