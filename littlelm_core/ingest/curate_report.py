"""The report of `data curate`: what was dropped and why, as a page and as JSON.

One HTML file that a browser opens from disk: no script, no request to anywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from littlelm_core.curation import MinHash
from littlelm_core.ingest.write import write_json
from littlelm_core.report.log import write_text
from littlelm_core.report.page import escape, table, whole_page

TITLE = "Curation: what was dropped and why"
BAD_SHOWN = 20  # on the page; the JSON has more


def write_report(out: Path, report: dict[str, Any]) -> None:
    """Write report.json and report.html."""
    write_json(out / "report.json", report)
    write_text(out / "report.html", page(report))


def page(report: dict[str, Any]) -> str:
    """Return the whole page as HTML."""
    parts = [
        _header(report),
        _reasons(report),
        _domains(report),
        _duplicates(report),
        _examples(report),
        _bad(report),
        _settings(report),
    ]
    return whole_page(TITLE, "".join(parts), f"<style>{MORE_STYLE}</style>")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _of(shown: str, part: dict[str, int], whole: dict[str, int], unit: str) -> str:
    return f"{shown} <small>{_share(part[unit], whole[unit])}</small>"


def _bytes(number: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"


# ---- How much


def _header(report: dict[str, Any]) -> str:
    read, kept = report["read"], report["kept"]
    records, bad = report["records"], report["bad"]["total"]
    lost = sum(counts["documents"] for counts in report["removed"].values())
    facts = [
        ("records read", f"{records:,}"),
        ("documents kept", _of(f"{kept['documents']:,}", kept, read, "documents")),
        ("text kept", _of(_bytes(kept["bytes"]), kept, read, "bytes")),
        ("dropped", f"{lost:,}"),
        ("could not be read", f"{bad:,}"),
    ]
    cells = "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in facts)
    return f"""<header>
