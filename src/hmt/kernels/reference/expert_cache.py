"""Which of a layer's chosen experts compute where, with a cache of experts on a device.

A chosen expert computes on the device if it is cached there.  Of the others the link brings a
share, which then computes on the device as well, and the host computes the rest.  What the link has
brought stays in the cache, in place of what has been wanted least, if it has been wanted more.
Where the share is less than one expert, one is brought nevertheless that has been wanted much more.

One token chooses few experts, of which a share is seldom whole: one more can be cut, so that link
and host are ready at once.  Its inner numbers, which are rows of gate and up and columns of down,
add up: the device computes the first of them and the host the others.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

# What a step leaves of an expert's score.  After 23 steps half is left: long enough to count how
# often an expert is chosen, short enough to follow a conversation.
SCORE_DECAY = 0.97
# By how much an expert's score exceeds that of the one in whose place it comes, where it is brought
# though the link's share is not so much.  This step takes longer for it, by no more than each later
# one takes less that finds it there, and its score has this step's use in it already.  Simulated
# with 8 of 128 experts: what is missing takes 60% less time where some are chosen much more often
# than others, and 6% more where all are alike.
WORTH_BRINGING = 2.0


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """A layer's cache, in tensors on the device that stay where they are.

    table      int64 [experts]: address of each expert there; 0: not there
    addresses  int64 [slots], and who is in them:
    holders    int64 [slots]: an expert, or -1
    scores     f32 [experts]: how often, and how lately, each was chosen
    staging    int64 [fetched]: addresses for experts that are brought and do not stay; other
               layers use the same
    origins    int64 [experts]: addresses in host memory that the device can read
    counts     int64 [4]: experts found, brought, and left to the host, since the beginning; and
               pieces that were brought of some of those that were left
    """

    table: Tensor
    addresses: Tensor
    holders: Tensor
    scores: Tensor
    staging: Tensor
    origins: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class ExpertShares:
    """Who computes what in one layer of one step; on the device.

    here      int64 [experts]: the address of each expert that computes on the device; 0: none
    sources   int64 [fetched]: experts to bring, -1: none
    targets   int64 [fetched]: where to
    on_host   int64 [tokens, top_k]: experts that the host computes, -1 where there is none
    left      int32 [1]: how many experts these are
    cut       int32 [2]: one of these of which the device computes the first inner numbers, and how
              many; it is among those to bring, does not stay, and is -1 where there is none
    """

    here: Tensor
    sources: Tensor
    targets: Tensor
    on_host: Tensor
    left: Tensor
    cut: Tensor


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where experts may be cut: into `pieces` of `rows` inner numbers each.

    regions   int32 [n, 3] on the device, in words of an expert's memory: where what is made of
              pieces begins, how many words it has, and after how many it begins again with the
              first piece.  Whatever is in none of them goes with every piece
    """

    pieces: int
    rows: int
    regions: Tensor


def divide_experts(
    slots: ExpertSlots, chosen: Tensor, share: Tensor, cuts: Cuts | None = None
) -> ExpertShares:
    """Divide the experts of `chosen` int64 [tokens, top_k]; changes tensors of `slots`.

    share   f32 [1]: of the experts that are not there, those that the link brings
    cuts    None where none may be cut

    The link brings what has been chosen most, of equals the first; what has been chosen least goes,
    empty slots first, but nothing that this step wants.
    """
    experts, places = len(slots.table), len(slots.addresses)
    needed = torch.zeros(experts, dtype=torch.bool, device=chosen.device)
    needed[chosen.flatten()] = True
    slots.scores.mul_(SCORE_DECAY).add_(needed.float())
    missing = needed & (slots.table == 0)
    exact, part = share * missing.sum(), 0
    if cuts is None:
        quota = int((exact + 0.5).floor())
    else:
        quota = int(exact.floor())
        # Rounded down: what the link brings is computed when it is there, what the host has is not.
        part = int(((exact - quota) * cuts.pieces).floor())
    wanted = sorted(
        missing.nonzero().flatten().tolist(), key=lambda e: (-float(slots.scores[e]), e)
    )
    holders = slots.holders.tolist()
    worth = [-1.0 if holder < 0 else float(slots.scores[holder]) for holder in holders]
    free = [slot for slot in range(places) if holders[slot] < 0 or not needed[holders[slot]]]
    victims = sorted(free, key=lambda slot: (worth[slot], slot))
    may_bring = not quota and wanted and victims and float(share) > 0
    if may_bring and slots.scores[wanted[0]] - worth[victims[0]] >= WORTH_BRINGING:
        quota, part = 1, 0
    if quota >= len(slots.staging):
        quota, part = len(slots.staging), 0
    fetched = wanted[:quota]
    here = slots.table.clone()
    shares = ExpertShares(
        here,
        torch.full_like(slots.staging, -1),
        torch.zeros_like(slots.staging),
        torch.full_like(chosen, -1),
        torch.zeros(1, dtype=torch.int32, device=chosen.device),
        torch.tensor([-1, 0], dtype=torch.int32, device=chosen.device),
    )
    for number, expert in enumerate(fetched):
        target = slots.staging[number]
        victim = victims[number] if number < len(victims) else None
        if victim is not None and float(slots.scores[expert]) > worth[victim]:
            target = slots.addresses[victim]
            if holders[victim] >= 0:
                slots.table[holders[victim]] = 0
            slots.table[expert] = target
            slots.holders[victim] = expert
        here[expert] = target
        shares.sources[number], shares.targets[number] = expert, target
    away = here[chosen] == 0
    if cuts is not None and part:
        one, target = wanted[quota], slots.staging[quota]
        here[one] = target
        shares.sources[quota], shares.targets[quota] = one, target
        shares.cut[0], shares.cut[1] = one, part * cuts.rows
    shares.on_host[away] = chosen[away]
    shares.left[0] = int(missing.sum()) - len(fetched)
    found = int(needed.sum()) - int(missing.sum())
    left, pieces = int(shares.left), 0 if cuts is None else part
    slots.counts.add_(torch.tensor([found, len(fetched), left, pieces]).to(chosen.device))
    return shares


def fetch_experts(
    slots: ExpertSlots, shares: ExpertShares, nbytes: int, cuts: Cuts | None = None
) -> None:
    """Copy what `shares` brings, `nbytes` of each expert.  All addresses are of host memory.

    Of one that is cut, kernels copy only what `cuts` says.
    """
    for expert, target in zip(shares.sources.tolist(), shares.targets.tolist(), strict=True):
        if expert >= 0:
            ctypes.memmove(target, int(slots.origins[expert]), nbytes)
