"""The site of the documentation: built without a warning, and links between its pages lead somewhere."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.test_docs import ROOT, public_names


class Page(HTMLParser):
    """The ids of a page, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids |= {value for name, value in attrs if name == "id" and value}
        self.links += [value for name, value in attrs if name in ("href", "src") and value]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "docs", str(tmp_path)]
    built = subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert built.returncode == 0, built.stdout
    pages = {path: Page(path.read_text()) for path in tmp_path.rglob("*.html")}
    documented = {found.rpartition(".")[2] for path, page in pages.items() if path.parent.name == "api" for found in page.ids}
    assert {name: where for name, where in public_names().items() if name not in documented} == {}
    lost = []
    for path, page in pages.items():
        for link in page.links:
            target, anchor = map(unquote, urldefrag(link))
            if "://" in link or link.startswith(("data:", "mailto:")):
                continue
            found = (path.parent / target.partition("?")[0]).resolve() if target else path
            if not found.is_file() or (anchor and anchor not in pages[found].ids):
                lost.append(f"{path.relative_to(tmp_path)}: {link}")
    assert lost == []
