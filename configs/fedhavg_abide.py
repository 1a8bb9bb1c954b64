"""FedHAvg on ABIDE I: hyperbolic aggregation of connectome classifiers (4 sites, 5 folds, 100 rounds).

One run (one method, all folds and seeds as replicas):
    python -m fedjax_seg.main --config=configs/fedhavg_abide.py:released,ext --config.data.root=PCP --workdir=runs/ext
The paper's tables (every run a sub-folder; the same command resumes; ends with tables and figures):
    python -m launch.sweep --config=configs/fedhavg_abide.py --config.data.root=PCP --workdir=runs/table3
PCP is a folder with the phenotypic CSV and, anywhere below it, the `<FILE_ID>_rois_<atlas>.1D` files.

Words after the colon, separated by commas:
  profile   paper | released
  method    fedavg | fedavg_weighted | median | trimmed | ext_delta | gbar_delta | ext | gbar
            also geometric_median | krum | multi_krum | clipped (not in the paper)
  grid      table3 (default) | table2 | curvature | corruption: what launch.sweep runs; a profile word narrows it
  variant   all17 (all 17 sites instead of the largest four)
  c=, gamma=, corrupt=KIND  for one run: curvature, scale, and KIND of label_flip | scale | random at NYU

The two profiles, line by line:
                     paper (as printed)                  released (what the authors' code does)
  momentum           0.9                                 0.9, Nesterov
  momentum buffer    reset every round (not stated)      kept per client over all rounds
  loss               cross entropy of the logits         cross entropy of the softmax (double softmax)
  client order       NYU, UM, UCLA, USM (Table 1)        NYU, UM, USM, UCLA; the gyro mean depends on it
  margin             artanh's argument <= 1 - 1e-5       radius <= 1/sqrt(c) - 1e-5
  c, gamma weights   2, 1                                2, 1
  c, gamma on delta  2, 100                              4, 1000 (the command-line defaults)
Both: lr 1e-4, weight decay 1e-3, batch 16, 1 local epoch, Pearson r, PyTorch's initialisation, lower median (torch's;
the usual median equals the trimmed mean at four clients, and the paper prints different rows for the two).

Source: the paper's section 4 and Table 3; facts of the released code: github.com/Jiyao96/FedHAvg at 45e2bc4.
"""

from fedjax_seg import config as configuration
from fedjax_seg.core import checks

PROFILES = ("paper", "released")
# word: (name in the tables, aggregator, options)
METHODS = {
    "fedavg": ("FedAvg", "mean", {}),
    "fedavg_weighted": ("FedAvg-weighted", "weighted_mean", {}),
    "median": ("Median", "median", {"tie": "lower"}),
    "trimmed": ("Trimmed-mean", "trimmed_mean", {"alpha": 0.25}),
    "ext_delta": ("FedHAvg-ext on Δ", "extrinsic_mean", {"of": "updates"}),
    "gbar_delta": ("FedHAvg-gbar on Δ", "gyro_mean", {"of": "updates"}),
    "ext": ("FedHAvg-ext", "extrinsic_mean", {"of": "weights"}),
    "gbar": ("FedHAvg-gbar", "gyro_mean", {"of": "weights"}),
}
BEYOND = {
    "geometric_median": ("Geometric median", "geometric_median", {}),
    "krum": ("Krum", "krum", {"f": 1}),
    "multi_krum": ("Multi-Krum", "multi_krum", {"f": 1, "m": 2}),
    "clipped": ("Norm-clipped mean", "clipped_mean", {"clip": 0.05}),
}
SITES = {"paper": ("NYU", "UM", "UCLA", "USM"), "released": ("NYU", "UM", "USM", "UCLA")}
DELTA = {"paper": {"c": 2.0, "gamma": 100.0}, "released": {"c": 4.0, "gamma": 1000.0}}
GRIDS = ("table3", "table2", "curvature", "corruption")
CURVATURES, GAMMAS = (0.5, 1.0, 2.0, 4.0), (0.1, 1.0, 10.0)


def get_config(words: str = "table3"):
    """The config of one run, or of a grid (see the module's docstring)."""
    given = [w.strip() for w in words.split(",") if w.strip()]
    known = {*PROFILES, *METHODS, *BEYOND, *GRIDS, "all17"}
    options = dict(w.split("=", 1) for w in given if "=" in w)
    plain = [w for w in given if "=" not in w]
    for word in (*plain, *options):
        if word not in known and word not in ("c", "gamma", "corrupt"):
            raise checks.UserError(f"--config: unknown word {word!r};{checks.suggestion(word, known)}")
    profiles = [w for w in plain if w in PROFILES] or list(PROFILES)
    methods = [w for w in plain if w in METHODS or w in BEYOND]
    grid = next((w for w in plain if w in GRIDS), None if methods else "table3")
    c = _run(profiles[0], methods[0] if methods else "fedavg", options, "all17" in plain, "table2" in plain)
    if grid:
        c.grid = _grid(grid, profiles, methods, ("all17",) if "all17" in plain else ())
    return c


def _run(profile: str, method: str, options: dict[str, str], all17: bool, cross_site: bool):
    released = profile == "released"
    c = configuration.base()
    c.label, aggregator, settings = (METHODS | BEYOND)[method]
    c.group = profile
    c.rounds, c.batch_size, c.local_epochs, c.eval_every = 100, 16, 1, 5
    c.seeds = (0, 1)
    c.protocol = "cross_site" if cross_site else "federated"
    c.data = configuration.slot("data", "abide", root="", sites=() if all17 else SITES[profile])
    if all17:
        c.data.min_site_size = 10  # CMU keeps 2 subjects after quality control: too few for five folds
    c.model = configuration.slot("model", "mlp", hidden=(1024, 256, 64))
    c.task = configuration.slot("task", "classification", double_softmax=released)
    c.client = configuration.slot(
        "client",
        "local_sgd",
        lr=1e-4,
        momentum=0.9,
        nesterov=released,
        weight_decay=1e-3,
        keep_optimizer=released,
    )
    if aggregator in ("extrinsic_mean", "gyro_mean"):
        settings = {"c": 2.0, "gamma": 1.0} | settings | {"margin_on": "radius" if released else "argument"}
        if settings["of"] == "updates":
            settings |= DELTA[profile]
        for name in ("c", "gamma"):
            if name in options:
                settings[name] = float(options[name])
                c.label += f", {name}={options[name]}"
    c.aggregator = configuration.slot("aggregator", aggregator, **settings)
    if "corrupt" in options:
        c.corruption.kind, c.corruption.site = options["corrupt"], "NYU"
        c.corruption.factor = {"scale": -5.0, "random": 10.0}.get(options["corrupt"], 1.0)
        c.group = f"{profile}, NYU {options['corrupt']}"
    return c


def _grid(grid: str, profiles: list[str], methods: list[str], variant: tuple[str, ...]) -> tuple[str, ...]:
    runs: list[tuple[str, ...]] = []
    for profile in profiles:
        if grid == "table3":
            runs += [(profile, m) for m in methods or METHODS]
        elif grid == "table2":
            runs += [(profile, "table2", "fedavg")]
        elif grid == "curvature":
            runs += [
                (profile, m, f"c={c}", f"gamma={g}")
                for m in methods or ("ext", "gbar")
                for c in CURVATURES
                for g in GAMMAS
            ]
        else:
            kinds = ("label_flip", "scale", "random")
            runs += [(profile, m, f"corrupt={k}") for k in kinds for m in methods or (*METHODS, *BEYOND)]
    return tuple(",".join((*run, *variant)) for run in runs)
