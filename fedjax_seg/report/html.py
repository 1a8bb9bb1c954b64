"""report.md and a self-contained report.html: figures inside, no script, no link to anywhere; opens offline."""

import base64
import html
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_seg.core.checks import UserError
from fedjax_seg.report.tables import Table, cell_text, column_groups, marks, to_markdown
from fedjax_seg.report.writer import write_atomic

_STYLE = """
body { font-family: system-ui, sans-serif; line-height: 1.5; color: #1a1a1a; max-width: 72rem; margin: 2rem auto;
       padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h3 { margin-top: 2rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; margin: 1rem 0; }
caption { caption-side: bottom; text-align: left; color: #444; padding-top: .4rem; font-size: .85rem; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead { border-top: 2px solid #333; border-bottom: 1px solid #333; } tbody { border-bottom: 2px solid #333; }
th[colspan] { text-align: center; border-bottom: 1px solid #999; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption { color: #444; font-size: .85rem; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .85rem; }
code { background: #f2f2f2; padding: 0 .2em; }
"""
_TAIL = "</body>\n</html>\n"
_AFTER = "Result"  # a section that a report has not had yet comes after this one


class Section(NamedTuple):
    """A part of the report.

    Attributes:
      title: its heading.
      text: paragraphs separated by an empty line; lines that start with '- ' are a list, `code` is set as code and
        **words** are bold.
      tables: in order, after the text.
      listing: lines set in columns, printed as they are; after the text.
      remarks: as text, directly under the tables.
      figures: paths of PNG files inside the report's folder, or pairs (path, caption); after the tables.
      parts: sections of their own under this one, with smaller headings; last.
    """

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Path | tuple[Path, str]] = ()
    listing: str = ""
    remarks: str = ""
    parts: "Sequence[Section]" = ()


def write_report(folder: str | os.PathLike[str], title: str, sections: Sequence[Section]) -> tuple[Path, Path]:
    """Writes report.md (figures by relative path) and report.html (figures embedded); returns both paths."""
    root = Path(os.path.abspath(folder))
    rendered = [_rendered(root, section) for section in sections]
    document = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>"
    )
    return _write(root, [f"# {title}\n", *(m for m, _ in rendered)], [document, *(p for _, p in rendered)])


