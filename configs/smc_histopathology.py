"""Cluster-based secure multi-party computation in federated learning for histopathology images.

The paper's system (Hosseini et al. 2022): K hospitals in M clusters of N = K/M; in every round each hospital cuts its
trained weights into N random portions, hands one to every neighbour of its cluster, and the server averages what the
hospitals then hold. Beside it: plain FedAvg, secure sums that do hide, and the paper's rival, noise on the weights.

All methods side by side (accuracy, F1, bytes, messages, hops, and what neighbours and the server can recover):
    python -m launch.sweep --config=configs/smc_histopathology.py:small --workdir=runs/smc
One method, on your own folder of tiles (see README: class folders, or a metadata.csv with image, label, group, site):
    python -m fedjax_seg.main --config=configs/smc_histopathology.py:smc,M=2 --config.data.root=TILES --workdir=runs/one
LC25000 lung histology (metadata.csv with image, label, group):
    python -m launch.sweep --config=configs/smc_histopathology.py:lc25000 --config.data.root=LC25000 --workdir=runs/lc

Words after the colon, separated by commas:
  variant  data                                               tiles  network     rounds  hospitals
  folder   yours (default); hospitals by its column 'site'    64x64  as below    20      as found, or K= drawn
  small    synthetic tiles, 8 hospitals with their own stains 64x64  as below    10      8
  ci       the same generator                                 32x32  4, 2 blocks 2       4
  lc25000  your folder of LC25000, groups of tiles dealt out  48x48  as below    10      8
           by Dirichlet(0.5)
Network: residual CNN, width 8, 4 blocks, group norm. Clients: Adam 3e-3 (x .8 a round),
batch 16, one local epoch.
  K=, M=, N=   hospitals (of drawn or synthetic federations), clusters, members; K/M need not be whole; N alone: M = K/N
               without M and N: clusters of 4 (2 for fewer than five hospitals); of your own folder, one cluster of all
  sigma=       of the noise on weights (methods noise and none other)

  method       what it is
  fedavg       plain mean of the weights: the server sees every hospital's
  smc          the paper's Algorithm 1: scalar portions within clusters. Hides nothing; shown with the leak
  chained      its reference [10]: one hospital after the other adds its weights (here to uniform words, so it is exact)
  additive     the same clusters, uniform shares modulo 2^32: the sum is exact, a share tells nothing
  secagg       pairwise and self masks with recovery of lost hospitals (Bonawitz et al. 2017)
  secagg_plus  the same on a sparse random graph (Bell et al. 2020)
  noise        local Gaussian noise on the trained weights, the paper's DP baseline [9]; states no epsilon
  local_dp     clipped updates with noise at every hospital, epsilon 10 a round, proven
  central_dp   DP-FedAvg: clipped updates, noise at the server, epsilon 10 a round, proven, inside a secure sum
  weighted     FedAvg weighted by examples, in additive shares: counts are hidden too
The default grid is all of them, noise at three sigmas.

Faithful: clusters drawn once, beta on the simplex of each cluster (Dirichlet(1); the paper does not state the law),
unweighted mean of full weights. Not in the paper's text that is at hand, and so ours: network, optimiser, rounds, K, M,
N, its list of hospitals (TCGA lung) and its numbers; therefore no published number is printed beside ours.
"""

from fedjax_seg import config as configuration
from fedjax_seg.core import checks

VARIANTS = ("folder", "small", "ci", "lc25000")
# word: label, secure sum, aggregator, options of the aggregator
METHODS = {
    "fedavg": ("FedAvg", "none", "mean", {"of": "weights"}),
    "smc": ("SMC, scalar portions", "smc_scalar", "mean", {"of": "weights"}),
    "chained": ("SMC, chained", "chained", "mean", {"of": "weights"}),
    "additive": ("Additive shares", "additive", "mean", {"of": "weights"}),
    "secagg": ("SecAgg", "secagg", "mean", {"of": "weights"}),
    "secagg_plus": ("SecAgg+", "secagg_plus", "mean", {"of": "weights"}),
    "weighted": ("FedAvg-weighted, additive shares", "additive", "weighted_mean", {}),
    "noise": ("Noise on weights", "none", "weight_noise", {}),
    "local_dp": ("Local DP, clipped", "none", "local_dp", {"clip": 1.0, "epsilon": 10.0}),
    "central_dp": ("Central DP in SecAgg", "secagg", "dp_fedavg", {"clip": 1.0, "epsilon": 10.0}),
}
SIGMAS = ("0.003", "0.01", "0.03")
NUMBERS = ("K", "M", "N")
CLUSTERED = ("smc", "additive", "weighted")


