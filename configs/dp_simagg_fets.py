"""DP-SimAgg: federated brain-tumour segmentation on FeTS 2022, with the privacy of its aggregation told as it is.

    python -m launch.sweep --config=configs/dp_simagg_fets.py:table2 --config.data.root=FETS --workdir=runs/table2
    python -m fedjax_seg.main --config=configs/dp_simagg_fets.py:simagg --config.data.root=FETS --workdir=runs/simagg
    python -m launch.sweep --config=configs/dp_simagg_fets.py:small,table2 --workdir=runs/small
    python -m launch.sweep --config=configs/dp_simagg_fets.py:hippocampus,sound --config.data.root=T04 --workdir=runs/h
FETS is a folder of FeTS or BraTS subjects with the partitioning CSV in it (or data.partition: a path of its own).
Words after the colon: a variant, and methods or groups of methods (table2 where none is named).

  variant      data                                                   patch  model            rounds  sites a round
  paper        FeTS 2022, partitioning_2.csv: 33 sites, 1251 cases    64^3   33.4 M resunet   20      6 of 33
  small        synthetic MRI of 64x64x48, 12 sites                    32^3   width 8          20      3 of 12
  ci           synthetic MRI of 48x48x32, 4 sites                     16^3   width 4          2       3 of 4
  hippocampus  Decathlon Task04 (T04), partitioning_12.csv: 12 sites  whole  width 8          20      3 of 12
`paper` wants a GPU: about 1000 cases x 40 patches in 20 rounds.

  group        methods
  table2       simagg, dp_eps1, dp_eps10: the paper's Table II, with simulated time and projected score
  table1       fedavg, fedprox, scaffold, fednova, krum, multi_krum, fedmedian, dp_fedavg, geyer, local_dp, simagg,
               dp_eps10: the methods of its Table I and section II, on this task
  similarity   simagg (as printed), simagg_counts (W as numbers of cases), simagg_released, simagg_multiplicative,
               regsimagg, regsimagg_released
  sound        fedavg, simagg, simagg_released, dp_eps10, and what has a proof: sound_tight, sound_2c, sound_4c,
               dp_fedavg
  budgets      simagg, and sound_tight and dp_fedavg at epsilon 1, 10, 100, 1000 per round: the privacy-utility curve
  ablation     fedavg, clip_only, similarity_only, noise_only, dp_eps10: what the paper names as missing
A word `eps=VALUE` sets the epsilon per round of a private row, e.g. `sound_tight,eps=100`.
As printed: 20 rounds, 1 local epoch, batch of one patch, 40 patches of 64^3 per case, SGD 5e-5 with momentum .9 (the
optimiser starts anew in every round), soft Dice over four classes weighted by inverse frequency, no augmentation,
C = 100, epsilon 1 or 10 per tensor and round, delta 1e-5, 80/20 inside every site.

What the paper leaves open, and what is done here: the class weights are the inverse voxel frequencies of 368 BraTS 2020
label maps (128^3), scaled to sum 1. The challenge starts from a model pretrained on 63 subjects, which is not public:
training starts at random. The sampler is the sliding window as printed; the released code's padded list is
--config.sampler.released=true. W is the share of the cases (OpenFL).
The literal rows (dp_eps1, dp_eps10, noise_only, clip_only) noise every tensor of the full weights, as Algorithm 1 says.
They have NO privacy guarantee (the report says why), and with C = 100 they do not learn: no run of the printed
algorithm can give the paper's Table II. In `paper` the noise also makes running variances negative: such a model
predicts nothing that is a number, and its scores are n/a.
The sound rows clip the update of the whole model once (client-level, one release a round) and state what they prove; a
model with batch statistics is refused there, so they use instance norm without running statistics (model.tracked).
They do not learn either: the signal-to-noise ratio of a release is at most n / (z sqrt d), with n = 6 hospitals.
Where `small`, `ci` and `hippocampus` differ: cross entropy + soft Dice, larger rates, few patches, no running
statistics, no dropout.
"""

from fedjax_seg import config as configuration
from fedjax_seg.core import checks

