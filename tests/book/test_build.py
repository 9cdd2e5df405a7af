"""Build: the site is made without a warning, offline, from what execute wrote."""

import shutil
import sys
from pathlib import Path

import pytest

import littlelm_core
from littlelm_core.book import BookError, build
from littlelm_core.book.build import complaints, foreign_loads

pytest.importorskip("jupyter_book", reason="the book extra brings it")

REPOSITORY = Path(littlelm_core.__file__).parent.parent


@pytest.fixture
def site(book):
    """The small book with the course's own configuration and pages around it."""
    chapters = REPOSITORY / "chapters"
    shutil.copy(REPOSITORY / "_config.yml", book.root)
    shutil.copytree(chapters / "_static", book.root / "chapters" / "_static")
    for name in ("references.bib", "references.md"):
        shutil.copy(chapters / name, book.root / "chapters")
    toc = book.root / "_toc.yml"
    toc.write_text(toc.read_text() + "- file: chapters/references\n")
    (book.root / "README.md").write_text("# Not a page of the site\n")
    return book


def test_a_site_is_built_from_the_outputs_alone(site):
    # Had the build run the chapter, its output would be 84.
    path = site.second.with_suffix(".ipynb")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("of doubling 21 is 42", "of doubling 21 is 4711"))
    said = []
    first = build(root=site.root, echo=said.append)
    html = site.root / "_build" / "html"
    assert first == html / "chapters" / "00_doubling.html"
    assert "pages in" in said[0]
    page = (html / "chapters" / "01_twice.html").read_text(encoding="utf-8")
    assert "doubling 21 is 4711" in page
    assert 'alt="A rising line."' in page  # the figures' alt text
    assert "Fig. 4" in page  # numbered through the book, and referred to
    assert "_static/mathjax/tex-svg-full.js" in page
    assert (html / "_static" / "mathjax" / "tex-svg-full.js").exists()
    assert (html / "_sources" / "chapters" / "01_twice.ipynb").exists()
    assert "_sources/chapters/01_twice.ipynb" in page  # the download button
    assert not (html / "README.html").exists()
    for word in ("thebe", "binder", "colab"):
        assert word not in page.lower()


def test_without_its_extra_it_says_so_in_one_line(site, monkeypatch):
    (site.root / "_build").mkdir(exist_ok=True)
    monkeypatch.setitem(sys.modules, "jupyter_book", None)
    said, words = [], r"jupyter-book is missing.*'\.\[book\]'"
    with pytest.raises(BookError, match=words) as error:
        build(root=site.root, echo=said.append)
    assert "\n" not in str(error.value)
    assert said == []
    assert (site.root / "_build").exists(), "an old site was thrown away for nothing"


def test_a_warning_fails_the_build(site):
    site.change(site.second, "Arithmetic.", "See {numref}`fig-nowhere`.")
    path = site.second.with_suffix(".ipynb")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("Arithmetic.", "See {numref}`fig-nowhere`."))
    said = []
    with pytest.raises(BookError, match="does not build without a warning"):
        build(root=site.root, echo=said.append)
    assert "fig-nowhere" in said[0]
    assert "01_twice" in said[0]


def test_a_page_that_loads_from_another_host_fails_the_build(site):
    css = site.root / "chapters" / "_static" / "littlelm.css"
    css.write_text("@import url('https://example.org/font.css');\n" + css.read_text())
    said = []
    with pytest.raises(BookError, match="1 places of the site load something"):
        build(root=site.root, echo=said.append)
    assert "_static/littlelm.css: https://example.org/font.css" in said[0]


def test_a_chapter_without_its_notebook_is_not_built(site):
    site.second.with_suffix(".ipynb").unlink()
    with pytest.raises(BookError, match="run littlelm book execute 01"):
        build(root=site.root)


def test_a_page_that_is_not_there_is_named(site):
    toc = site.root / "_toc.yml"
    toc.write_text(toc.read_text() + "- file: chapters/gone\n")
    with pytest.raises(BookError, match="lists chapters/gone, which is not there"):
        build(root=site.root)


@pytest.mark.parametrize(
    ("html", "count"),
    [
        ('<script src="https://example.org/a.js"></script>', 1),
        ('<script src="//example.org/a.js"></script>', 1),
        ('<script>import("https://example.org/a.mjs")</script>', 1),
        ('<link rel="stylesheet" href="https://example.org/a.css">', 1),
        ('<link rel="preload" as="font" href="http://example.org/a.woff2">', 1),
        ('<img src="https://example.org/a.png">', 1),
        ('<p style="background: url(https://example.org/a.png)">x</p>', 1),
        ("<style>@import '//example.org/a.css';</style>", 1),
        ('<iframe src="https://example.org"></iframe>', 1),
        ('<a href="https://example.org">a link</a>', 0),
        ('<link rel="canonical" href="https://example.org/page">', 0),
        ('<script src="_static/a.js"></script>', 0),
        ('<svg xmlns="http://www.w3.org/2000/svg"></svg>', 0),
    ],
)
def test_what_a_browser_would_fetch_is_found(tmp_path, html, count):
    (tmp_path / "page.html").write_text(f"<html><body>{html}</body></html>")
    assert len(list(foreign_loads(tmp_path))) == count


def test_complaints_are_the_lines_that_say_what_is_wrong():
    log = "\x1b[31mreading\x1b[0m\na.md:3: WARNING: undefined label\n\nbye"
    assert complaints(log) == "a.md:3: WARNING: undefined label"
    assert complaints("one\ntwo") == "one\ntwo"
    line = "chapters/01_twice.ipynb:70003: WARNING: term not in glossary: 'x'"
    assert complaints(line).startswith(
        "chapters/01_twice.ipynb, cell 7 of all, line 3:"
    )
