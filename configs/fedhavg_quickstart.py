"""The quickstart: FedHAvg (extrinsic mean) on a small synthetic ABIDE folder that the run writes first. No download.

    python -m fedjax_seg.main --config=configs/fedhavg_quickstart.py --workdir=runs/fedhavg_quickstart
About a minute on two CPU cores. Expect a mean test accuracy near 0.68 and an AUC near 0.77 (chance: 0.5), with a wide
spread: a test fold of a site holds three to eight subjects.
The data are connectomes drawn by a random generator, not patients; the paper's experiment is configs/fedhavg_abide.py.
"""

from fedjax_seg import config as configuration


def get_config():
    c = configuration.base()
    c.label, c.group = "FedHAvg-ext", "synthetic"
    c.rounds, c.eval_every, c.seeds = 40, 2, (0,)
    c.synthesis = configuration.slot("synthesis", "connectomes")
    c.data = configuration.slot("data", "abide", root="")
    c.model = configuration.slot("model", "mlp", hidden=(64, 32))
    c.task = configuration.slot("task", "classification")
    c.client = configuration.slot("client", "local_sgd", lr=3e-3, momentum=0.9, weight_decay=1e-3)
    c.aggregator = configuration.slot("aggregator", "extrinsic_mean", of="updates", c=2.0, gamma=10.0)
    return c