# label, {metric: value} as printed in Table II ("minutes" of simulated time; wall-clock hours; GB; Wh)
PRINTED = {
    "simagg": {
        "soft_dice_0": 0.9981, "soft_dice_1": 0.6685, "soft_dice_2": 0.6851, "soft_dice_4": 0.7896,
        "projected_score": 0.7380, "minutes": 8484.11, "wall_hours": 18.03,
        "peak_memory_gb": 305.32, "energy_wh": 3396.47,
    },
    "dp_eps10": {
        "soft_dice_0": 0.9984, "soft_dice_1": 0.6757, "soft_dice_2": 0.6872, "soft_dice_4": 0.7962,
        "projected_score": 0.7318, "minutes": 8781.74, "wall_hours": 17.93,
        "peak_memory_gb": 305.88, "energy_wh": 3780.68,
    },
    "dp_eps1": {
        "soft_dice_0": 0.9967, "soft_dice_1": 0.6357, "soft_dice_2": 0.5305, "soft_dice_4": 0.5274,
        "projected_score": 0.5799, "minutes": 8291.95, "wall_hours": 16.15,
        "peak_memory_gb": 305.43, "energy_wh": 3393.88,
    },
}  # fmt: skip
LABELS = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "fednova": "FedNova",
    "krum": "Krum",
    "multi_krum": "Multi-Krum",
    "fedmedian": "FedMedian",
    "simagg": "SimAgg",
    "simagg_counts": "SimAgg, W = counts",
    "simagg_released": "SimAgg, released code",
    "simagg_multiplicative": "SimAgg, multiplicative",
    "regsimagg": "RegSimAgg",
    "regsimagg_released": "RegSimAgg, released code",
    "dp_eps1": "DP-SimAgg, eps 1",
    "dp_eps10": "DP-SimAgg, eps 10",
    "clip_only": "clip only",
    "similarity_only": "similarity only",
    "noise_only": "noise only, eps 10",
    "sound_tight": "sound SimAgg, (1/√2+2/n)C",
    "sound_2c": "sound SimAgg, 2C",
    "sound_4c": "sound SimAgg, 4C",
    "dp_fedavg": "DP-FedAvg",
    "geyer": "Geyer et al.",
    "local_dp": "local DP",
}
GROUPS = {
    "table2": ("simagg", "dp_eps1", "dp_eps10"),
    "table1": (
        "fedavg", "fedprox", "scaffold", "fednova", "krum", "multi_krum", "fedmedian", "dp_fedavg", "geyer", "local_dp",
        "simagg", "dp_eps10",
    ),
    "similarity": (
        "simagg", "simagg_counts", "simagg_released", "simagg_multiplicative", "regsimagg", "regsimagg_released",
    ),
    "sound": ("fedavg", "simagg", "simagg_released", "dp_eps10", "sound_tight", "sound_2c", "sound_4c", "dp_fedavg"),
    "budgets": ("simagg", *(f"{m},eps={e}" for m in ("sound_tight", "dp_fedavg") for e in (1, 10, 100, 1000))),
    "ablation": ("fedavg", "clip_only", "similarity_only", "noise_only", "dp_eps10"),
}  # fmt: skip
VARIANTS = ("paper", "small", "ci", "hippocampus")
PROVEN = ("sound_tight", "sound_2c", "sound_4c", "dp_fedavg", "local_dp")
INVERSE_FREQUENCY = (0.001, 0.398, 0.152, 0.449)


def get_config(words: str = "paper"):
    """The config of one method, or of a sweep (see the module's docstring)."""
    given = [w.strip() for w in words.split(",") if w.strip()]
    budgets = [w.removeprefix("eps=") for w in given if w.startswith("eps=")]
    given = [w for w in given if not w.startswith("eps=")]
    known = {*VARIANTS, *LABELS, *GROUPS}
    for word in given:
        if word not in known:
            raise checks.UserError(f"--config: unknown word {word!r};{checks.suggestion(word, known)}")
    variant = next((w for w in given if w in VARIANTS), "paper")
    methods = [m for w in given if w not in VARIANTS for m in GROUPS.get(w, (w,))] or GROUPS["table2"]
    c = _variant(variant)
    name, _, own = methods[0].partition(",eps=")
    _method(c, name, variant, own or (budgets[0] if budgets else ""))
    if len(methods) != 1:
        tail = [f",eps={budgets[0]}" if budgets and "eps=" not in m else "" for m in methods]
        c.grid = tuple(dict.fromkeys(f"{variant},{m}{end}" for m, end in zip(methods, tail)))
    return c