def replace_section(
    folder: str | os.PathLike[str], sections: Sequence[Section], drop: Sequence[str] = ()
) -> tuple[Path, Path]:
    """Refreshes sections of the report in `folder`, found by their titles; all others stay as they are, to the byte.

    A section that the report has not had comes in the place of the first one of `drop`, else after 'Result', else last.

    Args:
      folder: of an earlier `write_report`.
      sections: with their new content.
      drop: titles of sections that are taken out (those that older reports had in their place).

    Raises: UserError where there is no report, or a file is none.
    """
    root = Path(os.path.abspath(folder))
    found = {}
    for name, split in (("report.md", _markdown_blocks), ("report.html", _page_blocks)):
        try:
            found[name] = split((root / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"{root / name}: no such file; a finished run's report expected (give the run's command again)"
            ) from None
        if not found[name]:
            raise UserError(f"{root / name}: no report of this program; restore it, or write the run's report anew")
    rendered = [_rendered(root, section) for section in sections]
    titles = [section.title for section in sections]
    pages = [html.escape(title) for title in titles]
    markdown = _replaced(found["report.md"], dict(zip(titles, (m for m, _ in rendered))), drop)
    page = _replaced(found["report.html"], dict(zip(pages, (p for _, p in rendered))), [html.escape(d) for d in drop])
    return _write(root, markdown, page)


def _write(root: Path, markdown: Sequence[str], page: Sequence[str]) -> tuple[Path, Path]:
    write_atomic(root / "report.md", "\n".join(markdown).encode())
    write_atomic(root / "report.html", ("\n".join(page) + "\n" + _TAIL).encode())
    return root / "report.md", root / "report.html"


def _markdown_blocks(text: str) -> list[tuple[str, str]]:
    """(title, text) of every section, the head first with the title ''; a listing may hold lines that look like one."""
    if not text.startswith("# "):
        return []
    blocks, listing = [("", [])], False  # type: list[tuple[str, list[str]]], bool
    for line in text.split("\n"):
        if line.startswith("```"):
            listing = not listing
        if line.startswith("## ") and not listing:
            blocks.append((line.removeprefix("## "), []))
        blocks[-1][1].append(line)
    return [(title, "\n".join(lines)) for title, lines in blocks]


def _page_blocks(text: str) -> list[tuple[str, str]]:
    """The same of a page. Whatever readers see is escaped: only headings hold <h2>."""
    if not text.endswith("\n" + _TAIL) or "<h1>" not in text:
        return []
    parts = re.split(r"\n(?=<h2>)", text.removesuffix("\n" + _TAIL))
    return [("", parts[0]), *((part[len("<h2>") : part.index("</h2>")], part) for part in parts[1:])]


def _replaced(blocks: Sequence[tuple[str, str]], new: dict[str, str], drop: Sequence[str]) -> list[str]:
    """The blocks with those of `new` in the place of their namesakes, and the others of `new` where they belong."""
    here = {title for title, _ in blocks}
    fresh = [text for title, text in new.items() if title not in here]
    place = next((i for i, (title, _) in enumerate(blocks) if title in drop), None)
    if place is None:
        place = next((i + 1 for i, (title, _) in enumerate(blocks) if title == _AFTER), len(blocks))
    out: list[str] = []
    for i, (title, text) in enumerate(blocks):
        out += fresh if i == place else []
        if title in new:
            out.append(new[title])
        elif title not in drop:
            out.append(text)
    return out + (fresh if place == len(blocks) else [])


def _rendered(root: Path, section: Section, level: int = 2) -> tuple[str, str]:
    """(Markdown, HTML) of a section."""
    markdown = [f"{'#' * level} {section.title}\n"]
    page = [f"<h{level}>{html.escape(section.title)}</h{level}>"]
    if section.text:
        markdown.append(section.text.strip() + "\n")
        page.append(_paragraphs(section.text))
    if section.listing:
        markdown.append(f"```text\n{section.listing}\n```\n")
        page.append(f"<pre>{html.escape(section.listing)}</pre>")
    for table in section.tables:
        markdown.append(to_markdown(table))
        page.append(_table(table))
    if section.remarks:
        markdown.append(section.remarks.strip() + "\n")
        page.append(_paragraphs(section.remarks))
    for figure in section.figures:
        path, caption = figure if isinstance(figure, tuple) else (figure, "")
        markdown.append(_markdown_figure(root, path, caption))
        page.append(_figure(root, path, caption))
    for part in section.parts:
        below = _rendered(root, part, level + 1)
        markdown.append(below[0])
        page.append(below[1])
    return "\n".join(markdown), "\n".join(page)


def _relative(root: Path, path: Path) -> str:
    return Path(os.path.relpath(path, root)).as_posix()


def _numbers(root: Path, path: Path) -> str:
    """The name of the CSV behind a figure, '' where there is none."""
    numbers = path.with_suffix(".csv")
    return f"Numbers: {_relative(root, numbers)}" if numbers.is_file() else ""


def _markdown_figure(root: Path, path: Path, caption: str) -> str:
    words = " ".join(filter(None, (caption, _numbers(root, path))))
    return f"![{caption or path.stem}](<{_relative(root, path)}>)\n\n{words}\n"


def _figure(root: Path, path: Path, caption: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    words = html.escape(" ".join(filter(None, (caption, _numbers(root, path)))))
    alt = html.escape(caption or path.stem)
    return f'<figure><img alt="{alt}" src="data:image/png;base64,{data}"><figcaption>{words}</figcaption></figure>'


def _table(table: Table) -> str:
    style = {"best": "<b>{}</b>", "second": "<u>{}</u>", "": "{}"}
    head = []
    spans = column_groups(table)
    if any(group for group, _ in spans):
        cells = "".join(f'<th colspan="{n}">{html.escape(group)}</th>' for group, n in spans)
        head.append(f"<tr><th></th>{cells}</tr>")
    names = (table.corner, *(name for _, name in table.columns))
    head.append("<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in names) + "</tr>")
    body = []
    for label, row, mark in zip(table.labels, table.cells, marks(table)):
        cells = "".join(f"<td>{style[m].format(html.escape(cell_text(c, table)))}</td>" for c, m in zip(row, mark))
        body.append(f"<tr><td>{html.escape(label)}</td>{cells}</tr>")
    return (
        f'<div class="wide"><table><caption>{html.escape(table.caption)}</caption>\n<thead>{"".join(head)}</thead>\n'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _paragraphs(text: str) -> str:
    out = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        first = next((i for i, line in enumerate(lines) if line.startswith("- ")), len(lines))
        if first:
            out.append(f"<p>{_inline(' '.join(lines[:first]))}</p>")
        items: list[str] = []
        for line in lines[first:]:  # a line without '- ' goes on with the item above it
            if line.startswith("- "):
                items.append(line[2:])
            else:
                items[-1] += " " + line.strip()
        if items:
            out.append("<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>")
    return "\n".join(out)


def _inline(text: str) -> str:
    bold = re.sub(r"\*\*(\S(?:[^*]*\S)?)\*\*", r"<strong>\1</strong>", html.escape(text))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", bold)
