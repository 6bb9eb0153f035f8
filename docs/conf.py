"""Settings of the site, which `make site` builds. The order of the pages is in index.md."""

from __future__ import annotations

import re
from importlib.metadata import version as installed
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
BLOB = "https://github.com/idemp/idemp/blob/main"

project = "idemp"
version = release = installed("idemp")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
html_theme = "furo"
html_title = f"idemp {version}"
html_show_copyright = False
html_copy_source = False  # the pages' sources are in the repository
html_static_path = ["site.css"]
html_css_files = ["site.css"]
pygments_style, pygments_dark_style = "friendly", "monokai"

myst_heading_anchors = 3  # links to headings, as GitHub makes them

default_role = "code"  # docstrings have code in single backticks
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["deltalake", "pandas", "pyarrow", "pyspark"]  # large, and imported for nothing else
napoleon_use_ivar = True
# Without a network there are no inventories of other projects, so only names of idemp have to lead somewhere.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!idemp\.).*"),
    ("py:.*", r"idemp\.(.*\.)?(_\w+|[A-Z][a-z]?|Decorator)"),  # private names and type variables
    ("py:.*", r".*[ |\[].*"),  # annotations that Sphinx does not take apart
    # Parts that a user gets from another object, and never names.
    ("py:.*", r"idemp\.(brokers|context\.BaseContext|handlers|prepared\.table|process|sql|testing\.m|worker).*"),
]


def outward(text: str, folder: Path) -> str:
    """Return a page's text whose relative links to files outside docs/ lead to the repository."""

    def link(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        if target.is_relative_to(DOCS):
            return f"](/{target.relative_to(DOCS)}"
        return f"]({BLOB}/{target.relative_to(DOCS.parent)}"

    return re.sub(r"\]\((?!https?:)([^)#]+)", link, text)


def page(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = outward(source[0], Path(app.env.doc2path(name)).parent)


def included(_app: Sphinx, path: Path, _name: str, source: list[str]) -> None:
    source[0] = outward(source[0], (DOCS / path).parent)


def signature(_app: Sphinx, _what: str, _name: str, obj: object, *_: object) -> tuple[str, None] | None:
    return ("", None) if getattr(obj, "_is_protocol", False) else None  # ports are not called


def sentence(_app: Sphinx, what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")  # otherwise napoleon takes the words before a colon for a type


def setup(app: Sphinx) -> None:
    """Have links of pages, and of README.md in index.md, lead to pages or to the repository; and clean the reference."""
    app.connect("source-read", page)
    app.connect("include-read", included)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", sentence, priority=400)  # before napoleon's, which has 500
