"""ABIDE: resting-state functional connectivity, autism (ASD) against control, one client per acquisition site."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.data import cohort_report
from fedjax_seg.data import folds as folding
from fedjax_seg.data.federated import FederatedData, validate
from fedjax_seg.data.pcp_series import PATTERN, Connectomes, find_series, read_connectomes, walk
from fedjax_seg.data.phenotypic import FD_COLUMN, Selection, Subject, cohort, narrow, read_phenotypic


def abide(
    *,
    root: str,
    phenotypic: str = "",
    series: str = "",
    atlas: str = "",
    sites: Sequence[str] = ("NYU", "UM", "UCLA", "USM"),
    max_fd: float = 0.15,
    min_site_size: int = 0,
    fisher_z: bool = False,
    bad_roi: str = "zero",
    keep_edge_mask: bool = False,
    folds: int = 5,
    fold_seed: int = 0,
    fold_file: str = "",
    strict: bool = False,
) -> FederatedData:
    """Reads a PCP folder: the phenotypic CSV and `<FILE_ID>_rois_<atlas>.1D` files, and checks all of it.

    Source: FedHAvg, data section and Table 1; the rule is `phenotypic.cohort`. Deviation: Pearson r by default (the
    paper does not name its transform); folds are drawn here unless given (the authors' fold file is not public).

    Args:
      root: the folder that holds both.
      phenotypic: the CSV; '' = the only `Phenotypic*.csv` below root. Relative to the working directory or to root.
      series: folder searched recursively for the series; '' = root.
      atlas: '' = the only one found. The number of ROIs R is read from the files and is the same in all.
      sites: client order (it matters to the gyro mean); () = all, largest cohort in the table first, ties by name.
      max_fd: limit of the mean framewise displacement in mm, inclusive; inf = no limit.
      min_site_size: sites with fewer usable subjects are dropped and counted.
      fisher_z: features are arctanh r instead of r.
      bad_roi: what a constant ROI or one with a NaN cell does: 'zero' = its edges are 0; 'drop' = drops the subject.
      keep_edge_mask: keeps `edge_mask` bool [N, R(R-1)/2] among the arrays, False where an edge was zeroed.
      folds: at least 2; a test fold of one class is allowed and noted.
      fold_seed: of the stratified folds.
      fold_file: JSON {site: [FILE_IDs of fold 0, ...]}; must list exactly the cohort. '' = drawn with fold_seed.
      strict: a subject of the cohort without a series file is a fault; otherwise it is listed and counted.

    Returns: x float32 [N, R(R-1)/2], y int32 [N] (1 = ASD, 0 = control); sorted by site, then FILE_ID.
    Raises: UserError on an option or a missing file; DataFaults with all the faults of the tree.
    """
    checks.number("data.min_site_size", min_site_size, low=0, integer=True)
    checks.number("data.folds", folds, low=2, integer=True)
    checks.number("data.fold_seed", fold_seed, low=0, integer=True)
    checks.one_of("data.bad_roi", bad_roi, ("zero", "drop"))
    base = _folder(root, "data.root", None)
    table = read_phenotypic(_phenotypic_path(base, phenotypic))
    selection = cohort(table.subjects, max_fd=max_fd, sites=sites)
    atlas, paths = find_series(_folder(series, "data.series", base) if series else base, atlas)
    faults = _row_faults(selection, table.path)
    selection, missing = _with_series(selection, paths)
    if strict:
        faults += [f"{s.file_id}: no {s.file_id}_rois_{atlas}.1D; fetch it, or unset data.strict" for s in missing]
    searched = selection.kept
    connectomes = read_connectomes({s.file_id: paths[s.file_id] for s in searched}, fisher_z=fisher_z)
    faults += connectomes.faults
    selection, too_small = _usable(selection, connectomes, bad_roi, min_site_size)
    faults += _size_faults(selection, folds)
    if faults:
        raise checks.DataFaults(f"data.abide: {base}", faults)
    selection = _by_site(selection)
    dealt = _folds(selection, folds, fold_seed, fold_file, base)
    about = {
        "rule": "; ".join(step.name for step in selection.steps[1:]) + "; numeric sub-sites merged",
        "fd_column": FD_COLUMN,
        "site_order": "as given" if sites else "largest cohort in the table first, ties by name",
        "atlas": atlas,
        "features": "Fisher z" if fisher_z else "Pearson r",
        "bad_roi_rule": bad_roi,
        "phenotypic": {"file": table.path.name, "sha256": table.sha256, "delimiter": table.delimiter},
        "missing_series": {k: [s.file_id for s in missing if s.site == k] for k in sorted({s.site for s in missing})},
        "dropped_sites": too_small,
        "files_outside_cohort": len(set(paths) - {s.file_id for s in searched}),
        "folds": {"n": folds, "origin": fold_file or f"stratified by diagnosis, seed {fold_seed}"},
    }
    return _assemble(selection, connectomes, dealt, about, keep_edge_mask)


def _folder(given: str, option: str, base: Path | None) -> Path:
    if not given:
        tree = f"a phenotypic CSV and {PATTERN} files, in it or below"
        raise checks.UserError(f"{option}: no folder given; name the one with {tree}")
    path = _resolve(given, base)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise checks.UserError(f"{option}: {path} {what}; a folder expected with Phenotypic*.csv and {PATTERN} files")
    return path


def _resolve(given: str, base: Path | None) -> Path:
    path = Path(given).expanduser()
    return base / path if base is not None and not path.exists() and (base / path).exists() else path


def _phenotypic_path(base: Path, given: str) -> Path:
    if given:
        path = _resolve(given, base)
        if not path.is_file():
            raise checks.UserError(f"data.phenotypic: {path} is not a file; name the phenotypic CSV")
        return path
    found = [p for p in walk(base) if p.name.lower().startswith("phenotypic") and p.suffix.lower() == ".csv"]
    if not found:
        raise checks.UserError(
            f"data.phenotypic: no Phenotypic*.csv below {base}; put Phenotypic_V1_0b_preprocessed1.csv there or name it"
        )
    if len(found) > 1:
        raise checks.UserError(f"data.phenotypic: several below {base}: {', '.join(map(str, found))}; name one")
    return found[0]


def _row_faults(selection: Selection, path: Path) -> list[str]:
    return [f"{s.file_id}: {path} line {s.line}: {fault}" for s in selection.kept for fault in s.faults]


def _with_series(selection: Selection, paths: Mapping[str, Path]) -> tuple[Selection, tuple[Subject, ...]]:
    after = narrow(selection, "series found", lambda s: "" if s.file_id in paths else "no series file")
    if selection.kept and not after.kept:
        raise checks.UserError(
            f"data.series: none of the {len(selection.kept)} subjects of the cohort has a series file;"
            f" {len(paths)} files found, e.g. {next(iter(paths.values()))}; FILE_IDs like"
            f" {selection.kept[0].file_id!r} expected"
        )
    return after, tuple(s for s in selection.kept if s.file_id not in paths)


def _usable(
    selection: Selection, connectomes: Connectomes, bad_roi: str, min_site_size: int
) -> tuple[Selection, dict[str, int]]:
    """The steps after the series are read, and the sites that were too small with their sizes."""
    drop = bad_roi == "drop"
    bad = connectomes.bad_rois
    selection = narrow(selection, "usable", lambda s: "constant or NaN ROI" if drop and bad.get(s.file_id, 0) else "")
    sizes = _sizes(selection)
    small = {site: n for site, n in sizes.items() if n < min_site_size}
    if min_site_size:
        selection = narrow(
            selection,
            f"in sites of at least {min_site_size}",
            lambda s: "site too small" if s.site in small else "",
        )
    sites = tuple(site for site in selection.sites if site not in small)
    if not sites:
        raise checks.UserError(
            f"data.min_site_size: no site has {min_site_size} usable subjects"
            f" ({', '.join(f'{k} {n}' for k, n in sizes.items())}); lower it"
        )
    return selection._replace(sites=sites), small


def _sizes(selection: Selection) -> dict[str, int]:
    counts = Counter(s.site for s in selection.kept)
    return {site: counts[site] for site in selection.sites}


def _size_faults(selection: Selection, folds: int) -> list[str]:
    faults = []
    for site in selection.sites:
        persons = len({s.sub_id for s in selection.kept if s.site == site})
        why = Counter(reason for s, reason in selection.excluded if s.site == site)
        cure = "leave it out of data.sites, or set data.min_site_size to drop it"
        if persons == 0:
            reasons = ", ".join(f"{reason} {n}" for reason, n in why.most_common())
            faults.append(f"site {site}: no subject left ({reasons}); {cure}")
        elif persons < folds:
            faults.append(f"site {site}: {persons} subjects for {folds} folds; {cure}, or lower data.folds")
    return faults


def _by_site(selection: Selection) -> Selection:
    """The last step's subjects in the order of the arrays."""
    order = sorted(selection.kept, key=lambda s: (selection.sites.index(s.site), s.file_id))
    last = selection.steps[-1]._replace(subjects=tuple(order))
    return selection._replace(steps=(*selection.steps[:-1], last))


def _folds(selection: Selection, folds: int, seed: int, fold_file: str, base: Path) -> folding.Folds:
    members = {site: [s for s in selection.kept if s.site == site] for site in selection.sites}
    if not fold_file:
        return {
            site: folding.stratified_folds(
                [s.file_id for s in own],
                [s.sub_id for s in own],
                [s.diagnosis for s in own],
                folds=folds,
                seed=seed,
                site=site,
            )
            for site, own in members.items()
        }
    path = _resolve(fold_file, base)
    given = folding.read_fold_file(path, folds)
    faults = folding.fold_file_faults(
        given,
        {site: [s.file_id for s in own] for site, own in members.items()},
        {s.file_id: s.sub_id for s in selection.kept},
        {s.file_id: reason for s, reason in selection.excluded if s.file_id},
    )
    if faults:
        raise checks.DataFaults(f"data.fold_file: {path}", faults)
    return {site: given[site] for site in selection.sites}


def _assemble(
    selection: Selection,
    connectomes: Connectomes,
    dealt: folding.Folds,
    about: dict[str, Any],
    keep_edge_mask: bool,
) -> FederatedData:
    kept = selection.kept
    ids = tuple(s.file_id for s in kept)
    x = np.stack([connectomes.features[i] for i in ids])
    edge_ok = np.stack([connectomes.edge_ok[i] for i in ids])
    arrays = {"x": x, "y": np.array([s.diagnosis for s in kept], np.int32)}
    if keep_edge_mask:
        arrays["edge_mask"] = edge_ok
    affected = [i for i in ids if connectomes.bad_rois[i]]
    about = about | {
        "n_rois": connectomes.rois,
        "n_features": x.shape[1],
        "series_sha256": connectomes.sha256,
        "edges": {"total": edge_ok.size, "edge_ok": int(edge_ok.sum()), "zeroed": int((~edge_ok).sum())},
        "bad_rois": {i: connectomes.bad_rois[i] for i in affected},
        "table1": cohort_report.table1(selection),
        "flow": [{"step": step.name} | cohort_report.counts(step.subjects) for step in selection.steps],
    }
    data = FederatedData(
        arrays=arrays,
        case_ids=ids,
        patient_ids=tuple(s.sub_id for s in kept),
        sites=selection.sites,
        site_of=np.array([selection.sites.index(s.site) for s in kept], np.int32),
        splits=folding.synchronised_splits(dealt, {case: n for n, case in enumerate(ids)}),
        classes=("control", "ASD"),
        about=about,
        files=cohort_report.files(selection, connectomes, dealt),
        summary=cohort_report.summary(selection, connectomes, dealt, about),
    )
    validate(data)
    return data
