import base64
import re
from html.parser import HTMLParser

import pytest

from fedjax_seg.core.checks import UserError
from fedjax_seg.report import figures
from fedjax_seg.report.html import Section, replace_section, write_report
from fedjax_seg.report.tables import Cell, Table

TABLE = Table(
    "± is <std>",
    "Method",
    (("A & B", "acc"), ("A & B", "loss")),
    ("FedAvg", "<script>alert(1)</script>"),
    ((Cell(0.5, 0.1, 5), Cell(2.0, 0.1, 5)), (Cell(0.6, 0.1, 5), Cell(3.0, 0.1, 4))),
    ("max", "min"),
)


def write(tmp_path):
    figure = figures.sweep_curve([1, 2], {"a": [0.5, 0.6]}, tmp_path / "figures", "curve")
    text = "One <b> paragraph\nof two lines.\n\nFlow:\n- 1112 in the `CSV`\n- 1035 with\n  a file\n\n- alone"
    return figure, write_report(
        tmp_path,
        "A & B",
        [Section("Cohort", text, [TABLE], [(figure, "Sweep <c>")]), Section("Empty", figures=[figure])],
    )


def test_html_is_self_contained_escaped_and_well_formed(tmp_path):
    figure, (_, path) = write(tmp_path)
    page = path.read_text()
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert [base64.b64decode(data) for data in embedded] == [figure.read_bytes()] * 2
    assert not re.search(r'(src|href)="(?!data:)', page) and "url(" not in page and "http" not in page
    assert "<script" not in page and "&lt;script&gt;" in page and "± is &lt;std&gt;" in page

    class Balance(HTMLParser):
        stack = ()

        def handle_starttag(self, tag, attrs):
            self.stack += () if tag in ("meta", "img") else (tag,)

        def handle_endtag(self, tag):
            assert self.stack[-1] == tag
            self.stack = self.stack[:-1]

    parser = Balance()
    parser.feed(page)
    assert parser.stack == ()


def test_remarks_stand_between_tables_and_figures(tmp_path):
    figure, _ = write(tmp_path)
    paths = write_report(tmp_path, "x", [Section("A", "Before.", [TABLE], [figure], remarks="WARNING: <careful>.")])
    for path, words, end in zip(paths, ("WARNING: <careful>.", "<p>WARNING: &lt;careful&gt;.</p>"), ("![", "<figure>")):
        text = path.read_text()
        assert text.index("Before.") < text.index("FedAvg") < text.index(words) < text.index(end)


def test_tables_and_text_are_rendered(tmp_path):
    page = write(tmp_path)[1][1].read_text()
    assert '<th colspan="2">A &amp; B</th>' in page
    assert "<td><u>0.500 ± 0.100</u></td><td><b>2.000 ± 0.100</b></td>" in page
    assert "<td><b>0.600 ± 0.100</b></td><td><u>3.000 ± 0.100 (n=4)</u></td>" in page
    assert "<p>One &lt;b&gt; paragraph of two lines.</p>" in page
    assert "<p>Flow:</p>\n<ul><li>1112 in the <code>CSV</code></li><li>1035 with a file</li></ul>" in page
    assert "<figcaption>Sweep &lt;c&gt; Numbers: figures/curve.csv</figcaption>" in page


def test_markdown_names_the_figures_by_relative_path(tmp_path):
    markdown = write(tmp_path)[1][0].read_text()
    assert markdown.startswith("# A & B\n\n## Cohort\n")
    assert "![Sweep <c>](<figures/curve.png>)\n\nSweep <c> Numbers: figures/curve.csv\n" in markdown
    assert "| FedAvg | <u>0.500 ± 0.100</u> |" in markdown


def report(folder, *sections, title="A & B"):
    return tuple(path.read_text() for path in write_report(folder, title, sections))


RESULT, LAST = Section("Result", "Text."), Section("Cases <of all>", "x", listing="## no heading")
PARTS = [Section("Ledger", "- a"), Section("B")]
PRIVACY = Section("Privacy & more", "**Nothing** is `promised`.", [TABLE], parts=PARTS)
OLD, OLDER, NEW = Section("Old & <1>", "x"), Section("Old 2"), Section("Cases <of all>", "new")


def test_parts_stand_below_their_section_with_smaller_headings(tmp_path):
    markdown, page = report(tmp_path, PRIVACY)
    assert (
        "## Privacy & more\n\n**Nothing** is `promised`.\n" in markdown and "\n### Ledger\n\n- a\n\n### B\n" in markdown
    )
    assert "<p><strong>Nothing</strong> is <code>promised</code>.</p>" in page
    assert page.index("</table>") < page.index("<h3>Ledger</h3>\n<ul><li>a</li></ul>\n<h3>B</h3>")


@pytest.mark.parametrize(
    "before, new, drop, after",
    [
        ((RESULT, PRIVACY, LAST), PRIVACY, (), (RESULT, PRIVACY, LAST)),  # the same again changes nothing
        ((RESULT, Section("Privacy & more"), LAST), PRIVACY, (), (RESULT, PRIVACY, LAST)),
        ((RESULT, LAST), PRIVACY, (), (RESULT, PRIVACY, LAST)),
        ((LAST, RESULT), PRIVACY, (), (LAST, RESULT, PRIVACY)),
        ((LAST,), PRIVACY, (), (LAST, PRIVACY)),
        ((RESULT, OLD, LAST, OLDER), PRIVACY, (OLD.title, OLDER.title), (RESULT, PRIVACY, LAST)),
        ((RESULT, LAST, OLDER), PRIVACY, (OLD.title, OLDER.title), (RESULT, LAST, PRIVACY)),
        ((RESULT, OLD, PRIVACY), PRIVACY, (OLD.title,), (RESULT, PRIVACY)),
        ((RESULT, PRIVACY, LAST), NEW, (), (RESULT, PRIVACY, NEW)),
    ],
    ids=["same", "changed", "fresh", "after result", "no result", "two old", "one old", "old and new", "escaped"],
)
def test_a_section_is_replaced_in_place(tmp_path, before, new, drop, after):
    report(tmp_path / "one", *before)
    paths = replace_section(tmp_path / "one", [new], drop)
    assert tuple(path.read_text() for path in paths) == report(tmp_path / "two", *after)


def test_replaced_figures_are_embedded_and_nothing_else_is_left_behind(tmp_path):
    figure, _ = write(tmp_path)
    new = [Section("Cohort", figures=[(figure, "new")]), Section("Privacy")]
    markdown, page = (path.read_text() for path in replace_section(tmp_path, new))
    assert markdown.index("## Cohort") < markdown.index("## Empty") < markdown.index("## Privacy")
    assert "![new](<figures/curve.png>)" in markdown and "Flow" not in markdown + page
    data = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert [base64.b64decode(d) for d in data] == [figure.read_bytes()] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["figures", "report.html", "report.md"]


@pytest.mark.parametrize("text, words", [(None, "no such file"), ("foreign", "no report of this program")])
@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_a_file_that_is_no_report_is_left_alone(tmp_path, name, text, words):
    paths = {path.name: path for path in write_report(tmp_path, "x", [RESULT])}
    kept = {n: p.read_bytes() for n, p in paths.items() if n != name}
    paths[name].unlink()
    if text:
        paths[name].write_text(text)
    with pytest.raises(UserError, match=f"{name}: {words}"):
        replace_section(tmp_path, [PRIVACY])
    assert {n: paths[n].read_bytes() for n in kept} == kept
