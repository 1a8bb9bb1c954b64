"""TCGA barcodes: the patient and the hospital of a slide.

Source: the barcode of The Cancer Genome Atlas, e.g. TCGA-05-4244-01Z-00-DX1: project, tissue source site (two letters
or digits), participant (four), then sample, portion and slide. The first three fields name the patient. A source site
collects for one study, so a hospital that sent two kinds of tumour has two codes.
"""

import re
from typing import NamedTuple

_BARCODE = re.compile(r"(?<![A-Za-z0-9])TCGA-([A-Za-z0-9]{2})-([A-Za-z0-9]{4})(?![A-Za-z0-9])", re.IGNORECASE)


class Barcode(NamedTuple):
    """patient: e.g. 'TCGA-05-4244'; site: the tissue source site, e.g. '05'."""

    patient: str
    site: str


def barcode(text: str) -> Barcode | None:
    """The last barcode in an id, a file name or a path; None where there is none."""
    found = _BARCODE.findall(text)
    if not found:
        return None
    site, participant = (field.upper() for field in found[-1])
    return Barcode(f"TCGA-{site}-{participant}", site)