def get_config(words: str = "folder"):
    """The config of one method, or of the sweep of all (see the module's docstring)."""
    given = [w.strip() for w in words.split(",") if w.strip()]
    pairs = [w.split("=", 1) for w in given if "=" in w]
    options: dict[str, str] = dict(pairs)
    if len(options) < len(pairs):
        raise checks.UserError(f"--config: {words}: one of its words is given twice; once expected")
    plain = [w for w in given if "=" not in w]
    known = {*VARIANTS, *METHODS}
    for word in plain:
        if word not in known:
            raise checks.UserError(f"--config: unknown word {word!r};{checks.suggestion(word, known)}")
    for name in options:
        if name not in (*NUMBERS, "sigma"):
            raise checks.UserError(f"--config: unknown word {name + '='!r}; K=, M=, N= or sigma= expected")
    variant = next((w for w in plain if w in VARIANTS), "folder")
    methods = [w for w in plain if w in METHODS]
    numbers = {name: _whole(name, options[name]) for name in NUMBERS if name in options}
    if len(methods) == 1:
        read = {"noise": ("K", "sigma"), **dict.fromkeys(CLUSTERED, NUMBERS)}.get(methods[0], ("K",))
        for name in options:
            if name not in read:
                raise checks.UserError(f"--config: {name}= given, which {methods[0]!r} does not read; leave it out")
    c = _variant(variant, numbers)
    _method(c, variant, methods[0] if methods else "fedavg", numbers, options.get("sigma"))
    if len(methods) != 1:
        kept = tuple(f"{name}={options[name]}" for name in NUMBERS if name in options)
        sigmas = (options["sigma"],) if "sigma" in options else SIGMAS
        of_clusters = {m: kept if m in CLUSTERED else tuple(k for k in kept if k[0] == "K") for m in METHODS}
        runs = [(m, *((f"sigma={s}",) if m == "noise" else ())) for m in methods or METHODS for s in sigmas]
        c.grid = tuple(dict.fromkeys(",".join((variant, *of_clusters[run[0]], *run)) for run in runs))
    return c


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise checks.UserError(f"--config: {name}={text} given, a whole number of at least 1 expected")
    return int(text)


def _variant(variant: str, numbers: dict[str, int]):
    c, slot = configuration.base(), configuration.slot
    c.group = f"Histopathology, {variant}"
    c.rounds, c.batch_size, c.local_epochs, c.eval_every, c.eval_batch = 10, 16, 1, 2, 100
    c.client = slot("client", "local_sgd", optimizer="adam", lr=3e-3, schedule="exponential", schedule_decay=0.8)
    c.task = slot("task", "classification")
    c.model = slot("model", "cnn", width=8, blocks=4, classes=0)
    c.attack = slot("attack", "share_leakage")
    hospitals = numbers.get("K", 4 if variant == "ci" else 8)
    if variant in ("small", "ci"):
        tiles = {"small": 240, "ci": 24}[variant]
        c.synthesis = slot("synthesis", "histology", hospitals=(tiles,) * hospitals)
    if variant == "ci":
        c.rounds, c.eval_every, c.batch_size = 2, 1, 8
        c.model.width, c.model.blocks, c.synthesis.size = 4, 2, 32
        c.data = slot("data", "histopathology", root="", size=(32, 32))
    elif variant == "small":
        c.data = slot("data", "histopathology", root="")
    elif variant == "folder":
        c.rounds = 20
        drawn = {"partition": "dirichlet", "clients": hospitals} if "K" in numbers else {}
        c.data = slot("data", "histopathology", root="", **drawn)
    else:
        dealt = {"partition": "dirichlet", "clients": hospitals, "alpha": 0.5}
        c.data = slot("data", "histopathology", root="", size=(48, 48), **dealt)
    return c


def _method(c, variant: str, method: str, numbers: dict[str, int], sigma: str | None) -> None:
    c.label, secure, rule, options = METHODS[method]
    c.aggregator = configuration.slot("aggregator", rule, **options)
    c.secure_sum = configuration.slot("secure_sum", secure)
    if method == "noise":
        try:
            c.aggregator.sigma = float(sigma or SIGMAS[1])
        except ValueError:
            raise checks.UserError(f"--config: sigma={sigma} given, a number expected") from None
        c.label += f", sigma {c.aggregator.sigma:g}"
    if "clusters" in c.secure_sum:
        c.secure_sum.clusters, c.secure_sum.size = numbers.get("M", 0), numbers.get("N", 0)
        if not {"M", "N"} & numbers.keys():
            c.secure_sum.size = {"folder": 0, "ci": 2}.get(variant, 4 if numbers.get("K", 8) > 4 else 2)
