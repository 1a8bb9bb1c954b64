"""What secure sums add to a round of the LC25000 run: whole rounds with and without, interleaved in one process.

    FEDJAX_SEG_DATA=DIR python tests/benchmarks/secure_sums.py [--repeats=3] [--only=additive]

DIR/lc25000 is the folder of tiles; without the variable synthetic tiles of the same number are drawn. The limit is 1.10
times the time of FedAvg's round, the median of pairs of one repeat; exit code 1 where it does not hold.
"""

import argparse
import functools
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
LIMIT = 1.10
METHODS = ("fedavg", "smc", "chained", "additive", "secagg", "secagg_plus")


def loop(method: str, root: str, loaded: list):
    """() -> the result of one more round of that method's experiment."""
    import jax

    from fedjax_seg import config as configuration
    from fedjax_seg import experiment
    from fedjax_seg.federation import replicas

    config = configuration.load(ROOT / "configs" / "smc_histopathology.py", f"lc25000,{method}")
    config.data.root, config.eval_every = root, 1
    if not loaded:
        loaded.append(experiment.load_data(config, Path(root)))
    built = experiment.build(config, loaded[0])
    state = replicas.place(built.how, jax.block_until_ready(built.initial()))
    plan = replicas.place(built.how, built.plan)
    held, rounds = [state], [0]

    def go():
        rounds[0] += 1
        held[0], _, done = built.rounds(held[0], plan, rounds[0])
        return done

    return go


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=METHODS[1:])
    options = parser.parse_args()
    from machine_load import disturbance, interleaved, spread

    from fedjax_seg.main import prepare_jax

    prepare_jax(0)
    import jax

    from fedjax_seg import synthesis

    with tempfile.TemporaryDirectory() as scratch:
        data = os.environ.get("FEDJAX_SEG_DATA")
        root = f"{data}/lc25000" if data else str(synthesis.make("histology", scratch, hospitals=(370,) * 8))
        loaded: list = []
        names = [m for m in METHODS if options.only in (None, m) or m == "fedavg"]
        loops = {name: loop(name, root, loaded) for name in names}
        samples = interleaved(loops, options.repeats, functools.partial(jax.block_until_ready), {})
    base, worst = [load.wall for load in samples["fedavg"]], 0.0
    print(f"fedavg: {statistics.median(base):.2f} s a round; others' cores {disturbance(samples['fedavg'])}")
    for name in names[1:]:
        ratios = [load.wall / of for load, of in zip(samples[name], base)]
        worst = max(worst, statistics.median(ratios))
        print(f"{name}: {spread(ratios, 3)} of FedAvg's round; others' cores {disturbance(samples[name])}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
