"""What a privacy budget costs: utility against the epsilon of whole runs, for every mechanism with a proof.

All of it on synthetic sites (no download; 97 runs, of which 26 with n = 6 and 33 took 18 minutes on two busy CPU cores;
the others were not run together): table, figure and the feasibility law:
    python -m launch.sweep --config=configs/privacy_utility.py --workdir=runs/privacy
One run, and one size of federation:
    python -m fedjax_seg.main --config=configs/privacy_utility.py:ref,n=33,eps=4 --workdir=runs/ref
    python -m launch.sweep --config=configs/privacy_utility.py:n=200 --workdir=runs/n200
Real data: ABIDE (a PCP folder with NYU, UM, UCLA, USM) and Decathlon Task04 (T04; long, on demand):
    python -m launch.sweep --config=configs/privacy_utility.py:abide --config.data.root=ABIDE --workdir=runs/abide
    python -m launch.sweep --config=configs/privacy_utility.py:hippocampus --config.data.root=T04 --workdir=runs/hip

Words after the colon, separated by commas: a variant, sizes, budgets, methods. Several of a kind make a grid.
  variant      data                                        clients  model               parameters  rounds
  synthetic    connectomes of 8 ROIs, 24 subjects a site   n        linear, 28 features 58          20
  ci           the same, 8 subjects a site                 6        linear              58          2
  abide        ABIDE, 111 ROIs (6,105 features)            4        linear              12,212      20
  hippocampus  partitioning_12.csv                         12       resunet3d, width 6  about 1e5   20
  n=6|33|200   sites of the synthetic federation (default grid: n=6, 33 and 200)
  eps=VALUE    TOTAL epsilon of the run at delta 1e-5 (default grid: 1, 4 and 10)

  method       what it is                                                        whom it protects  who comes
  fedavg       no privacy: the line to compare with                              nobody            all
  dp_fedavg    clipped updates, noise on their sum                               hospitals         all
  adaptive     the same, the clip follows a private quantile (Andrew et al.)     hospitals         all
  sim_tight    SimAgg of clipped updates with its proven bound (1/√2 + 1/n) C    hospitals         all
  sim_2c       SimAgg with the bound 2 C                                         hospitals         all
  ref          Ref-SimAgg: similarity to what was released before                hospitals         all
  ref_zero     Ref-SimAgg with the reference 0                                   hospitals         all
  ball         FedHAvg with noise inside the Poincare ball                       hospitals         all
  cyclic       dp_fedavg, a fixed order of the sites in windows of n/3           hospitals         a third
  banded       the same schedule with noise correlated over rounds               hospitals         a third
  local_dp     noise before anything leaves a hospital                           hospitals         all
  dp_sgd_patient  DP-SGD inside every hospital, unit = patient; not of volumes   patients          all

Equal epsilon: the noise multiplier of every row is computed from config.privacy.target_epsilon for the rounds and the
schedule of the run. All rows about hospitals are zero-out (a hospital's update becomes 0), but local_dp, which is
replace-one by its nature. dp_sgd_patient promises something else, to patients: it is what to do instead where nothing
about hospitals can be learned, and not a rival at equal terms.

Expect the feasibility law: the signal of one release is at most n / (z √d) of its noise. Twenty releases at epsilon 4
want z = 4.84, so n = 6 gives 0.16, n = 33 gives 0.90, n = 200 gives 5.4 at 58 parameters. Measured (three seeds):
at n = 33 and epsilon 4 DP-FedAvg has .918, Ref-SimAgg .912 and SimAgg .593 of FedAvg's .946; at n = 6 they have .667,
.611 and .514 of .951. On `abide` nothing about hospitals learns up to epsilon 100. `adaptive` is left out of the grids
wherever its count of clients would drown in the noise (n = 6, and n = 33 below epsilon 10), as the rule itself refuses.
SimAgg's sensitivity does not shrink with n, so its rows stay behind at every size.
"""

from fedjax_seg import config as configuration
from fedjax_seg.core import checks

METHODS = {
    "fedavg": "FedAvg",
    "dp_fedavg": "DP-FedAvg",
    "adaptive": "DP-FedAvg, adaptive clip",
    "sim_tight": "SimAgg, (1/√2+1/n)C",
    "sim_2c": "SimAgg, 2C",
    "ref": "Ref-SimAgg",
    "ref_zero": "Ref-SimAgg, reference 0",
    "ball": "DP-FedHAvg in the ball",
    "cyclic": "DP-FedAvg, cyclic",
    "banded": "banded noise, cyclic",
    "local_dp": "local DP",
    "dp_sgd_patient": "DP-SGD, patients",
}
VARIANTS = ("synthetic", "ci", "abide", "hippocampus")
SIZES, BUDGETS = (6, 33, 200), (1.0, 4.0, 10.0)
ABIDE_SITES = ("NYU", "UM", "UCLA", "USM")
LARGEST = 10_000  # clients, or epsilon
LR, CLIP = 0.5, 0.3  # five steps of this rate give updates of about this norm
CLEAR_COUNT = 155  # n times epsilon of 20 rounds below which adaptive clipping is refused: its count is mostly noise


