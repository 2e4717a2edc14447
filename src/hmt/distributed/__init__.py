"""Processes that compute together: what they add up, through torch.distributed."""

from hmt.distributed.rank_group import RankGroup
