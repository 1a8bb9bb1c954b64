"""Synthetic tiles of lung histology in haematoxylin and eosin, one stain per hospital, as an image folder."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_seg.core import checks
from fedjax_seg.synthesis import histology_fields, histology_stain, histology_stroma, histology_tissue, png
from fedjax_seg.synthesis.contact_sheet import figure, save_figure
from fedjax_seg.synthesis.histology_stain import Stain
from fedjax_seg.synthesis.storage import prepared, write_whole

GENERATOR = "histology tiles (procedural; no real patient, nothing fitted to data)"
VERSION = 1  # raised whenever the same options give other pixels
TABLE, SHEET = "metadata.csv", "contact_sheet.png"
FIELD_UM = 96.0  # side of a tile at zoom 1
_ZOOM = (0.8, 1.25)
_PLAN, _STAIN, _SLIDE, _TILE = range(4)  # what a random number is for


class Tile(NamedTuple):
    """Where a tile belongs; hospital, kind (number of the class), slide and number count from 0."""

    hospital: int
    kind: int
    slide: int
    number: int


def histology(
    folder: str | Path,
    *,
    size: int = 64,
    hospitals: tuple[int, ...] = (160, 140, 120, 120, 120, 120, 110, 110),
    slides: tuple[int, ...] = (3, 6),
    classes: tuple[str, ...] = tuple(histology_tissue.TISSUES),
    skew: float = math.inf,
    stain: float = 1.0,
    regions: int = 4,
    seed: int = 0,
) -> Path:
    """Writes tiles `hospital_1/benign/h1_benign_01_1.png`, ... and `metadata.csv`: image, label, group, site, region.

    Procedural lung: alveoli (benign), glands (adenocarcinoma), solid sheets with keratin (squamous). A group is a
    slide, of one hospital and class, with its own size of nuclei, strength of stain and collagen. The picture
    `contact_sheet.png` shows a tile of every class and hospital.

    Source: the three lung classes of LC25000 (Borkowski et al. 2019); the stain of Ruifrok & Johnston 2001. Nothing is
    fitted to data.

    A tile depends on (seed, hospital, class, slide, number, size) alone and shows 77 to 120 micrometres; another size
    shows other tiles of the same scale. The same options give the same bytes, with the same numpy, scipy and zlib.
    What a stopped call has written is kept: the same call completes it.

    Args:
      folder: new, empty, or holding an output of the same options.
      size: pixels per side.
      hospitals: tiles of each hospital.
      slides: least and greatest number of tiles of a slide; the last slide of a class and hospital may have fewer.
      classes: at least two of benign, adenocarcinoma, squamous.
      skew: Dirichlet parameter of each hospital's mix of classes, inf = balanced; small ones leave classes out.
      stain: how far hospitals differ in stain, light, blur and noise: 0 = not at all, 2 = twice the usual.
      regions: into how many regions the hospitals are cut in their order; at most one each.
      seed: at least 0.

    Returns: the folder, to be read by `data.make('histopathology', root=folder)`.
    Raises: UserError on an option, or where the folder holds anything else or cannot be written.
    """
    checks.number("synthesis.size", size, low=32, high=1024, integer=True)
    checks.number("synthesis.stain", stain, low=0, high=2)
    checks.number("synthesis.regions", regions, low=1, integer=True)
    checks.number("synthesis.seed", seed, low=0, high=2**31 - 1, integer=True)
    _check_lists(hospitals, slides, classes)
    if skew != math.inf:
        checks.number("synthesis.skew", skew, above=0.0)
    stains = [histology_stain.hospital(_random(seed, _STAIN, k), stain) for k in range(len(hospitals))]
    about = {
        "generator": GENERATOR,
        "synthetic": True,
        "name": "histology",
        "version": VERSION,
        "seed": seed,
        "size": size,
        "hospitals": list(hospitals),
        "slides": list(slides),
        "classes": list(classes),
        "skew": "balanced" if skew == math.inf else skew,
        "stain": stain,
        "regions": regions,
        "stain_values": {_site(k, len(hospitals)): s.described() for k, s in enumerate(stains)},
    }
    root = prepared(Path(folder), about)
    table = root / TABLE
    if table.is_file():  # written last
        return root
    tiles = plan(hospitals, slides, classes, skew, seed)
    region = [
        r
        for r, part in enumerate(np.array_split(np.arange(len(hospitals)), min(regions, len(hospitals))))
        for _ in part
    ]
    lines, first = ["image,label,group,site,region"], dict[tuple[int, int], np.ndarray]()
    for tile in tiles:
        site, label = _site(tile.hospital, len(hospitals)), classes[tile.kind]
        group = f"{site.replace('hospital_', 'h')}_{label}_{tile.slide + 1:02d}"
        name = f"{site}/{label}/{group}_{tile.number + 1}.png"
        lines.append(f"{name},{label},{group},{site},region_{region[tile.hospital] + 1}")
        wanted = (tile.kind, tile.hospital) not in first
        if wanted or not (root / name).is_file():  # every file is written whole or not at all
            pixels = draw(tile, label, stains[tile.hospital], size, seed)
            write_whole(root / name, png.encode(pixels))
            first.setdefault((tile.kind, tile.hospital), pixels)
    _save_sheet(root / SHEET, first, len(hospitals), classes)
    write_whole(table, "".join(f"{line}\n" for line in lines).encode())
    return root


def plan(hospitals: Sequence[int], slides: Sequence[int], classes: Sequence[str], skew: float, seed: int) -> list[Tile]:
    """All tiles: each hospital's classes by largest remainders of its mix, cut into slides."""
    tiles = []
    for hospital, n in enumerate(hospitals):
        random = _random(seed, _PLAN, hospital)
        mix = np.full(len(classes), 1 / len(classes)) if skew == math.inf else random.dirichlet([skew] * len(classes))
        counts = np.floor(n * mix + 1e-9).astype(int)
        turn = np.roll(np.arange(len(classes)), hospital)  # ties go to another class in the next hospital
        most = turn[np.argsort(-(n * mix - counts)[turn].round(9), kind="stable")]
        counts[most[: n - counts.sum()]] += 1
        for kind, count in enumerate(counts.tolist()):
            slide = 0
            while count > 0:
                own = min(count, int(random.integers(slides[0], slides[1] + 1)))
                tiles += [Tile(hospital, kind, slide, number) for number in range(own)]
                count, slide = count - own, slide + 1
    return tiles