def get_config(words: str = "synthetic"):
    """The config of one run, or of a grid (see the module's docstring)."""
    given = [w.strip() for w in words.split(",") if w.strip()]
    sizes = [int(_number(w)) for w in given if w.startswith("n=")]
    budgets = [_number(w) for w in given if w.startswith("eps=")]
    plain = [w for w in given if not w.startswith(("n=", "eps="))]
    for word in plain:
        if word not in (*VARIANTS, *METHODS):
            raise checks.UserError(f"--config: unknown word {word!r};{checks.suggestion(word, (*VARIANTS, *METHODS))}")
    variant = next((w for w in plain if w in VARIANTS), "synthetic")
    if sizes and variant != "synthetic":
        raise checks.UserError(f"--config: n={sizes[0]} given for {variant!r}, whose sites are given; leave it out")
    methods = [w for w in plain if w in METHODS]
    if variant == "hippocampus":
        if "dp_sgd_patient" in methods:
            raise checks.UserError(
                "--config: dp_sgd_patient given for 'hippocampus': not there for volumes; leave it out"
            )
        methods = methods or [m for m in METHODS if m not in ("adaptive", "dp_sgd_patient")]
    every = sizes or (list(SIZES) if variant == "synthetic" else [{"ci": 6, "abide": 4, "hippocampus": 12}[variant]])
    runs = [
        (m, n, e)
        for n in every
        for m in methods or METHODS
        for e in ([0.0] if m == "fedavg" else budgets or BUDGETS)
        if not (m == "adaptive" and n * e < CLEAR_COUNT and not methods)
    ]
    c = _run(variant, *runs[0])
    if len(runs) > 1:
        size = lambda n: f",n={n}" if variant == "synthetic" else ""
        c.grid = tuple(f"{variant},{m}{size(n)}{f',eps={e:g}' if e else ''}" for m, n, e in runs)
    return c


def _number(word: str) -> float:
    name, _, text = word.partition("=")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < LARGEST or (name == "n" and value != int(value)):
        raise checks.UserError(
            f"--config: {word}: a number above 0, below {LARGEST}, expected, e.g. {'n=33' if name == 'n' else 'eps=4'}"
        )
    return value


def _run(variant: str, method: str, n: int, epsilon: float):
    c = configuration.base()
    c.group = f"n = {n}" if variant == "synthetic" else variant if variant == "ci" else f"{variant}, n = {n}"
    c.label = f"{METHODS[method]}, eps {epsilon:g}" if epsilon else METHODS[method]
    c.rounds, c.seeds, c.folds = 20, (0, 1, 2), (0,)
    c.eval_every = c.rounds
    rate, clip = {"hippocampus": (0.03, 0.5)}.get(variant, (LR, CLIP))
    if variant == "hippocampus":
        _volumes(c)
    else:
        _connectomes(c, variant, n)
    c.privacy.target_epsilon = epsilon
    momentum = 0.9 if variant == "hippocampus" else 0.0
    c.client = configuration.slot("client", "local_sgd", lr=rate, momentum=momentum)
    c.aggregator = _aggregator(method, clip)
    if method in ("cyclic", "banded"):
        c.sampler = configuration.slot("sampler", "randomized_order", size=max(1, n // 3))
    if method == "dp_sgd_patient":
        c.batch_sampling = "poisson"
        c.client = configuration.slot("client", "dp_sgd", lr=rate, clip=1.0, unit="patient", noise_multiplier=1.0)
    return c


def _connectomes(c, variant: str, n: int) -> None:
    c.local_epochs, c.batch_size = 5, 32
    c.model = configuration.slot("model", "mlp", hidden=())
    c.task = configuration.slot("task", "classification")
    if variant == "abide":
        c.data = configuration.slot("data", "abide", root="", sites=ABIDE_SITES)
        return
    c.data = configuration.slot("data", "abide", root="", sites=(), folds=3)
    sites = tuple((f"S{k:03d}", 8 if variant == "ci" else 24) for k in range(n))
    small = {"length": 24} if variant == "ci" else {"length": 120}
    c.synthesis = configuration.slot(
        "synthesis", "connectomes", sites=sites, rois=8, class_effect=1.0, site_effect=0.3, **small
    )
    if variant == "ci":
        c.rounds, c.eval_every, c.seeds = 2, 2, (0,)


def _volumes(c) -> None:
    """As configs/dp_simagg_fets.py:hippocampus."""
    c.local_epochs, c.batch_size = 1, 1
    c.data = configuration.slot(
        "data", "msd", root="", partition="partitioning_12.csv", label_scheme="plain", patch=(36, 52, 36), patches=1,
        normalise="image", sampling="balanced", background=0.2,
    )  # fmt: skip
    c.model = configuration.slot("model", "resunet3d", width=6, depth=2, classes=3, tracked=False, dropout=0.0)
    c.task = configuration.slot("task", "volumetric", tile=(36, 52, 36), overlap=0.25, blend="gaussian")


def _aggregator(method: str, clip: float):
    slot = lambda name, **options: configuration.slot("aggregator", name, **options)
    z = {"noise_multiplier": 1.0}  # replaced by the one that config.privacy.target_epsilon needs
    if method in ("dp_fedavg", "cyclic"):
        return slot("dp_fedavg", clip=clip, **z)
    if method in ("sim_tight", "sim_2c"):
        bound = "tight" if method == "sim_tight" else "2C"
        return slot("private_sim_agg", clip=clip, bound=bound, adjacency="zero-out", **z)
    if method in ("ref", "ref_zero"):
        return slot("ref_sim_agg", tau=clip, reference="released" if method == "ref" else "zero", **z)
    if method == "ball":
        # a mean that the noise threw out of the ball comes back as an update of about the clip's norm
        return slot("dp_fedhavg", c=1.0, gamma=1.0 / clip, margin=0.25, **z)
    if method == "adaptive":
        return slot("adaptive_dp_fedavg", clip=clip, **z)
    if method == "banded":
        return slot("banded_dp_fedavg", clip=clip, **z)
    if method == "local_dp":
        return slot("local_dp", clip=clip, **z)
    return slot("weighted_mean")
