"""What GET /v1/hmt/state tells.  Bytes, bytes per second, seconds; shares are 0..1."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """What is served.  images_refused: why it takes no images; empty where it does."""

    name: str
    architecture: str
    layers: int
    published_bytes: int
    max_positions: int
    images_refused: str


@dataclass(frozen=True, slots=True)
class Requests:
    """Answers: computed now, waiting for room, and under way for clients of this server.

    max_running, max_waiting   what there is room for
    """

    running: int
    waiting: int
    inside: int
    max_running: int
    max_waiting: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What computes.  gpu: its name, empty without one."""

    name: str
    cores: int
    gpu: str
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Since the start, and per second of the window."""

    prompt: int
    generation: int
    prompt_per_s: float
    generation_per_s: float


@dataclass(frozen=True, slots=True)
class Time:
    """Shares of the window: the CPU computed, waited for the disk, waited for the GPU.

    What is missing to 1 nobody asked for.
    """

    computing: float
    waiting_for_disk: float
    waiting_for_gpu: float


@dataclass(frozen=True, slots=True)
class Tier:
    """What lies in "device", "host" or "disk".  budget_bytes 0: no limit is set.

    kv_taken_bytes   of kv_bytes, what answers have reserved
    """

    tier: str
    budget_bytes: int
    weights_bytes: int
    experts_bytes: int
    kv_bytes: int
    kv_taken_bytes: int
    other_bytes: int


@dataclass(frozen=True, slots=True)
class Link:
    """What went from "disk" or "host" to "host", "cpu" or "device", over the window's time.

    total_bytes   since the start
    ceiling       that was measured; 0: it was not
    """

    source: str
    target: str
    total_bytes: int
    rate: float
    ceiling: float


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys and values: positions, and pages by level where they lie at several."""

    capacity_tokens: int
    free_tokens: int
    level_pages: dict[str, int]
    level_held_pages: dict[str, int]


@dataclass(frozen=True, slots=True)
class Reads:
    """Blocks that do not stay in memory, when they were needed: there, on their way, or not."""

    hits: int
    pending: int
    misses: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts: a row for each of `layers`.

    places   a letter for each: g on the GPU, m in memory to stay, c in memory as long as there is
             room, d on the disk only
    heat     for each, in percent: the share of recent steps that needed it (a step counts 3% less
             than the one after it); null where whoever computes a layer does not tell
    """

    layers: list[int]
    places: list[str]
    heat: list[list[int] | None]


@dataclass(frozen=True, slots=True)
class Limit:
    """What bounded the steps that were computed last.

    link   "disk", "conversion", "memory" or "computation"
    now    whether that was in the last seconds
    """

    link: str
    rate: float
    ceiling: float
    text: str
    now: bool


@dataclass(frozen=True, slots=True)
class Speculation:
    """Draft tokens: steps that verified any, what these gave, draft tokens, right ones."""

    steps: int
    tokens: int
    proposed: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine, as of `age_s` ago; `window_s`: the time since the look before."""

    age_s: float
    window_s: float
    machine: Machine
    tokens: Tokens
    time: Time
    tiers: list[Tier]
    links: list[Link]
    kv: Keys
    reads: Reads
    prefixes: dict[str, int] | None
    speculation: Speculation
    experts: Experts | None
    bottleneck: Limit | None


@dataclass(frozen=True, slots=True)
class State:
    """All of it.

    engine   null until the first look, which waits for the step that runs
    models     the names of those that are loaded, this one included
    loadable   the names of those that the server would load
    loading    of each that it loads now: the share of its weights that has been read, 0..1
    """

    model: Model
    requests: Requests
    engine: Engine | None
    models: list[str]
    loadable: list[str]
    loading: dict[str, float]
