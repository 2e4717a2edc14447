"""What decoders are made of: norm, rotary positions, attention, feed-forward and experts."""

from hmt.layers.attention import Attention
from hmt.layers.compressed import (
    CompressedAttention,
    Compressor,
    EntryIndexer,
    EntryPart,
    GroupedOutput,
    GroupRows,
)
from hmt.layers.ffn import GatedFFN, ResidualFFN
from hmt.layers.gated import (
    BlockIndexer,
    BlockSparseAttention,
    GatedAttention,
    GatedResidual,
    HyperConnection,
    HyperHead,
    NGramHash,
    NGramMemory,
    StreamMix,
    StreamNorm,
)
from hmt.layers.latent import (
    Indexer,
    KeyPool,
    LatentAttention,
    Selection,
    SparseLatentAttention,
)
from hmt.layers.layer_embedding import LayerEmbedding
from hmt.layers.linear import Params, linear_params, project
from hmt.layers.moe import (
    BiasedSigmoidRouter,
    GroupedSoftmaxRouter,
    Router,
    Routing,
    ScaledSoftmaxRouter,
    SigmoidRouter,
    SoftmaxRouter,
    SoftplusRouter,
    add_routed_experts,
    request_experts,
    routed_experts,
    router_inputs,
)
from hmt.layers.norm import GatedRMSNorm, RMSNorm
from hmt.layers.post_norm_attention import PostNormAttention
from hmt.layers.recurrent import (
    DeltaAttention,
    GatedDeltaNet,
    LightningAttention,
    Mamba,
    Mamba2,
    ShortConv,
    lightning_decays,
)
from hmt.layers.rope import (
    NoRotary,
    Rotary,
    border_of,
    check_options,
    common_border,
    yarn_mscale,
)
from hmt.layers.sharing_attention import SharingAttention
from hmt.layers.skipping_attention import LayerApplications, SkippingAttention
from hmt.layers.stack import Experts, FusableLayer, FusedLayers