<h1>{TITLE}</h1>
<dl>{cells}</dl>
{_bars(report)}
</header>
"""


def _steps(report: dict[str, Any], unit: str) -> dict[str, int]:
    """Return {step: documents or bytes}: what stays first, then what each step took."""
    steps = {"kept": report["kept"][unit]}
    for reason, counts in report["removed"].items():
        step = reason.partition(":")[0]
        steps[step] = steps.get(step, 0) + counts[unit]
    return steps


def _bars(report: dict[str, Any]) -> str:
    order = list(_steps(report, "documents"))
    lines = []
    for unit in ("documents", "bytes"):
        steps = _steps(report, unit)
        whole = max(sum(steps.values()), 1)
        pieces = "".join(
            f'<i class="c{order.index(step) % 8}" style="width:{n / whole:.3%}" '
            f'title="{escape(step)}: {n / whole:.1%}"></i>'
            for step, n in steps.items()
        )
        lines.append(f'<p class="where">share of {unit}</p>')
        lines.append(f'<div class="bar stack">{pieces}</div>')
    legend = "".join(
        f'<span><i class="c{i % 8}"></i>{escape(step.replace("_", " "))}</span>'
        for i, step in enumerate(order)
    )
    return "".join(lines) + f'<p class="legend">{legend}</p>'


def _reasons(report: dict[str, Any]) -> str:
    read = report["read"]
    rows = []
    for reason, counts in report["removed"].items():
        share = counts["documents"] / max(read["documents"], 1)
        rows.append(
            [
                escape(reason.replace("_", " ")),
                f"{counts['documents']:,}",
                _share(counts["documents"], read["documents"]),
                f'<span class="meter"><i style="width:{share:.2%}"></i></span>',
                _bytes(counts["bytes"]),
            ]
        )
    if not rows:
        return "<h2>Why</h2><p>Nothing was dropped.</p>"
    heads = ["step: reason", "documents", "of all", "", "text"]
    note = (
        "<p>Each document is counted once, at the first step that drops it; kept and "
        "dropped documents add up to those read.</p>"
    )
    return "<h2>Why</h2>" + note + table(heads, rows)


def _domains(report: dict[str, Any]) -> str:
    rows = [
        [
            escape(name), f"{d['read']['documents']:,}", f"{d['kept']['documents']:,}",
            _share(d["kept"]["documents"], d["read"]["documents"]),
            _bytes(d["read"]["bytes"]), _bytes(d["kept"]["bytes"]), f"{d['bad']:,}",
        ]
        for name, d in report["domains"].items()
    ]  # fmt: skip
    heads = ["domain", "read", "kept", "share", "text read", "text kept", "bad records"]
    return "<h2>Domains</h2>" + table(heads, rows)


# ---- Duplicates

SIZES = ((1, 1), (2, 2), (3, 3), (4, 9), (10, 99), (100, 999), (1000, 10**18))


def _duplicates(report: dict[str, Any]) -> str:
    options = report["options"]
    if options["dedup"] == "none":
        return ""
    sizes = {int(k): v for k, v in report["clusters"]["sizes"].items()}
    rows = []
    for low, high in SIZES:
        inside = {k: v for k, v in sizes.items() if low <= k <= high}
        if inside:
            name = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            name = "1,000 or more" if low == 1000 else name
            documents = sum(k * v for k, v in inside.items())
            rows.append([name, f"{sum(inside.values()):,}", f"{documents:,}"])
    text = (
        "<h2>Duplicates</h2><p>Documents that passed all other steps, by the size of "
    )
    text += "their cluster; of each cluster the first document stays.</p>"
    text += table(["documents in a cluster", "clusters", "documents"], rows)
    if options["dedup"] == "exact":
        return text
    found, minhash = report["clusters"], MinHash(**options["minhash"])
    text += (
        f"<p>{found['compared']:,} pairs that share a band were compared; "
        f"{found['rejected']:,} of these were less alike than "
        f"{options['threshold']:g} and stay apart."
    )
    if found["hasty"]:
        text += (
            f" In {found['hasty']:,} large groups of documents with one key not all "
            "pairs were compared."
        )
    likely = [0.5, 0.6, 0.7, 0.8, 0.9]
    heads = ["similarity of a pair", *(f"{s:.1f}" for s in likely)]
    row = ["chance to be compared", *(f"{minhash.meeting(s):.1%}" for s in likely)]
    return text + "</p>" + table(heads, [row])


# ---- Examples


def _examples(report: dict[str, Any]) -> str:
    if not report["removed"]:
        return ""
    found = []
    for place, (reason, counts) in enumerate(report["removed"].items()):
        shown = "".join(_example(e) for e in report["examples"].get(reason, []))
        found.append(
            f"<details{' open' if place == 0 else ''}>"
            f"<summary>{escape(reason.replace('_', ' '))} "
            f"<small>{counts['documents']:,}</small></summary>{shown}</details>"
        )
    note = "<p>Drawn by a hash of their text, so as good as by chance.</p>"
    return "<h2>Examples</h2>" + note + "".join(found)


def _example(example: dict[str, Any]) -> str:
    if "kept" not in example:
        return _figure(example, "")
    return (
        f'<div class="pair">{_figure(example, "dropped")}'
        f"{_figure(example['kept'], 'stays')}</div>"
    )


def _figure(example: dict[str, Any], title: str) -> str:
    facts = [title] if title else []
    facts += [example["detail"]] if "detail" in example else []
    facts += [example["place"]] if example["place"] else []
    facts += [f"{name} {value}" for name, value in example["fields"].items()]
    facts.append(f"{example['length']:,} characters")
    end = example["start"] + len(example["text"])
    more = "…" if example["length"] > end else ""
    before = "…" if example["start"] else ""
    return (
        f"<figure><figcaption>{escape(' · '.join(facts))}</figcaption>"
        f"<pre>{before}{escape(example['text'])}{more}</pre></figure>"
    )


def _bad(report: dict[str, Any]) -> str:
    bad = report["bad"]
    if not bad["total"]:
        return ""
    rows = [[escape(reason), f"{count:,}"] for reason, count in bad["reasons"].items()]
    places = "".join(
        f"<li>{escape(place)}</li>" for place in report["bad_places"][:BAD_SHOWN]
    )
    return (
        "<h2>Records that could not be read</h2>"
        + table(["reason", "records"], rows)
        + f"<details><summary>The first ones</summary><ul>{places}</ul></details>"
    )


def _settings(report: dict[str, Any]) -> str:
    rows = [
        [escape(k), escape(json.dumps(v))]
        for k, v in {**report["options"], **report["versions"]}.items()
    ]
    return (
        "<details><summary>Options and versions</summary>"
        + table(["name", "value"], rows)
        + "</details>"
    )


MORE_STYLE = """
.stack{display:flex;height:1.1rem;margin:.2rem 0 .5rem}.stack i{flex:none}
.c0{background:var(--good)!important}.c1{background:var(--line1)!important}
.c2{background:var(--line0)!important}.c3{background:var(--line4)!important}
.c4{background:var(--line3)!important}.c5{background:var(--line5)!important}
.c6{background:var(--bad)!important}.c7{background:var(--soft)!important}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;font-size:.9rem}
.legend i{display:inline-block;width:.8rem;height:.8rem;border-radius:.2rem;
margin-right:.35rem;vertical-align:-.05rem}
.meter{display:inline-block;width:6rem;height:.6rem;border-radius:.3rem;
background:var(--grid);overflow:hidden}
.meter i{display:block;height:100%;background:var(--line1)}
small{color:var(--soft);font-weight:400}
details figure{margin:.5rem 0}pre{max-height:16rem;overflow-y:auto}
.pair{display:grid;gap:.6rem;margin:.5rem 0;
grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr))}
.pair figure{margin:0!important}
figcaption,li{overflow-wrap:anywhere}
.wide td{white-space:nowrap}
.wide td:first-child{white-space:normal;min-width:8.5rem}
.wide td:nth-child(2):last-child{white-space:normal;overflow-wrap:anywhere}
@media(max-width:34rem){.meter{display:none}.wide table{font-size:.84rem}
.wide td,.wide th{padding-right:.45rem}.wide td:first-child{min-width:7rem}}
"""
