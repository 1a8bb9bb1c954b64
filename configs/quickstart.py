"""The quickstart: five synthetic CT hospitals segment tumours together, an attacker asks who was trained on.

    python -m fedjax_seg.main --config=configs/quickstart.py --workdir=runs/quickstart
About 75 seconds on two CPU cores. Expect a Dice near 0.63 on the external test set (0 for the first rounds) and an
attack AUC near 0.65.
No download: the slices are drawn by a random generator, not patients. The whole benchmark is
configs/fedonco_bench.py; connectomes instead of CT: configs/fedhavg_quickstart.py.
"""

from fedjax_seg import config as configuration


def get_config():
    c = configuration.base()
    c.label, c.group = "FedAvg", "synthetic CT"
    c.rounds, c.eval_every, c.eval_batch, c.batch_size, c.seeds = 28, 4, 40, 8, (0,)
    c.synthesis = configuration.slot("synthesis", "ct", size=48, clients=(100, 100, 100, 50, 50), test=60, shadow=100)
    c.data = configuration.slot("data", "tfds", root="")
    c.model = configuration.slot("model", "unet", width=12, norm="batch")
    c.task = configuration.slot("task", "segmentation", loss="both")
    c.client = configuration.slot("client", "local_sgd", lr=0.05, momentum=0.9, weight_decay=1e-4)
    c.aggregator = configuration.slot("aggregator", "weighted_mean")
    c.attack = configuration.slot("attack", "membership", count=160)
    return c
