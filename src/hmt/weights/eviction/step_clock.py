"""The clock of policies: steps of the model, told by the order in which blocks are used."""

from hmt.contracts.blocks import BlockId


class StepClock:
    """Counts steps.  Layers, and the experts of one, are used in ascending order within a step.

    So nobody has to announce steps, and a trace that is replayed has the same ones.  (A step that
    begins behind the place where the last one ended is taken for a part of it; that needs a model
    with experts in one layer only.)
    """

    def __init__(self) -> None:
        self._last = (-1, -1)
        self.step = 0

    def use(self, block: BlockId) -> int:
        """The step in which `block` is used, now."""
        place = (block.layer, block.index)
        if place <= self._last:
            self.step += 1
        self._last = place
        return self.step
