"""FedOnco-Bench: federated tumour segmentation with its privacy measured. Table of six methods.

    python -m launch.sweep --config=configs/fedonco_bench.py:small --workdir=runs/small
    python -m launch.sweep --config=configs/fedonco_bench.py:lidc --config.data.root=LIDC --workdir=runs/lidc
    python -m fedjax_seg.main --config=configs/fedonco_bench.py:small,fedbn --workdir=runs/fedbn
The first two run the six rows (one process, the data made or read once) and end with the paper's table beside ours.
Words after the colon: a variant, and methods (all six where none is named).

  variant  data                                                        size    model width  rounds  seeds
  paper    synthetic CT, 1000/1000/1000/500/500 + 1000 test + 1000     256x256  52           100     3
  small    the same generator, 240/240/240/120/120 + 200 + 320         64x64    16           20      2
  ci       the same generator, 16/16/16/8/8 + 16 + 40                  32x32     4           2      1
  lidc     a folder of real slices, e.g. LIDC-IDRI by scanner vendor   64x64    16           15      2
`small` takes 44 minutes for its six rows on two CPU cores. Dice on the external test set: FedAvg .797, FedProx .789,
FedBN .789, DP-SGD .186, centralised .854, local .637. `lidc` on LIDC-IDRI by vendor: FedAvg .808 (mean of sites).
The default is `paper`; it wants a GPU: 200 steps a round of a 1.2 M parameter U-Net on 16 images of 256x256.

  method       what it is                                                     paper: Dice / CE / attack AUC
  fedavg       weighted mean, batch statistics averaged                       .85 / .34 / .72
  fedprox      mu = .01                                                       .84 / .36 / .68
  fedbn        batch statistics and affine terms of the norms stay at home    .85 / .35 / .70
  dp_sgd       FedAvg with DP-SGD, sigma 1.2, C 1, Poisson batches, group     .79 / .42 / .25
               norm (batch norm mixes the examples of a batch: no per-example bound exists)
  centralised  pooled training data, five times the epochs (500 for 100)      .88 / .30 / .72
  local        one model per client                                           .70 / -   / .80
  fedper, scaffold, fednova   beyond the paper: personal last layer, control variates, normalised averaging
As printed: batch 16, 1 local epoch, SGD .01 (x .1 at round 70), momentum .9, weight decay 1e-4, cross entropy, no
augmentation, 80/20 per client, secure sum assumed. Where `small`, `ci` and `lidc` differ, since they take a fraction of
the paper's steps: cross entropy + soft Dice, batch 8, rate .05 (x .1 after 80 % of the rounds), pooled training for
twice the epochs. `lidc` sets 25 % of the patients aside for the attacker.

What the paper leaves open, and what is done here: its generator is a diffusion model "akin to DiffGuard" and is not
public: data are drawn procedurally (synthesis/ct.py), or by our own small diffusion model (README). Clients 4
and 5: another scanner; contrast-enhanced multifocal lesions. Members and non-members are matched by client. Half of the
attacker's cases are trained on. delta is 1e-5. DP-SGD keeps momentum and weight decay (post-processing).
An external site under FedBN has no norm of its own: it predicts with the clients' mean, weighted by training cases.
"""

from fedjax_seg import config as configuration
from fedjax_seg.core import checks

# label, {metric: value} as printed in the paper's results
METHODS = {
    "fedavg": ("FedAvg", {"dice": 0.85, "cross_entropy": 0.34, "attack_auc": 0.72}),
    "fedprox": ("FedProx", {"dice": 0.84, "cross_entropy": 0.36, "attack_auc": 0.68}),
    "fedbn": ("FedBN", {"dice": 0.85, "cross_entropy": 0.35, "attack_auc": 0.70}),
    "dp_sgd": ("FedAvg + DP-SGD", {"dice": 0.79, "cross_entropy": 0.42, "attack_auc": 0.25}),
    "centralised": ("Centralised", {"dice": 0.88, "cross_entropy": 0.30, "attack_auc": 0.72}),
    "local": ("Local only", {"dice": 0.70, "attack_auc": 0.80}),
}
BEYOND = {"fedper": ("FedPer", {}), "scaffold": ("SCAFFOLD", {}), "fednova": ("FedNova", {})}
VARIANTS = ("paper", "small", "ci", "lidc")
FEDBN_LEAVES = ("batch_stats/*", "*Norm*")


