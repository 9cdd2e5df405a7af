"""The book machinery: chapters become modules, notebooks with outputs, and a site.

`export` writes the modules, `execute` the notebooks, `check` certifies that everything
fits together, `build` makes the site. Each works on a clone of the course.
"""

from littlelm_core.book.build import build
from littlelm_core.book.certify import check
from littlelm_core.book.chapter import BookError
from littlelm_core.book.execute import execute
from littlelm_core.book.export import export

__all__ = ["BookError", "build", "check", "execute", "export"]
