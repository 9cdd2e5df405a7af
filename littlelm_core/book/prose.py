"""The parts of MyST text that the gates look at: directives, references and words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

_OPEN = re.compile(r"^\s*(`{3,}|~{3,}|:{3,})\s*(?:\{([\w:-]+)\})?\s*(.*?)\s*$")
_OPTION = re.compile(r"^\s*:([\w-]+):\s*(.*?)\s*$")
# Directives whose body is text that one reads.
_TEXT = {
    "figure", "note", "tip", "warning", "important", "caution", "hint", "seealso",
    "admonition", "dropdown", "margin", "sidebar", "glossary", "epigraph", "list-table",
    "table", "topic", "attention", "danger", "error",
}  # fmt: skip
_MATH = re.compile(r"\$\$.+?\$\$|\$[^$\n]+\$", re.DOTALL)
_ROLE = re.compile(r"\{([\w:]+)\}`(?:[^`<]*<)?([^`<>]+)>?`")


@dataclass
class Directive:
    """One fenced directive: ```{name} argument, its options and its body."""

    name: str
    argument: str
    options: dict[str, str] = field(default_factory=dict)
    body: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Figure:
    """What a figure says of itself; `file` is empty for one that a cell computes."""

    name: str
    caption: str
    alt: str
    file: str = ""

    @classmethod
    def drawn(cls, directive: Directive) -> Figure:
        caption = " ".join(line.strip() for line in directive.body).strip()
        options = directive.options
        name, alt = options.get("name", ""), options.get("alt", "")
        return cls(name, caption, alt, directive.argument)


def figure_of(metadata: Mapping[str, Any]) -> Figure:
    """The figure that a code cell's `mystnb` metadata describes."""
    mystnb = metadata.get("mystnb") or {}
    figure, image = mystnb.get("figure") or {}, mystnb.get("image") or {}
    texts = (figure.get("name"), figure.get("caption"), image.get("alt"))
    return Figure(*(str(text or "").strip() for text in texts))


def directives(text: str, names: tuple[str, ...]) -> Iterator[Directive]:
    """The outermost fenced directives with one of these names."""
    for name, argument, lines in _fences(text):
        if name in names:
            yield _with_options(Directive(name, argument), lines)


def _fences(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """(directive or "", argument, lines inside) of each outermost fence."""
    fence, name, argument, inside = "", "", "", []
    for line in text.splitlines():
        match = _OPEN.match(line)
        if not fence:
            if match:
                fence, name, argument = match[1], match[2] or "", match[3]
                inside = []
        elif match and _closes(match, fence):
            yield name, argument, inside
            fence = ""
        else:
            inside.append(line)


def _closes(match: re.Match[str], fence: str) -> bool:
    same = match[1][0] == fence[0] and len(match[1]) >= len(fence)
    return same and not match[2] and not match[3]


def _with_options(directive: Directive, lines: list[str]) -> Directive:
    """Take `:key: value` lines, or a YAML block between ---, off a directive's head."""
    if lines and lines[0].strip() == "---" and "---" in [x.strip() for x in lines[1:]]:
        end = [x.strip() for x in lines].index("---", 1)
        options = yaml.safe_load("\n".join(lines[1:end])) or {}
        directive.options = {k: str(v).strip() for k, v in options.items()}
        directive.body = lines[end + 1 :]
        return directive
    while lines and (match := _OPTION.match(lines[0])):
        directive.options[match[1]] = match[2]
        lines = lines[1:]
    directive.body = lines
    return directive


def roles(text: str, names: tuple[str, ...]) -> list[str]:
    """What the inline roles of these names point at: {term}`shown <target>`."""
    return [
        " ".join(what.split()) for name, what in _ROLE.findall(text) if name in names
    ]


def references(text: str) -> list[str]:
    """The labels that {numref} and {ref} point at."""
    return roles(text, ("numref", "ref"))


def glossary_terms(text: str) -> list[str]:
    """The terms of every {glossary} directive: its lines that are not indented."""
    return [
        line.strip()
        for directive in directives(text, ("glossary",))
        for line in directive.body
        if line.strip() and not line[0].isspace()
    ]


def prose(text: str) -> str:
    """The text a person reads: without code, mathematics and directives' options."""
    kept: list[str] = []
    stack: list[tuple[str, bool]] = []  # (fence, is its body read)
    options = False
    for line in text.splitlines():
        match = _OPEN.match(line)
        if stack and match and _closes(match, stack[-1][0]):
            stack.pop()
            continue
        if match and (not stack or stack[-1][1]):
            stack.append((match[1], match[2] in _TEXT))
            options = True
            continue
        if stack and not stack[-1][1]:
            continue
        if options and stack and _OPTION.match(line):
            continue
        options = False
        kept.append(line)
    return re.sub(r"`[^`]*`", "`code`", _MATH.sub(" x ", "\n".join(kept)))


def words(text: str) -> int:
    """How many words of prose a piece of MyST holds; a formula counts as one."""
    return len(re.findall(r"[^\W_]+(?:['’.,-][^\W_]+)*", prose(text)))
