"""The quickstart: FedHAvg against FedAvg on a small synthetic ABIDE folder that the run writes first. No download.

    python -m fedjax_seg.main --config=configs/quickstart.py --workdir=runs/quickstart
About a minute on two CPU cores. Expect a test accuracy well above chance (0.5) on all four synthetic sites.
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
