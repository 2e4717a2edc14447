"""Nearly equal sizes become equal, at a bounded price."""

from hypothesis import given
from hypothesis import strategies as st

from hmt.memory import size_classes


@given(st.lists(st.integers(0, 10_000)))
def test_a_class_is_narrow_and_named_by_its_largest(sizes: list[int]) -> None:
    classes = size_classes(sizes)
    assert classes.keys() == set(sizes)
    for size, rounded in classes.items():
        assert rounded in classes and size <= rounded <= size * (1 + 1 / 64)
        assert classes[rounded] == rounded, "what was rounded stays"
        between = [other for other in classes if size <= other <= rounded]
        assert all(classes[other] == rounded for other in between)


def test_experts_that_straddle_pages_differently_are_alike() -> None:
    assert size_classes([2304, 2305, 2306, 0]) == {2304: 2306, 2305: 2306, 2306: 2306, 0: 0}
    assert size_classes([26, 27]) == {26: 26, 27: 27}, "a page is too much of a small one"
