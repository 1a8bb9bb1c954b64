"""A small hand-made PCP folder that tests damage in one place each."""

from pathlib import Path

import numpy as np
import pytest

HEADER = ["", "Unnamed: 0", "SUB_ID", "SITE_ID", "FILE_ID", "DX_GROUP", "FIQ", "qc_notes_rater_1", "func_mean_fd"]


class PcpFolder:
    """Rows and tables in memory; `write` puts them on disk."""

    def __init__(self, root: Path, rois: int = 6):
        self.root, self.rois = root, rois
        self.header = list(HEADER)
        self.rows: list[list[str]] = []
        self.tables: dict[str, str] = {}
        self._random = np.random.default_rng(5)

    def subject(self, site="NYU", dx="2", fd="0.05", prefix=None, file=True, points=12, file_id=None, sub_id=None):
        """Adds one subject; returns its FILE_ID. Ids count up from 90001."""
        number = 90001 + len(self.rows) if sub_id is None else sub_id
        if file_id is None:
            file_id = f"{prefix or site}_{int(number):07d}"
        n = str(len(self.rows))
        self.rows.append([n, n, str(number), site, file_id, dx, "-9999", "shadow, left", fd])
        if file and file_id != "no_filename":
            self.table(file_id, self._random.normal(size=(points, self.rois)))
        return file_id

    def table(self, file_id: str, values: np.ndarray, header: bool = True) -> None:
        head = "\t".join(f"#{i + 1}" for i in range(values.shape[1])) + "\n" if header else ""
        self.tables[file_id] = head + "\n".join("\t".join(f"{v:.6f}" for v in row) for row in values) + "\n"

    def site(self, site="NYU", asd=3, hc=3, **options) -> list[str]:
        return [self.subject(site, dx, **options) for dx in "1" * asd + "2" * hc]

    def set(self, file_id: str, column: str, text: str) -> None:
        row = next(r for r in self.rows if r[4] == file_id)
        row[self.header.index(column)] = text

    def csv_text(self, delimiter=",", end="\n") -> str:
        quoted = (
            [f'"{c}"' if delimiter in c or c == "shadow, left" else c for c in r] for r in [self.header, *self.rows]
        )
        return "".join(delimiter.join(row) + end for row in quoted)

    def write(self, atlas="toy", text: str | None = None, below="series/deep") -> str:
        folder = self.root / below
        folder.mkdir(parents=True, exist_ok=True)
        content = self.csv_text() if text is None else text
        (self.root / "Phenotypic_toy.csv").write_bytes(content.encode())
        for file_id, table in self.tables.items():
            (folder / f"{file_id}_rois_{atlas}.1D").write_bytes(table.encode())
        return str(self.root)


@pytest.fixture
def pcp(tmp_path):
    return PcpFolder(tmp_path / "pcp")
