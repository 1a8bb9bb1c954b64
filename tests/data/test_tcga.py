"""Barcodes of The Cancer Genome Atlas."""

import pytest

from fedjax_seg.data.tcga import Barcode, barcode


@pytest.mark.parametrize(
    "text, patient, site",
    [
        ("TCGA-05-4244-01Z-00-DX1", "TCGA-05-4244", "05"),
        ("tumour/TCGA-A2-A0CM-01A-01-TSA.7a2e_17.png", "TCGA-A2-A0CM", "A2"),
        ("tcga-e9-a1nd_3.jpg", "TCGA-E9-A1ND", "E9"),
        ("TCGA-05-4244/TCGA-44-6144-01Z-00-DX1_0.png", "TCGA-44-6144", "44"),
    ],
)
def test_patient_and_source_site(text, patient, site):
    assert barcode(text) == Barcode(patient, site)


@pytest.mark.parametrize(
    "text", ["", "TCGA", "TCGA-05", "TCGA-5-4244", "TCGA-05-42445", "XTCGA-05-4244", "lung_n_0.png"]
)
def test_other_ids_are_no_barcodes(text):
    assert barcode(text) is None
