"""Slides as bags of features: what is read, padded, thinned out and divided."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slide_folder import WIDTH, Slides, line

from fedjax_seg import data as rooms
from fedjax_seg.core.checks import DataFaults, UserError
from fedjax_seg.data import bag_files
from fedjax_seg.data.slide_bags import slide_bags


@pytest.fixture
def slides(tmp_path):
    return Slides(tmp_path)


def test_bags_are_padded_in_the_order_of_the_table(slides):
    given = [slides.slide(f"p{n}", "A") for n in range(6)]
    found = slides.load()
    x, instances = found.arrays["x"], found.arrays["instances"]
    assert x.shape == (6, 4, WIDTH) and x.dtype == np.float32 and set(found.arrays) == {"x", "y", "instances"}
    assert instances.dtype == np.int32 and instances.tolist() == [1, 2, 3, 4, 1, 2]
    for n, features in enumerate(given):
        np.testing.assert_array_equal(x[n, : len(features)], features.astype(np.float32))
        assert not x[n, len(features) :].any()
    assert found.arrays["y"].dtype == np.int32 and found.arrays["y"].tolist() == [0, 1] * 3
    assert found.classes == ("a", "b") and found.case_ids[5] == "s05.npz" and found.patient_ids[5] == "p5"
    assert found.about["bags"]["padded_to"] == 4 and found.about["bags"]["thinned_out"] == 0
    assert "3 features per instance, 1 to 4 instances (median 2), padded with zeros to 4" in line(found, "input:")
    assert line(found, "bags: ") == "bags: 6 float32 .npz; 2 of 1x3, 2 of 2x3, 1 of 3x3 and 1 other sizes"
    assert not any("image" in text or "picture" in text for text in found.summary)
    assert rooms.make("slide_bags", root=str(slides.root)).case_ids == found.case_ids


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=["16", "32", "64"])
@pytest.mark.parametrize("form", ["s.npz", "s.h5", "array.npz", "clam.h5"])
def test_forms_and_types(slides, form, dtype):
    bag = np.arange(2 * WIDTH).reshape(2, WIDTH).astype(dtype) / 4
    content = {
        "array.npz": {"arr_0": bag},
        "clam.h5": {"features": bag, "coords": np.zeros((2, 2), np.int64)},
    }.get(form, {"features": bag, "other": np.zeros(1)})
    slides.slide("q", "A", name=form, features=content)
    slides.slide("r", "A")
    found = slides.load()
    np.testing.assert_array_equal(found.arrays["x"][0, :2], bag.astype(np.float32))
    assert found.about["kinds"][f"{np.dtype(dtype).name} {form[form.index('.') :]}"] >= 1


def test_large_bags_are_thinned_out_evenly_and_told(slides):
    bag = np.arange(10.0)[:, None] * np.ones(WIDTH)
    slides.slide("q", "A", features=bag)
    for _ in range(3):
        slides.slide()
    found = slides.load(most_instances=4)
    # the middles of four parts of 2.5 rows: 1.25, 3.75, 6.25, 8.75
    assert found.arrays["x"][0, :, 0].tolist() == [1, 3, 6, 8]
    assert found.arrays["instances"].tolist() == [4, 2, 3, 4] and found.arrays["x"].shape[1] == 4
    assert line(found, "note: 1 bags have more").startswith("note: 1 bags have more than 4 instances (up to 10)")
    assert "s00.npz,A,q," in found.files["cohort.csv"] and ",10,3," in found.files["cohort.csv"].splitlines()[1]
    assert found.files["cohort.csv"].startswith("bag,client,patient,role,instances_stored,features,label\n")
    assert slides.load(most_instances=0).arrays["x"].shape[1] == 10


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 500), most=st.integers(0, 60))
def test_thinning_is_even_and_repeats_nothing(n, most):
    rows = bag_files.thinned(n, most)
    assert len(rows) == (min(n, most) if most else n) and rows[0] >= 0 and rows[-1] < n
    steps = np.diff(rows)
    assert np.all(steps >= 1) and (len(steps) == 0 or steps.max() - steps.min() <= 1)
    assert abs(rows[0] - (n - 1 - rows[-1])) <= 1  # as much is left out at the start as at the end


def test_memory_is_told_before_it_is_full(slides):
    slides.two_sites()
    slides.slide("A0", "A", features=np.zeros((1000, 64 * WIDTH)))
    with pytest.raises(UserError) as error:
        slides.load(most_instances=500, memory_gb=0.002)
    # 21 bags of 192 numbers of 4 bytes: 0.002 GiB are 2,147,483 bytes, 133 instances each
    assert str(error.value) == (
        "data.most_instances: 500 given; 21 bags padded to 500 instances of 192 features take 0.00751 GiB, 0.002"
        " allowed; set data.most_instances to at most 133, or raise data.memory_gb"
    )
    with pytest.raises(UserError, match="134 given; 21 bags padded to 134 instances"):
        slides.load(most_instances=134, memory_gb=0.002)
    with pytest.raises(DataFaults):  # it fits, and is of another encoder
        slides.load(most_instances=133, memory_gb=0.002)


def test_the_split_is_by_patient_and_site(slides):
    found = slides.two_sites().load(test_share=0.4, aside_share=0.2)
    assert found.sites == ("A", "B") and found.site_of.tolist() == [0] * 10 + [1] * 10
    of = np.array(found.patient_ids)
    split = found.splits[0]
    sides = [set(of[np.concatenate(part)]) for part in (split.train, split.test)] + [set(of[found.aside])]
    assert [len(side) for side in sides] == [4, 4, 2] and len(set.union(*sides)) == 10
    assert found.about["table1"] == [{"site": s, "total": 10, "a": 5, "b": 5} for s in "AB"]
    external = slides.load(external=("A",))
    assert external.sites == ("B", "A") and external.external == ("A",) and len(external.splits[0].test[1]) == 10


def test_dropped_clients_take_their_instances_along(slides):
    slides.slide("Z0", "Z")
    slides.two_sites()
    found = slides.load(min_site_size=2)
    assert found.sites == ("A", "B") and len(found.arrays["instances"]) == 20
    real = np.any(found.arrays["x"] != 0, axis=-1).sum(1)
    np.testing.assert_array_equal(found.arrays["instances"], real)


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "quantity", "column:scanner"])
def test_no_client_shares_a_patient(slides, partition):
    slides.header += ",scanner"
    for n in range(36):
        slides.slide(f"p{n // 2}", "A", f"s{n // 2 % 3}")
    found = slides.load(partition=partition, clients=3, alpha=1.0)
    assert len(found.sites) == 3
    assert len({(p, k) for p, k in zip(found.patient_ids, found.site_of.tolist())}) == 18


def test_columns_that_are_facts_of_a_site(slides):
    slides.header += ",scanner,stain"
    for n in range(12):
        slides.slide(f"p{n}", "AB"[n % 2], ["Leica", "Hamamatsu"][n % 2], str(n % 3))
    assert slides.load().about["site_columns"] == {"scanner": ["Leica", "Hamamatsu"]}


def test_columns_of_patients(slides):
    slides.two_sites()
    for name in ("group", "case_id"):
        slides.header = f"bag,label,{name},site"
        found = slides.load()
        assert found.about["patients"] == f"column {name!r}" and len(set(found.patient_ids)) == 10
        assert not any(text.startswith("WARNING") for text in found.summary)
    slides.header = "bag,label,whatever,site"
    alone = slides.load()
    assert alone.patient_ids == alone.case_ids and alone.about["warnings"][0] == line(alone, "WARNING: NO PATIENTS")
    assert slides.load(patient_column="whatever").patient_ids[:2] == ("A0", "A0")


def test_patients_of_one_number_at_two_sites(slides):
    for n in range(8):
        slides.slide(f"{n % 4}", "AB"[n // 4])
    assert slides.faults()[0].startswith("patient 0: at A and B; one client per patient expected")
    assert len(set(slides.load(patients_per_site=True).patient_ids)) == 8


def test_tcga_barcodes_tell_patient_and_hospital(slides):
    slides.header = "bag,label"
    for n in range(8):
        slides.slide(name=f"h5/TCGA-{'05' if n < 4 else 'AB'}-{4240 + n // 2}-01Z-00-DX{n}.0A-1B.npz")
        slides.rows[-1] = slides.rows[-1][:2]
    found = slides.load()
    assert found.sites == ("05", "AB") and found.patient_ids[:3] == ("TCGA-05-4240",) * 2 + ("TCGA-05-4241",)
    assert "tissue source sites of TCGA barcodes" in line(found, "clients:") and not found.about["warnings"]
    for row in slides.rows:  # CLAM's ids have no ending
        row[0] = row[0].removesuffix(".npz")
    assert slides.load().case_ids == found.case_ids
    slides.slide()
    slides.rows[-1] = slides.rows[-1][:2]
    with pytest.raises(UserError, match=r"no column 'site' in metadata.csv, and files are not all named"):
        slides.load()
    assert len(slides.load(partition="iid", clients=2).sites) == 2


def test_auto_takes_sites_where_they_are_told(slides):
    slides.two_sites()
    found = slides.load(partition="auto")
    assert found.sites == ("A", "B") and found.about["partition"] == "by the column 'site'"
    assert len(set(slides.load(partition="auto", patients_per_site=True).patient_ids)) == 10
    slides.header = "bag,label,patient,Site"
    with pytest.raises(UserError, match="rename 'Site'"):
        slides.load(partition="auto")
    slides.header = "bag,label,patient,whatever"
    drawn = slides.load(partition="auto", clients=2, alpha=5.0)
    assert drawn.sites == ("client_0", "client_1") and drawn.about["partition"].startswith("drawn: Dirichlet, alpha 5")
    assert drawn.site_of.tolist() == slides.load(partition="dirichlet", clients=2, alpha=5.0).site_of.tolist()
    with pytest.raises(UserError, match=r"data.patients_per_site: needs sites, there is no column 'site'"):
        slides.load(partition="auto", patients_per_site=True)
    slides.header, slides.rows = "bag,label", []
    for n in range(8):
        slides.slide(name=f"TCGA-{'05' if n < 4 else 'AB'}-{4240 + n // 2}-01Z-00-DX{n}.npz")
        slides.rows[-1] = slides.rows[-1][:2]
    coded = slides.load(partition="auto")
    assert coded.sites == ("05", "AB") and "tissue source sites" in coded.about["partition"]


def test_a_bag_with_two_labels(slides):
    slides.two_sites()
    for n in (1, 3):  # of the labels b, b
        (slides.root / f"s0{n}.npz").write_bytes((slides.root / "s00.npz").read_bytes())
    found = slides.load()
    text = "WARNING: 1 bags have different labels, e.g. s00.npz (a) and s01.npz (b)"
    assert line(found, "WARNING: 1 bags have") == text and found.about["warnings"] == [text]


def test_columns_win_over_barcodes(slides):
    for n in range(8):
        slides.slide(f"p{n // 2}", "AB"[n // 4], name=f"TCGA-05-{4240 + n}-01Z.npz")
    found = slides.load()
    assert found.sites == ("A", "B") and found.patient_ids[:3] == ("p0", "p0", "p1")


def test_a_folder_per_class_without_a_table(slides):
    for n in range(8):
        slides.put(
            f"{'tumour' if n % 2 else 'normal'}/TCGA-0{n % 4}-000{n}.npz", np.full((n + 1, WIDTH), n, np.float32)
        )
    slides.put("tumour/Thumbs.db", b"x")
    found = slides_in(slides, partition="iid", clients=2)
    assert found.classes == ("normal", "tumour") and found.arrays["y"].tolist() == [0] * 4 + [1] * 4
    assert found.arrays["instances"].tolist() == [1, 5, 3, 7, 2, 6, 4, 8] and found.patient_ids[0] == "TCGA-00-0000"
    assert slides_in(slides, test_share=0.5, min_site_size=2).sites == ("00", "01", "02", "03")


def slides_in(slides, **options):
    return slide_bags(root=str(slides.root), **options)


def test_exact_copies_are_counted(slides):
    slides.two_sites()
    (slides.root / "s19.npz").write_bytes((slides.root / "s00.npz").read_bytes())
    found = slides.load()
    assert found.about["copies"]["images"] == 1 and found.about["copies"]["across_clients"] == 1
    assert "1 bags are exact copies of others" in "\n".join(found.summary)