def draw(tile: Tile, label: str, stain: Stain, size: int, seed: int) -> np.ndarray:
    """uint8 [size, size, 3]; one tile of class `label`, by itself."""
    kind = list(histology_tissue.TISSUES).index(label)
    slide = histology_stroma.slide(_random(seed, _SLIDE, tile.hospital, kind, tile.slide))
    random = _random(seed, _TILE, tile.hospital, kind, tile.slide, tile.number)
    zoom = np.exp(random.uniform(*np.log(_ZOOM)))
    where = histology_fields.grid(size, FIELD_UM / zoom)
    amounts = histology_tissue.amounts(random, where, slide, label)
    return histology_stain.scan(random, stain, *amounts, where.pixel)


def _check_lists(hospitals: Sequence[int], slides: Sequence[int], classes: Sequence[str]) -> None:
    if not hospitals:
        raise checks.UserError("synthesis.hospitals: () given, the number of tiles of at least one hospital expected")
    for k, n in enumerate(hospitals):
        checks.number(f"synthesis.hospitals: hospital {k + 1}", n, low=1, high=99999, integer=True)
    if len(slides) != 2:
        raise checks.UserError(f"synthesis.slides: {slides!r} given, least and greatest number of tiles expected")
    checks.number("synthesis.slides: least", slides[0], low=1, high=1000, integer=True)
    checks.number("synthesis.slides: greatest", slides[1], low=slides[0], high=1000, integer=True)
    for name in classes:
        checks.lookup(histology_tissue.TISSUES, name, "synthesis.classes")
    if len(set(classes)) != len(classes) or len(classes) < 2:
        raise checks.UserError(f"synthesis.classes: {tuple(classes)!r} given, at least two, each once, expected")


def _random(seed: int, *path: int) -> np.random.Generator:
    # Trailing zeros would not count: [1, 2] and [1, 2, 0] are one seed to numpy.
    return np.random.default_rng([seed, *(n + 1 for n in path)])


def _site(hospital: int, hospitals: int) -> str:
    return f"hospital_{hospital + 1:0{len(str(hospitals))}d}"


def _save_sheet(path: Path, tiles: dict[tuple[int, int], np.ndarray], hospitals: int, classes: Sequence[str]) -> None:
    """A picture of one tile of every class (rows) and hospital (columns, the first 12); grey where there is none."""
    across, side, gap = min(hospitals, 12), next(iter(tiles.values())).shape[0], 2
    wall = np.full((len(classes) * (side + gap) - gap, across * (side + gap) - gap, 3), 200, np.uint8)
    for (kind, hospital), pixels in tiles.items():
        if hospital < across:
            row, column = kind * (side + gap), hospital * (side + gap)
            wall[row : row + side, column : column + side] = pixels
    chart = figure(1.1 * across + 0.6, 1.1 * len(classes) + 0.4)
    axis = chart.subplots()
    axis.imshow(wall, interpolation="nearest")
    centres = lambda n: [i * (side + gap) + side / 2 for i in range(n)]
    axis.set_xticks(centres(across), [f"hospital {k + 1}" for k in range(across)], fontsize=7)
    axis.set_yticks(centres(len(classes)), classes, fontsize=7, rotation=90, va="center")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    save_figure(path, chart)
