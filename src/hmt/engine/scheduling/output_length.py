"""How long answers become, from those that have ended: pure data."""

from collections import OrderedDict, deque

_REMEMBERED = 64  # answers of each owner
_ENOUGH = 8  # answers from which is judged
_MOST_OWNERS = 1024
# Of answers, those that are no longer than what is expected.  For 200 simulated requests with
# answers of 150 tokens (log-normal, sigma 1, at most 1024) in 4096 positions the longest takes 17.5
# thousand steps, three of four 8.9, and half 7.6, with 3.7% of tokens computed again.
_SHARE = 0.5

_Answers = deque[tuple[int, bool]]


class OutputLengthEstimate:
    """Expects of an owner's next answer what half of their last ones did not exceed.

    While an owner has had few answers, it goes by everybody's; while there were few at all, the
    longest that was asked for is expected.
    """

    def __init__(self) -> None:
        self._owners: OrderedDict[str, _Answers] = OrderedDict()
        self._every: _Answers = deque(maxlen=_REMEMBERED)

    def note(self, owner: str, tokens: int, *, whole: bool) -> None:
        """An answer has ended after `tokens`; not `whole`: since it was not allowed more."""
        answers = self._owners.setdefault(owner, deque(maxlen=_REMEMBERED))
        self._owners.move_to_end(owner)
        if len(self._owners) > _MOST_OWNERS:
            self._owners.popitem(last=False)
        for kept in (answers, self._every):
            kept.append((tokens, whole))

    def expected(self, owner: str, longest: int, so_far: int = 0) -> int:
        """Tokens that an answer will have, of at most `longest`, when it has `so_far` of them.

        Answers that were cut off earlier than this one may be are taken to become the longest.
        """
        answers = self._owners.get(owner, ())
        if len(answers) < _ENOUGH:
            answers = self._every
        if len(answers) < _ENOUGH:
            return longest
        ends = [tokens if whole else max(tokens, longest) for tokens, whole in answers]
        left = sorted(min(end, longest) for end in ends if end > so_far)
        if not left:  # longer than all before
            return min(longest, 2 * so_far)
        return left[int(_SHARE * (len(left) - 1) + 0.5)]