def get_config(words: str = "paper"):
    """The config of one method, or of the sweep of all six (see the module's docstring)."""
    given = [w.strip() for w in words.split(",") if w.strip()]
    known = {*VARIANTS, *METHODS, *BEYOND}
    for word in given:
        if word not in known:
            raise checks.UserError(f"--config: unknown word {word!r};{checks.suggestion(word, known)}")
    variant = next((w for w in given if w in VARIANTS), "paper")
    methods = [w for w in given if w not in VARIANTS]
    c = _variant(variant)
    _method(c, methods[0] if methods else "fedavg", variant)
    if len(methods) != 1:
        c.grid = tuple(f"{variant},{m}" for m in methods or METHODS)
    return c


def _variant(variant: str):
    c = configuration.base()
    c.group = f"FedOnco-Bench, {variant}"
    c.batch_size, c.local_epochs = 16, 1
    c.secure_sum = configuration.slot("secure_sum", "assumed")
    c.aggregator = configuration.slot("aggregator", "weighted_mean")
    c.attack = configuration.slot("attack", "membership", count=1000)
    slot = configuration.slot
    if variant == "lidc":
        c.data = slot("data", "images2d", root="", size=(64, 64), aside_share=0.25)
    else:
        c.data = slot("data", "tfds", root="")
        c.synthesis = slot("synthesis", "ct")
    c.task = slot("task", "segmentation", loss="cross_entropy" if variant == "paper" else "both")
    if variant == "paper":
        c.rounds, c.eval_every, c.eval_batch, c.seeds = 100, 5, 16, (0, 1, 2)
        c.model = slot("model", "unet", width=52, norm="batch")
    elif variant == "small":
        c.rounds, c.eval_every, c.eval_batch, c.seeds, c.batch_size = 20, 4, 40, (0, 1), 8
        c.model = slot("model", "unet", width=16, norm="batch")
        c.synthesis = slot("synthesis", "ct", size=64, clients=(240, 240, 240, 120, 120), test=200, shadow=320)
        c.attack.count = 384
    elif variant == "ci":
        c.rounds, c.eval_every, c.eval_batch, c.seeds = 2, 1, 16, (0,)
        c.model = slot("model", "unet", width=4, norm="batch")
        c.synthesis = slot("synthesis", "ct", size=32, clients=(16, 16, 16, 8, 8), test=16, shadow=40)
        c.attack.count, c.attack.resamples = 20, 100
    else:
        c.rounds, c.eval_every, c.eval_batch, c.seeds, c.batch_size = 15, 3, 40, (0, 1), 8
        c.model = slot("model", "unet", width=16, norm="batch")
        c.attack.count = 400
    return c


def _method(c, method: str, variant: str) -> None:
    c.label, published = (METHODS | BEYOND)[method]
    if variant != "lidc":
        for metric, value in published.items():
            c.published[metric] = value
    paper = variant == "paper"
    options = {
        "lr": 0.01 if paper else 0.05,
        "weight_decay": 1e-4,
        "schedule": "step",
        "schedule_decay": 0.1,
        "schedule_every": 70 if paper else max(1, round(0.8 * c.rounds)),
    }
    if method == "scaffold":
        c.client, c.aggregator = (
            configuration.slot("client", "scaffold", **options),
            configuration.slot("aggregator", "scaffold"),
        )
        return
    options["momentum"] = 0.9
    if method == "dp_sgd":
        c.batch_sampling, c.model.norm = "poisson", "group"
        c.client = configuration.slot("client", "dp_sgd", noise_multiplier=1.2, clip=1.0, **options)
        return
    local = {"fedbn": FEDBN_LEAVES, "fedper": ("params/head/*",)}.get(method, ())
    c.client = configuration.slot(
        "client", "local_sgd", mu=0.01 if method == "fedprox" else 0.0, local=local, **options
    )
    if method == "fednova":
        c.aggregator = configuration.slot("aggregator", "fednova", momentum=0.9)
    if method in ("centralised", "local"):
        c.protocol = method
    if method == "centralised":
        c.local_epochs = 5 if paper else 2
