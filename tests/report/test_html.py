import base64
import re
from html.parser import HTMLParser

from fedjax_seg.report import figures
from fedjax_seg.report.html import Section, write_report
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