def _variant(variant: str):
    c, slot = configuration.base(), configuration.slot
    c.group = f"DP-SimAgg, {variant}"
    c.batch_size, c.local_epochs, c.rounds, c.eval_every = 1, 1, 20, 1
    c.sampler = slot("sampler", "sliding_window", rho=0.2 if variant == "paper" else 0.25)
    c.on_nonfinite = "stop"
    if variant == "paper":
        c.data = slot("data", "fets", root="", partition="partitioning_2.csv")
        c.model = slot("model", "resunet3d")
        c.task = slot(
            "task",
            "volumetric",
            loss="fets_dice",
            class_weights=INVERSE_FREQUENCY,
            regions="brats",
            labels=(0, 1, 2, 4),
        )
        c.clock = slot("clock", "fets")
        return c
    c.model = slot("model", "resunet3d", width=8, depth=3, tracked=False, dropout=0.0)
    small = {"patch": (32, 32, 32), "patches": 6, "normalise": "brain", "sampling": "balanced", "background": 0.2}
    task = {"tile": (32, 32, 32), "overlap": 0.5, "blend": "gaussian"}
    if variant == "hippocampus":
        c.eval_every, c.model.width, c.model.depth, c.model.classes = 10, 6, 2, 3
        whole = {"patch": (36, 52, 36), "patches": 1, "normalise": "image"}  # most volumes fit into one patch
        c.data = slot(
            "data", "msd", root="", partition="partitioning_12.csv", label_scheme="plain", **{**small, **whole}
        )
        c.task = slot("task", "volumetric", tile=(36, 52, 36), overlap=0.25, blend="gaussian")
        return c
    c.data = slot("data", "fets", root="", partition="partitioning.csv", **small)
    c.task = slot("task", "volumetric", regions="brats", labels=(0, 1, 2, 4), **task)
    c.clock = slot("clock", "fets", patches=6)
    c.synthesis = slot("synthesis", "mri", size=(64, 64, 48))
    if variant == "ci":
        c.rounds, c.data.patches, c.data.patch, c.task.tile = 2, 2, (16, 16, 16), (16, 16, 16)
        c.sampler = slot("sampler", "sliding_window", size=3)
        c.model.width, c.model.depth, c.task.overlap, c.clock.patches = 4, 2, 0.0, 2
        c.synthesis = slot("synthesis", "mri", size=(48, 48, 32), sites=(3, 3, 2, 2))
    return c


def _method(c, method: str, variant: str, budget: str) -> None:
    """`budget`: epsilon per round of a private row, as text; '' = as the method has it."""
    c.label = LABELS[method]
    if variant == "paper":
        for metric, value in PRINTED.get(method, {}).items():
            c.published[metric] = value
    if method in PROVEN:
        c.model.tracked = False
    rate = 5e-5 if variant == "paper" else 0.03
    momentum = 0.0 if method == "scaffold" else 0.9
    options = {"lr": rate, "momentum": momentum}
    if method == "scaffold":
        c.client = configuration.slot("client", "scaffold", lr=rate)
    else:
        c.client = configuration.slot("client", "local_sgd", mu=0.01 if method == "fedprox" else 0.0, **options)
    c.aggregator = _aggregator(method, 1.0 if variant == "paper" else 0.5)
    if budget:
        if "epsilon" not in c.aggregator:
            raise checks.UserError(f"--config: eps={budget} given for {method!r}, which has no epsilon")
        try:
            c.aggregator.epsilon = float(budget)
        except ValueError:
            raise checks.UserError(f"--config: eps={budget}: a number expected, e.g. eps=10") from None
        c.label = f"{LABELS[method]}, eps {c.aggregator.epsilon:g}"


def _aggregator(method: str, clip: float):
    """`clip`: of the whole model's update in the sound rows, about the norm that updates have."""
    slot = lambda name, **options: configuration.slot("aggregator", name, **options)
    if method.startswith("sound_"):
        bound = {"sound_tight": "tight", "sound_2c": "2C", "sound_4c": "4C"}[method]
        return slot("private_sim_agg", clip=clip, epsilon=10.0, bound=bound)
    if method in ("dp_fedavg", "local_dp"):
        return slot(method, clip=clip, epsilon=10.0)
    literal = {
        "dp_eps1": {"epsilon": 1.0},
        "dp_eps10": {"epsilon": 10.0},
        "clip_only": {"similarity": False, "noise": False},
        "similarity_only": {"clipping": False, "noise": False},
        "noise_only": {"epsilon": 10.0, "clipping": False, "similarity": False},
    }
    if method in literal:
        return slot("dp_simagg", **literal[method])
    plain = {
        "scaffold": {"name": "scaffold"},
        "fednova": {"name": "fednova", "momentum": 0.9},
        "krum": {"name": "krum", "f": 0},
        "multi_krum": {"name": "multi_krum", "f": 0, "m": 2},
        "fedmedian": {"name": "median", "tie": "mean"},
        "geyer": {"name": "geyer", "noise_multiplier": 0.5},
        "simagg": {"name": "sim_agg"},
        "simagg_counts": {"name": "sim_agg", "shares": "counts"},
        "simagg_released": {"name": "sim_agg", "variant": "released"},
        "simagg_multiplicative": {"name": "sim_agg", "variant": "multiplicative"},
        "regsimagg": {"name": "reg_sim_agg"},
        "regsimagg_released": {"name": "reg_sim_agg", "variant": "released", "decimals": 4},
    }
    return slot(**plain.get(method, {"name": "weighted_mean"}))
