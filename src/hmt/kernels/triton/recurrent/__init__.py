"""Layers with recurrent state on the GPU.

what                                        kernel
a convolution over time, gated or not       convolution.py: a tile of tokens and channels; what
                                            stays of the tokens by a second kernel, or, of steps of
                                            one token per run, by the first
the gated delta rule                        delta_rule.py: some columns of a head's matrix, in
                                            registers, for all tokens of a run
state spaces                                state_space.py: the same, of a head's state; and the
                                            lengths of time steps
state spaces with a decay for each number   selective.py: the state of some channels

state_runs.py tells all of them where runs and their states are.
"""

from hmt.kernels.triton.recurrent.convolution import causal_conv
from hmt.kernels.triton.recurrent.delta_rule import gated_delta_rule
from hmt.kernels.triton.recurrent.selective import selective_scan
from hmt.kernels.triton.recurrent.state_runs import fixed_state_runs, update_state_runs
from hmt.kernels.triton.recurrent.state_space import state_space_scan, time_steps
