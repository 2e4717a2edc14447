"""Layers that keep a state of fixed size of each sequence."""

from hmt.layers.recurrent.delta_attention import DeltaAttention
from hmt.layers.recurrent.delta_net import GatedDeltaNet
from hmt.layers.recurrent.lightning_attention import LightningAttention, lightning_decays
from hmt.layers.recurrent.mamba import Mamba
from hmt.layers.recurrent.mamba2 import Mamba2
from hmt.layers.recurrent.short_conv import ShortConv
