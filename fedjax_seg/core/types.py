"""The central types. K clients, C in the cohort, S local steps, B batch, D flat size.

Everything a run is made of is a value of one of these types; none of them knows how clients are executed.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from fedjax_seg.core.stores import CaseStore as CaseStore

Array = jax.Array
Tree = Any
Variables = Mapping[str, Tree]  # {'params': ..., 'batch_stats': ...}
Batch = Mapping[str, Array]  # 'x' [B, ...], 'y' [B, ...], 'mask' [B] (1 = a real example)


class Task(NamedTuple):
    """What is learned; knows nothing of federation.

    Attributes:
      init: (key, batch) -> variables, `{'params': ...}` and, where the model has them, `{'batch_stats': ...}`.
      loss: (variables, batch, key) -> (scalar, {'batch_stats': ...}); the mean over the examples with mask 1.
      outputs: (variables, batch) -> {name: [B, ...]}; per-case outputs on the device, padding included.
      score: (outputs, cases) -> list of rows `{'metric', 'value', 'n'}` over the given cases, on the host.
      metrics: {name: (direction, definition)}; direction is 'max', 'min' or '' (a count: no better or worse), the
        definition is printed in reports.
      linear_input: path of the parameter [d, h] that the flattened input meets first, as x @ kernel and nowhere else;
        '' where there is none.
      case_values: (outputs, cases) -> {column: [n]}; what per_case.csv tells of every given case, on the host.
      headline: the metrics that tables and figures show, the first one in every curve.
      paired: the column of case_values that paired tests compare; the higher, the better.
      evidence: (variables, batch) -> {name: [B]}; what somebody who sees a case's prediction and label can measure, on
        the device: the features of a black-box membership attack. None = no attack on this task.
      masks: (outputs, cases) -> (truth, predicted), integer [n, *space] each, on the host, for pictures.
      reduce: outputs of some cases -> {column: [B]}, on the host: small numbers in the place of outputs that are too
        large to be kept for all cases (masks of volumes). `score` and `case_values` then take these columns, joined
        over all cases; `masks` takes the outputs. None: outputs are small, and are what `score` takes.
      intervals: (outputs, cases, patients, *, resamples, seed) -> rows {'metric', 'value', 'low', 'high', 'n',
        'patients', 'resamples'}, on the host: 95 % bootstrap intervals of the metrics by resampling
        patients; `patients` names those of `cases`. None = no intervals.
      confusion: (outputs, cases) -> int [classes, classes], truth by prediction, on the host. None = no classes.
    """

    init: Callable[..., Variables]
    loss: Callable[..., tuple[Array, Mapping[str, Tree]]]
    outputs: Callable[..., Mapping[str, Array]]
    score: Callable[..., list[dict[str, Any]]]
    metrics: Mapping[str, tuple[str, str]]
    linear_input: str = ""
    case_values: Callable[..., Mapping[str, Any]] = lambda outputs, cases: {}
    headline: tuple[str, ...] = ()
    paired: str = ""
    evidence: Callable[..., Mapping[str, Array]] | None = None
    masks: Callable[..., tuple[Any, Any]] | None = None
    reduce: Callable[..., Mapping[str, Any]] | None = None
    intervals: Callable[..., list[dict[str, Any]]] | None = None
    confusion: Callable[..., Any] | None = None


class ProvenBound(NamedTuple):
    """A sensitivity that has a proof; only this type may calibrate noise."""

    value: float
    adjacency: str  # 'replace-one' | 'add-remove' | 'zero-out'
    unit: str  # 'client' | 'patient' | 'example'
    proof: str


class AuditedLowerBound(NamedTuple):
    """What an auditor found; never calibrates noise. `witness`: the inputs that show it (privacy.audit.Witness)."""

    value: float
    witness: Any


class Mechanism(NamedTuple):
    """A noise mechanism as data, so that accounting never looks into a closure.

    Attributes:
      unit: whose data one change is: 'client', 'patient' or 'example'.
      sensitivity: in the units of what is noised; NaN where it depends on the data.
      noise_multiplier: standard deviation / sensitivity.
      adjacency: 'replace-one', 'add-remove' or 'zero-out'.
      formal: whether a guarantee follows.
      reasons: why none does.
      per: 'model' (one release per round or step) or 'tensor' (one for every tensor).
      local: whether noise comes before anything leaves the client, so that the server need not be trusted.
      proof: why the sensitivity holds, in a sentence (ProvenBound.proof).
      span: 0: every round is a release of its own. T > 0: the noise of T rounds is correlated and all of them are ONE
        release, whose sensitivity holds for a client that is in at most `participations` of them, at least
        `separation` rounds apart.
    """

    unit: str
    sensitivity: float
    noise_multiplier: float
    adjacency: str
    formal: bool
    reasons: tuple[str, ...] = ()
    per: str = "model"
    local: bool = False
    proof: str = ""
    span: int = 0
    separation: int = 1
    participations: int = 0


class Cohort(NamedTuple):
    """The clients of one round. Rows with present False are padding: absence is never a weight of 0."""

    clients: Array  # int32 [C], client ids
    present: Array  # bool [C]


class Memory(NamedTuple):
    """What a sampler has seen of the updates so far; a part of the state, kept by the round.

    Whoever is chosen then depends on private updates: no privacy claim may be combined with it.

    Attributes:
      init: () -> memory before round 0, a tree of arrays.
      sample: (key, round int32, memory) -> Cohort, as Sampler.sample.
      observe: (memory, cohort as drawn, divergence float [C], ok bool [C]) -> memory; divergence is the L2 norm of a
        client's update, and means nothing where not ok.
    """

    init: Callable[[], Tree]
    sample: Callable[[Array, Array, Tree], Cohort]
    observe: Callable[[Tree, Cohort, Array, Array], Tree]


class Sampler(NamedTuple):
    """Who takes part in a round. `sample` is pure in (key, round): there is nothing to checkpoint but `memory`.

    The other fields are what an accountant may rely on; none of them is free text.

    Attributes:
      sample: (key, round int32) -> Cohort with rows [capacity]; no client twice in one cohort. `key` is the run's
        key (the same in every round), so that a sampler may derive one permutation per cycle from it.
      capacity: rows of the cohort, C.
      q: the inclusion probability where every client joins independently in every round (Poisson), else None.
      truncated: True where a Poisson draw is cut to the capacity; it has its own accounting.
      max_participations: (rounds) -> most rounds of that many any one client can be in.
      min_cohort: the fewest present clients a round can have.
      min_separation: the fewest rounds between two participations of a client (1 = may be in consecutive rounds).
      memory: None mostly; where there is one the round draws by memory.sample, and `sample` is its draw before
        anything was seen.
      drawn: (m, K) where every round is a fresh uniform subset of m of the K clients, without replacement; else None.
      bins: b > 0 where every client throws itself into one of b bins, once and independently, and is in the rounds
        r with r mod b = its bin (balls in bins); else 0.
    """

    sample: Callable[[Array, Array], Cohort]
    capacity: int
    q: float | None
    truncated: bool
    max_participations: Callable[[int], int]
    min_cohort: int
    min_separation: int
    memory: Memory | None = None
    drawn: tuple[int, int] | None = None
    bins: int = 0


class Batches(NamedTuple):
    """The local data of one client for one round.

    Attributes:
      at: (step int32) -> Batch; the remainder batch is masked, not padded with repeats.
      steps: int32 scalar; the real number of local steps (0 for an absent client).
      examples: float32 scalar; distinct training examples of the client, its weight.
      client: int32 scalar; the client id.
      longest: the most steps any client of the run can have, known before it runs; 0 = not known.
      expected: float32 scalar; under Poisson sampling the expected number of units in a batch, q * units (public: the
        divisor of a sum of clipped gradients, never the realised number); None where batches are shuffled epochs.
    """

    at: Callable[[Array], Batch]
    steps: Array
    examples: Array
    client: Array
    longest: int = 0
    expected: Array | None = None


class ClientUpdate(NamedTuple):
    """What one client has learned in a round."""

    delta: Variables  # local - server, the tree of variables
    weight: Array  # float32 scalar, examples used
    steps: Array  # int32 scalar, local steps done
    extra: Tree  # e.g. control variates; {} mostly
    metrics: Mapping[str, Array]  # scalars, e.g. the mean training loss


class Client(NamedTuple):
    """One client's local training.

    Attributes:
      init: variables -> personal; all that stays at home, {path: leaf}; {} where nothing does.
      train: (variables, personal, batches, key, *, round, broadcast) -> (ClientUpdate, personal).
      personalise: (variables, personal) -> the variables this client predicts with (FedBN); identity mostly.
        A site that never trained predicts with the mean of the trained clients' personal leaves (evaluate.py).
      mechanism: example- or patient-level DP, if any.
      properties: 'orthogonal': training commutes with orthogonal maps of a linear layer's inputs (SGD does, Adam not).
    """

    init: Callable[[Variables], Mapping[str, Array]]
    train: Callable[..., tuple[ClientUpdate, Mapping[str, Array]]]
    personalise: Callable[[Variables, Mapping[str, Array]], Variables]
    mechanism: Mechanism | None = None
    properties: frozenset[str] = frozenset()


class Aggregator(NamedTuple):
    """How updates become one. FedAvg, the extrinsic mean, ... are: bounded message -> sum -> post-process.

    Attributes:
      init: variables -> state (a pytree, {} mostly).
      broadcast: state -> what every client is told beside the variables; public by definition.
      encode: (update, broadcast, *, variables, key) -> message; one client: exactly what leaves the hospital.
      decode: (total, cohort, state, *, variables, round, key) -> (delta, state, metrics); once per round.
        `delta` has the structure of `variables`; metrics are scalars.
      reads: 'sum' (total = the sum of the messages of the present clients) or 'each' (total = their stack [C, ...],
        rows of absent clients are zero and must not matter).
      bound: of ||message|| (reads='sum') or of the change of the decoded output (reads='each'); None = unbounded.
      properties: names of the contracts that hold (tests/contracts checks each): 'permutation', 'consensus',
        'translation', 'scale', 'orthogonal' (commutes with orthogonal maps of a tensor), 'hull' (inside the
        coordinate-wise range of the clients), 'weighted' (uses the examples per client).
      mechanism: filled by privatize, read by accounting.
    """

    init: Callable[[Variables], Tree]
    broadcast: Callable[[Tree], Tree]
    encode: Callable[..., Tree]
    decode: Callable[..., tuple[Variables, Tree, Mapping[str, Array]]]
    reads: str
    bound: ProvenBound | None = None
    properties: frozenset[str] = frozenset()
    mechanism: Mechanism | None = None


class Meeting(NamedTuple):
    """Who exchanges secrets with whom in one secure sum. Rows are those of the round's cohort, C.

    Attributes:
      clients: int32 [C], client ids.
      joined: bool [C], takes part in the exchange: present, and not left alone (whose sum would be its message).
      counts: bool [C], joined, and its upload will arrive as far as is known before anybody trains.
      group: int32 [C], the cluster of a row, below C; its members exchange with each other only.
      links: bool [C, C], symmetric, without diagonal: these two exchange shares, keys or masks.
      key: of this round's secrets; nothing else of the run depends on it.
      dither: key of the rounding of messages to fixed point, no secret; None = `key`. Where it is the same under two
        protocols, so are the integers that they sum, and the sums to the bit.
      place: int32 [C], of a row in the order in which members speak one after the other; None where all speak at once.
    """

    clients: Array
    joined: Array
    counts: Array
    group: Array
    links: Array
    key: Array
    place: Array | None = None
    dither: Array | None = None


class SecureSum(NamedTuple):
    """How the messages of a round are summed so that nobody has to see one of them. Pure; inside the jitted round.

    What a client uploads is `seal` of its message; the engine adds the uploads up (reads='sum', of unsigned integers
    modulo 2^32) or stacks them (reads='each'), and `open` turns that into the sum of the messages of those that
    arrived, which the aggregator then decodes.

    Attributes:
      name: of the protocol.
      hides: whether one curious party (a neighbour, or the server) learns nothing of a single message beyond the sum.
      reads: 'sum' or 'each': how the engine brings the uploads to `open`.
      meet: (cohort, stays bool [C], key) -> Meeting. `cohort.present`: who is there when the exchange begins; `stays`
        False: gone afterwards, before its upload.
      seal: (message, row int32, meeting) -> (upload, {'saturated': int32}); a tree of the message's structure and
        shapes, uint32 where reads='sum'; saturated counts entries beyond the range.
      open: (total, meeting, arrived bool [C]) -> (sum of the messages of the arrived, failed bool). `arrived` is a
        subset of meeting.counts; failed: the sum cannot be had without giving a message away, and must not be used.
      views: (messages float32 [C, D], meeting) -> {'neighbour', 'colluders', 'server'}: float32 [C, D] each, for
        demonstrations only: what one neighbour receives from every row (of its message), what all others of its group
        received from it, added up, and its upload at the server; ring words as signed fixed point. Rows of zeros where
        nothing is sent.
      most: the public largest number of examples of a client, > 0: weights travel as examples / most, in [0, 1].
      rounding: the largest error of an entry of a client's message by the encoding; 0 = none.
      facts: JSON-able, for reports: 'protocol', 'grade' (of its random numbers), 'threat' (lines), options.
    """

    name: str
    hides: bool
    reads: str
    meet: Callable[[Cohort, Array, Array], Meeting]
    seal: Callable[[Tree, Array, Meeting], tuple[Tree, Mapping[str, Array]]]
    open: Callable[[Tree, Meeting, Array], tuple[Tree, Array]]
    views: Callable[[Array, Meeting], Mapping[str, Array]]
    most: float
    rounding: float
    facts: Mapping[str, Any]


class FederatedState(NamedTuple):
    """Everything a round reads and writes; the checkpoint is this plus the ledger and the metrics position.

    Under replicas every leaf has a leading axis R.
    """

    round: Array  # int32 scalar; the number of finished rounds
    variables: Variables
    server_opt: Tree
    aggregator: Tree
    personal: Mapping[str, Array]  # rows [K, ...]
    key: Array  # uint32 key data; constant over the run
    sampler: Tree = ()  # the sampler's memory; nothing mostly
