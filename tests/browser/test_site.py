"""The site in a headless Chromium: every page, as a reader on any screen sees it.

The site is built from the committed notebooks, once; LITTLELM_SITE names the folder of
a site that stands already. The tests are skipped where no Chromium is installed; CI
installs one.
"""

import os
from pathlib import Path

import pytest
from chrome import Chrome, find_browser, serve

import littlelm_core
from littlelm_core import book

for module in ("websocket", "jupyter_book"):
    pytest.importorskip(module, reason="the book extra brings it")

REPOSITORY = Path(littlelm_core.__file__).parent.parent
PROGRAM = find_browser()

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def html():
    """The folder of the built site."""
    if os.environ.get("LITTLELM_SITE"):
        return Path(os.environ["LITTLELM_SITE"])
    return book.build(root=REPOSITORY).parent.parent


@pytest.fixture(scope="module")
def base(html):
    with serve(html) as address:
        yield address


@pytest.fixture(scope="module")
def pages(html):
    """The course's own pages, as paths below the site."""
    return sorted(p.relative_to(html).as_posix() for p in html.glob("chapters/*.html"))


@pytest.fixture(scope="module")
def browser():
    browser = Chrome(PROGRAM)
    yield browser
    browser.close()


@pytest.fixture
def chrome(browser):
    browser.requests.clear()
    browser.failures.clear()
    return browser


def test_no_page_asks_another_host_for_anything_and_no_script_fails(
    chrome, base, pages
):
    assert len(pages) >= 4
    for page in pages:
        chrome.open(f"{base}/{page}")
        assert chrome.evaluate("document.querySelector('h1').innerText.length") > 0
    assert len(chrome.requests) > len(pages)
    assert chrome.elsewhere(base) == []
    assert chrome.failures == []


def test_pages_are_readable_at_phone_width(chrome, base, pages):
    for page in pages:
        chrome.open(f"{base}/{page}", width=390, height=844)
        wide = chrome.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, f"{page} scrolls sideways: {wide} px"
        outside = chrome.evaluate(
            "[...document.querySelectorAll('.bd-article p, .bd-article img')]"
            ".filter(e => { for (let a = e; a.tagName !== 'BODY'; a = a.parentElement)"
            " if (/auto|scroll/.test(getComputedStyle(a).overflowX)) return false;"
            " return e.getBoundingClientRect().right > innerWidth + 1; })"
            ".map(e => e.outerHTML.slice(0, 80))"
        )
        assert outside == [], f"{page} is cut off at the right"


def test_figures_are_drawn_and_described(chrome, base, pages):
    drawn = 0
    for page in pages:
        chrome.open(f"{base}/{page}")
        images = chrome.evaluate(
            "[...document.querySelectorAll('.bd-article img')]"
            ".map(i => [i.naturalWidth, i.alt, i.src])"
        )
        for width, alt, source in images:
            assert width > 0, f"{page}: {source} does not load"
            assert alt, f"{page}: {source} has no alt text"
        drawn += len(images)
    assert drawn >= 3


def test_mathematics_is_set(chrome, base, pages):
    formulas = 0
    for page in pages:
        chrome.open(f"{base}/{page}")
        formulas += chrome.evaluate("document.querySelectorAll('.math').length")
        errors = chrome.evaluate(
            "document.querySelectorAll('mjx-merror, [data-mjx-error]').length"
        )
        unset = chrome.evaluate(
            "[...document.querySelectorAll('.math')]"
            ".filter(m => !m.querySelector('mjx-container')).length"
        )
        assert (errors, unset) == (0, 0), page
    assert formulas > 0


LUMINANCE = """(() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => { const [r, g, b] = parse(c).map(v => v / 255)
      .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const back = e => { for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor, p = parse(c);
      if (p.length === 3 || p[3] > .5) return c; } return 'rgb(255, 255, 255)'; };
  const contrast = e => { const a = light(getComputedStyle(e).color),
      b = light(back(e)); return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); };
  const seen = [...document.querySelectorAll('.bd-article p, .bd-article h1,'
    + '.bd-article h2, .bd-article figcaption, .bd-article td, .bd-article pre,'
    + '.bd-sidebar-primary a, .bd-article pre span')].filter(e => e.innerText.trim());
  return {body: light(back(document.querySelector('.bd-article'))),
    weak: seen.map(e => [contrast(e), e.tagName, e.innerText.slice(0, 40)])
      .filter(([c]) => c < 3.5)};
})()"""


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_both_themes_have_contrast(chrome, base, pages, scheme, dark):
    for page in pages:
        chrome.open(f"{base}/{page}", scheme=scheme)
        result = chrome.evaluate(LUMINANCE)
        assert (result["body"] < 0.2) is dark, page
        assert result["weak"] == [], page


def test_figures_stand_on_a_light_card_in_the_dark(chrome, base, pages):
    for page in pages:
        chrome.open(f"{base}/{page}", scheme="dark")
        backs = chrome.evaluate(
            "[...document.querySelectorAll('.bd-article figure img')]"
            ".map(i => getComputedStyle(i).backgroundColor)"
        )
        assert set(backs) <= {"rgb(255, 255, 255)"}, page


def test_the_switch_turns_the_page_dark(chrome, base, pages):
    chrome.open(f"{base}/{pages[0]}")
    before = chrome.evaluate("document.documentElement.dataset.theme")
    for _ in range(3):  # it cycles through auto, light and dark
        chrome.evaluate("document.querySelector('.theme-switch-button').click()")
        if chrome.evaluate("document.documentElement.dataset.theme") != before:
            break
    assert chrome.evaluate("document.documentElement.dataset.theme") == "dark"


def test_search_finds_a_word_of_a_chapter(chrome, base):
    chrome.open(f"{base}/search.html?q=glossary")
    found = 0
    for _ in range(100):
        found = chrome.evaluate(
            "document.querySelectorAll('#search-results li').length"
        )
        if found:
            break
        chrome.evaluate("new Promise(done => setTimeout(done, 50))")
    assert found > 0
    assert chrome.elsewhere(base) == []


def test_code_can_be_copied_and_the_notebook_downloaded(chrome, base, html, pages):
    notebooks = 0
    for page in pages:
        chrome.open(f"{base}/{page}")
        source = chrome.evaluate(
            "[...document.querySelectorAll('a[href*=\"_sources\"]')]"
            ".map(a => a.getAttribute('href'))"
        )
        ends = {Path(s).suffix for s in source}
        if ".ipynb" in ends:
            notebooks += 1
            assert chrome.evaluate("document.querySelectorAll('.copybtn').length") > 0
            assert (html / "_sources" / page.replace(".html", ".ipynb")).exists()
    assert notebooks >= 2
