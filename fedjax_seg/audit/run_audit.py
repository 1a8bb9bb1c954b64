"""Audits of a finished run: its own mechanisms with its own noise, and its privacy card made anew."""

from pathlib import Path
from typing import Any, NamedTuple

from fedjax_seg import config as configuration
from fedjax_seg import experiment as experiments
from fedjax_seg import guarantee, privacy_card
from fedjax_seg.assembly import Experiment, aggregator_of, clients_of
from fedjax_seg.audit.audited import Audited, of_aggregator
from fedjax_seg.audit.gradients import dp_sgd_step
from fedjax_seg.audit.mechanism_audit import Findings, audit_mechanism
from fedjax_seg.audit.mechanisms import MECHANISMS
from fedjax_seg.core import checks
from fedjax_seg.core.types import Aggregator
from fedjax_seg.privacy import audit
from fedjax_seg.report import html, privacy_report, runs
from fedjax_seg.report.writer import RunFolder

MOST_CLIENTS = 33  # of a round that is searched: what holds for more is not found sooner
AS_PRINTED = ("dp_simagg", "geyer")  # rules whose claim has no proof, and whose canaries are their own


class Audit(NamedTuple):
    """What the audit of a run found."""

    card: dict[str, Any]  # the run's privacy card, with its part 'audit'
    violations: tuple[str, ...]  # what contradicts a proof: bugs of ours
    text: str


def audit_run(
    workdir: str | Path,
    *,
    dim: int = 16,
    trials: int | None = None,
    restarts: int = 24,
    steps: int = 200,
    seed: int = 0,
) -> Audit:
    """Makes the privacy card of a finished run anew, and audits its mechanisms.

    Refreshed are privacy.json, summary.json and the section of the report.

    The mechanisms are those of the run, at its clients per round and its noise, on models of `dim` parameters: no bound
    here depends on their number. The data are read again (not trained on).

    Args:
      dim: parameters of the searched model.
      trials, restarts, steps, seed: of audit_mechanism.
    Raises: UserError where the folder holds no finished run, or its data have changed.
    """
    folder = Path(workdir).expanduser().resolve()
    if not (folder / "DONE").is_file() or not (folder / "config.json").is_file():
        raise checks.UserError(f"--workdir: {folder}: no finished run there (config.json and DONE expected)")
    with RunFolder(folder, quiet=True) as run_folder:
        config = configuration.restored(run_folder.read_json("config.json"))
        configuration.validate(config)
        made, digest = experiments.prepared(config, folder)
        if made.data.store is not None:
            made.data.store.close()
        known = (run_folder.read_json("manifest.json") or {}).get("data_sha256")
        if known and known != digest:
            raise checks.UserError(f"--workdir: {folder}: the data have changed since the run; put them back")
        summary = run_folder.read_json("summary.json")
        promised = guarantee.of_run(made, summary["round"])
        found = [
            audit_mechanism(one, n=n, dim=dim, trials=trials, restarts=restarts, steps=steps, seed=seed)
            for one, n in audited(made, dim)
        ]
        rows = runs.read_rows(folder / "metrics.jsonl")
        card = privacy_card.card(made, promised, written=rows, result=summary)
        card["audit"] = _part(found)
        violations = tuple(one for findings in found for one in findings.violations)
        card["warnings"] = [*(f"ACCOUNTING BUG: {one}" for one in violations), *card["warnings"]]
        summary |= {"privacy": promised, "privacy_card": card}
        run = runs.read_run(folder)
        sections = privacy_report.sections(run._replace(summary={**run.summary, **summary}), folder / "figures")
        html.replace_section(folder, sections, privacy_report.REPLACES)
        run_folder.write_json("privacy.json", card)
        run_folder.finish(summary)
    return Audit(card, violations, "\n".join([card["sentence"], *(findings.text for findings in found)]))


def audited(experiment: Experiment, dim: int) -> list[tuple[Audited, int]]:
    """The mechanisms of a run and the clients (or units of a step) that each is audited with; [] without any."""
    from fedjax_seg.privacy import accounting  # here: its library is slow to load

    config, parts, found = experiment.config, experiment.parts, []
    delta = config.privacy.delta
    if (own := experiment.client.mechanism) and own.noise_multiplier > 0:
        claimed = (accounting.gaussian_epsilon(own.noise_multiplier, delta), delta)
        units = min(MOST_CLIENTS, max(2, config.batch_size))
        found.append((dp_sgd_step(own.sensitivity, own.noise_multiplier, claimed, own.unit), units))
    central = parts.aggregator.mechanism
    if central is None or not central.noise_multiplier > 0:
        return found
    n = min(MOST_CLIENTS, max(2, round(privacy_card.clients_per_round(experiment))))
    rule = config.aggregator
    claimed = (accounting.gaussian_epsilon(central.noise_multiplier, delta), delta)
    length = rule.get("clip") or rule.get("tau") or 1.0
    twin = lambda **off: aggregator_of(config, parts.sampler, clients_of(experiment.data), **off)
    if rule.name in AS_PRINTED:
        claimed = (rule.get("epsilon") or claimed[0], delta)
        usual = MECHANISMS[rule.name](n, dim, length, *claimed)  # for its inputs; the rule has the run's own options
        quiet = twin(noise=False) if rule.name == "dp_simagg" else twin(noise_multiplier=0.0)
        made = of_aggregator(parts.aggregator, n, length, name=rule.name, quiet=quiet, claimed=claimed, note=usual.note)
        found.append((made._replace(canary=usual.canary, changed=(0,)), n))
        return found
    if not central.formal:
        return found
    quiet = twin(noise_multiplier=0.0, epsilon=None)
    quiet = quiet._replace(mechanism=central)  # of local noise the messages are what is audited
    cap = rule.get("cap") or 0.0
    examples = [cap * 10.0 ** min(i, 3) for i in range(n)] if cap else None  # at and beyond it
    made = of_aggregator(parts.aggregator, n, length, name=rule.name, quiet=quiet, claimed=claimed, examples=examples)
    found.append((made._replace(canary=_seen(made, n, dim, quiet)), n))
    return found


def _seen(made: Audited, n: int, dim: int, quiet: Aggregator) -> audit.Witness:
    """The structured pair of inputs that moves the released model most; the message may have parts that it hides."""
    rule = audit.rule_of(quiet, decoded=True)
    options: dict[str, Any] = {"radius": made.radius, "adjacency": made.adjacency, "scales": made.scales or None}
    return audit.sensitivity(rule, n, dim, changed=made.changed, steps=0, **options).witness


def _part(found: list[Findings]) -> dict[str, Any]:
    rows = [findings.as_json() for findings in found]
    told = [
        f"- {one.sensitivity['name']}: {'; '.join(one.violations) or 'nothing that was found contradicts a proof'}"
        + (f"; {one.canaries['words']}" if one.canaries else "")
        for one in found
    ]
    text = "\n".join(told) or "Nothing to audit: no mechanism makes a claim."
    both = {key: [one for row in rows for one in row[key]] for key in ("sensitivity", "canaries")}
    return both | {"text": text}
