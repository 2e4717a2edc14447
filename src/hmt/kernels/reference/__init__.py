"""Every operation in plain torch, on any device: what the other kernels are tested against."""

from hmt.kernels.reference.attention import (
    ATTENTION_WORKSPACE_BYTES,
    attend_part,
    attention,
    attention_output,
    block_attention,
    merge_attention,
    page_masses,
    paged_attention,
    paged_attention_output,
)
from hmt.kernels.reference.elementwise import (
    add_rms_norm,
    add_rms_norm_quantize,
    gated,
    gated_pair,
    rms_norm,
    rms_norm_inplace,
    rms_norm_quantize,
    rope,
    rope_inplace,
    sigmoid,
    sigmoid_gated,
)
from hmt.kernels.reference.expert_cache import (
    SCORE_DECAY,
    Cuts,
    ExpertShares,
    ExpertSlots,
    divide_experts,
    fetch_experts,
)
from hmt.kernels.reference.experts import (
    Expert,
    block_table,
    experts,
    matrix_name,
    scattered_experts,
)
from hmt.kernels.reference.graph_steps import (
    can_copy_pages,
    combine_parts,
    copy_pairs,
    fixed_runs,
    logit_stats_of,
    single_tokens,
)
from hmt.kernels.reference.index_selection import (
    index_scores,
    index_topk,
    paged_index_topk,
    selected_attention,
)
from hmt.kernels.reference.kv_pages import (
    AttentionMetadata,
    PagedSegment,
    PageEncoding,
    PageLayout,
    Pages,
    append_pages,
    divided,
    encode_rows,
    read_pages,
    read_rows,
    read_value_rows,
)
from hmt.kernels.reference.low_rank import add_low_rank
from hmt.kernels.reference.matmul import (
    dequantize,
    head_products,
    linear,
    linear_by_chunks,
    linear_into,
    linear_many,
    quantize_activation_blocks,
    quantize_activations,
)
from hmt.kernels.reference.recurrent import (
    DeltaHeads,
    StateRuns,
    causal_conv,
    fixed_state_runs,
    gated_delta_rule,
)
from hmt.kernels.reference.routing import (
    biased_sigmoid_topk,
    depth_scores,
    grouped_softmax_topk,
    softmax_topk,
)
from hmt.kernels.reference.sampling import LogitStats, draw, largest, logit_stats, support
from hmt.kernels.reference.state_space import selective_scan, state_space_scan, time_steps
from hmt.kernels.reference.streams import read_streams, stream_mixes, write_streams
from hmt.kernels.reference.sublayers import (
    GATE_UP,
    QUERY_KEY_VALUE,
    AttentionInputs,
    DeltaChain,
    FeedForward,
    LatentLayer,
    NormOptions,
    Spans,
    add_latent_attention,
    append_attend_pages,
    attention_inputs,
    delta_layer,
    feed_forward,
    linear_gated,
    linear_many_float,
    router_inputs,
)
