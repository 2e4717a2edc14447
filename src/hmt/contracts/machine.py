"""A machine as data: everything that planning and prediction need to know of one."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of a machine, or written down about one.

    Rates are bytes per second; 0, or an absent entry, means not known.

    cores              that may compute
    ram_bytes, ram_read_rate, core_read_rate   memory, read by all cores together, each its own
                       node's, and by one
    cpu_rates          weights multiplied with one token, by encoding: "bf16", "w4a8", ...
    cpu_ops            operations per second with hundreds of tokens, by encoding; and with fewer
                       under "w4a8@8", where that was measured
    cpu_row_s          what each number of a result takes beyond its weights, named as in cpu_ops,
                       and with one token ENCODING@1; with several, for each of them
    cache_bytes        of the CPU's last caches
    cached_rates       bytes per second of memory that is read again and again and fits them, by how
                       much it is, such as "64MiB"; not known: ram_read_rate
    cpu_cached_rates, cpu_cached_attention_rate   the most that weights, and keys and values, are
                       read at that fit them well
    cpu_attention_rate, cpu_attention_ops   keys and values that one token attends to, bytes per
                       second; operations per second of prompts' attention.  Not known: as memory
                       and bf16
    cpu_attention_short_rate, cpu_cached_attention_short_rate, cpu_attention_short_ops   of keys and
                       values of which a layer has 8 KiB in a page (2 heads of 64 numbers), not 64;
                       not known: the same
    cpu_attention_cold_s   of a layer's attention with one token where caches hold nothing of what
                       it reads, beyond its bytes at these rates; not known: nothing
    cpu_cached_row_s   of each row then, with one token, by encoding; not known: nothing
    cpu_in_layers      how many times as long products take in the layers of a step that reads them
                       from memory, by encoding and for several users under "w4a8@8": calls that
                       compute more than one keep all cores busy.  Not known: 1
    numa_nodes         of the memory that a model is spread over
    numa_distances     of memory from each node, a row per node: 10 for its own; not known: empty
    remote_share       of the rate of a node's own memory, what another node's gives
    disk_bytes, disk_read_rate
    disk_flight_bytes  that the drive is asked for at once: the first of many blocks arrives when
                       about so many bytes have; not known: 0
    device_name        the GPU; empty without one
    device_bytes, device_read_rate   its memory
    device_rates       of weights, by encoding, as cpu_rates; not known: device_read_rate
    device_ops         operations per second there, as cpu_ops
    device_attention_rate, device_attention_ops, device_attention_several   the last of eight users
                       and more together; 0: as of one
    link_rate          from pinned host memory to it
    shared_link_rate, shared_cpu_rate   of the link, and of the CPU computing with weights of the
                       model's usual format, at once
    step_s, row_s      what the CPU does for a step, whatever that computes (scheduling, choosing
                       tokens), and for each user in it.  A GPU computes the next step meanwhile
    draw_s, draw_row_s   the same where it cannot: tokens are drawn (a temperature above 0), and the
                       next step waits for them.  draw_s 0: as step_s and row_s
    logit_s            of each logit that a token is drawn from
    layer_s            of a layer on the CPU, beyond its bytes; where these come from memory,
                       cpu_in_layers has it
    apart_layer_s      of a layer that is computed by itself, since blocks of layers move, or since
                       no call computes many of them
    apart_experts_s    of its routed experts, beyond that
    apart_latent_s     of its latent attention, beyond that
    apart_latent_row_s   and for each further user
    held_experts_s     apart_experts_s of experts that live on the drive and are held in slots
    missed_expert_s    of each of them that is not, beyond its reading
    lookup_s           of a step that reads rows of its embedding's table from the drive
    read_block_s       of calls for a dense block that comes from the drive, beyond apart_layer_s
    read_alone_s       of waiting for it, beyond its bytes, where nothing is read beside it
    cold_calls         how many times as long step_s takes in steps that read so much, by sizes such
                       as "64MiB": caches keep less of what is called.  Not known: 1
    number_s           of each number of a token's hidden state in a layer there: norms, rotations,
                       and whatever else passes over activations
    prompt_layer_s     layer_s in a step of many tokens, whose calls are others
    piece_s            step_s of a step that reads a piece of a prompt; not known: step_s
    prompt_experts_s, expert_number_s   of routed experts there, beyond that: of a layer, and of
                       each number of a hidden state that goes to an expert
    prompt_latent_s, latent_number_s   of latent attention there, beyond that: of a layer, and of
                       each number of its heads' queries and values
    device_step_s      of the GPU for a step, beyond its layers and its head
    device_layers      of a layer there, beyond what it reads and computes, by encoding and for
                       several users under "w4a16@8"; with routed experts under "w4a16 experts".
                       Empty: launch_s
    device_launches    until the CPU has launched a layer of a prompt's step, by the same names; the
                       GPU computes meanwhile what was launched before.  Empty: prompt_launch_s
    bring_s            until the CPU has launched what a prompt's step does to bring an expert, or
                       another block, there
    prompt_s           of a prompt's last piece, beyond its layers; not known: piece_s
    launch_s           of a layer on the GPU, beyond its bytes
    device_number_s, prompt_launch_s   number_s and prompt_layer_s of the GPU
    pace               seconds that some work of Python's took when what the CPU does beside kernels
                       was measured: see engine/pace.py
    reading_pace, arithmetic_pace   that products with one token took, and one with many, when rates
                       of memory and of arithmetic were: see engine/cpu_pace.py
    cached_pace        that products took with weights that caches hold, when cached_rates were
    sync_s             of handing over from GPU to CPU, or back
    process_bytes      by which a process grows that loads a plan and runs it, beside what plans
                       reserve
    streaming_bytes, converting_bytes   beyond process_bytes, where weights come from the drive, and
                       where they are converted then
    context_bytes      of the GPU's memory, beside what plans reserve: what the driver and libraries
                       keep there
    note               where the figures come from
    """

    name: str
    cores: int
    ram_bytes: int
    ram_read_rate: float
    disk_read_rate: float
    device_name: str = ""
    link_rate: float = 0.0
    shared_link_rate: float = 0.0
    shared_cpu_rate: float = 0.0
    core_read_rate: float = 0.0
    cpu_rates: Mapping[str, float] = field(default_factory=dict)
    cpu_ops: Mapping[str, float] = field(default_factory=dict)
    cpu_row_s: Mapping[str, float] = field(default_factory=dict)
    cache_bytes: int = 0
    cached_rates: Mapping[str, float] = field(default_factory=dict)
    cpu_cached_rates: Mapping[str, float] = field(default_factory=dict)
    cpu_attention_rate: float = 0.0
    cpu_attention_ops: float = 0.0
    cpu_cached_row_s: Mapping[str, float] = field(default_factory=dict)
    cpu_in_layers: Mapping[str, float] = field(default_factory=dict)
    cpu_cached_attention_rate: float = 0.0
    cpu_attention_short_rate: float = 0.0
    cpu_cached_attention_short_rate: float = 0.0
    cpu_attention_short_ops: float = 0.0
    cpu_attention_cold_s: float = 0.0
    numa_nodes: int = 1
    numa_distances: tuple[tuple[int, ...], ...] = ()
    remote_share: float = 1.0
    disk_bytes: int = 0
    disk_flight_bytes: int = 0
    device_bytes: int = 0
    device_read_rate: float = 0.0
    device_rates: Mapping[str, float] = field(default_factory=dict)
    device_ops: Mapping[str, float] = field(default_factory=dict)
    device_attention_rate: float = 0.0
    device_attention_ops: float = 0.0
    device_attention_several: float = 0.0
    step_s: float = 0.0
    row_s: float = 0.0
    draw_s: float = 0.0
    draw_row_s: float = 0.0
    logit_s: float = 0.0
    layer_s: float = 0.0
    apart_layer_s: float = 0.0
    apart_experts_s: float = 0.0
    apart_latent_s: float = 0.0
    apart_latent_row_s: float = 0.0
    held_experts_s: float = 0.0
    missed_expert_s: float = 0.0
    lookup_s: float = 0.0
    read_block_s: float = 0.0
    read_alone_s: float = 0.0
    cold_calls: Mapping[str, float] = field(default_factory=dict)
    number_s: float = 0.0
    prompt_layer_s: float = 0.0
    piece_s: float = 0.0
    prompt_experts_s: float = 0.0
    expert_number_s: float = 0.0
    prompt_latent_s: float = 0.0
    latent_number_s: float = 0.0
    device_step_s: float = 0.0
    device_layers: Mapping[str, float] = field(default_factory=dict)
    device_launches: Mapping[str, float] = field(default_factory=dict)
    bring_s: float = 0.0
    prompt_s: float = 0.0
    launch_s: float = 0.0
    device_number_s: float = 0.0
    prompt_launch_s: float = 0.0
    pace: float = 0.0
    reading_pace: float = 0.0
    arithmetic_pace: float = 0.0
    cached_pace: float = 0.0
    sync_s: float = 0.0
    process_bytes: int = 0
    streaming_bytes: int = 0
    converting_bytes: int = 0
    context_bytes: int = 0
    note: str = ""
