"""Families with state spaces in all layers, or in some."""

from hmt.models.state_space.bamba import Bamba
from hmt.models.state_space.falcon_h1 import FalconH1
from hmt.models.state_space.granite_hybrid import GraniteHybrid
from hmt.models.state_space.jamba import Jamba
from hmt.models.state_space.mamba import MambaLM
from hmt.models.state_space.mamba2 import Mamba2LM
from hmt.models.state_space.nemotron_h import NemotronH
