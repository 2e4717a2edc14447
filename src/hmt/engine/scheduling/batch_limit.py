"""How many sequences may be in a step, by how much memory they have left: pure data."""

import enum

# Of positions, those in use from which a level begins, and below which it ends.  In between it
# stays, so that the batch does not swing.
_TIGHT, _EASY_AGAIN = 0.9, 0.8
_SHORT, _TIGHT_AGAIN = 0.97, 0.9


class MemoryPressure(enum.IntEnum):
    """EASY: as many as may run at once; TIGHT: no more than run; SHORT: fewer than run."""

    EASY = 0
    TIGHT = 1
    SHORT = 2


class BatchLimit:
    """Who is admitted when answers may become longer than there is room for.

    level  of pressure
    used   share of positions that are in use, as of the last look
    most   sequences in a step: more are not admitted; those that run go on
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self.level = MemoryPressure.EASY
        self.used = 0.0
        self.most = max_batch

    def update(self, used: float, running: int, *, at_risk: bool, sent_back: bool) -> None:
        """Once a step, with who runs now.

        at_risk     whether some of them would find no room if all answers became the longest
        sent_back   whether somebody has just found none
        """
        self.used = used
        before, self.level = self.level, self._level(used, at_risk=at_risk, sent_back=sent_back)
        if self.level is MemoryPressure.EASY:
            self.most = self._max_batch
        elif self.level is MemoryPressure.SHORT and (
            sent_back or before is not MemoryPressure.SHORT
        ):
            self.most = max(1, 3 * running // 4)
        elif self.level is MemoryPressure.TIGHT and before is not MemoryPressure.TIGHT:
            self.most = max(1, running)

    def _level(self, used: float, *, at_risk: bool, sent_back: bool) -> MemoryPressure:
        if sent_back:
            return MemoryPressure.SHORT
        if not at_risk:
            return MemoryPressure.EASY
        short = _TIGHT_AGAIN if self.level is MemoryPressure.SHORT else _SHORT
        tight = _EASY_AGAIN if self.level is not MemoryPressure.EASY else _TIGHT
        if used >= short:
            return MemoryPressure.SHORT
        return MemoryPressure.TIGHT if used >= tight else MemoryPressure.EASY
