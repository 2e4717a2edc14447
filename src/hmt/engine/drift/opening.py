"""Whether requests of a loaded model are watched, and rows of steps that calibrate."""

from collections.abc import Callable

from hmt.base.log import logger
from hmt.engine.drift.statistics import ActivationStatistics, Floats, statistics_beside
from hmt.engine.drift.watch import ActivationWatch, RowRecorder
from hmt.engine.execution.executor import Executor
from hmt.engine.loading.kv_scales import identity
from hmt.engine.loading.prepared import Prepared


def open_watch(prepared: Prepared) -> ActivationWatch | None:
    """A watch, where statistics lie beside the weights and precision can be raised; else None.

    Statistics of other weights are left out, and a warning says so.  Raises ConfigError where
    their file is damaged.
    """
    file = statistics_beside(prepared.source.path)
    if prepared.copies is not None and not file.is_file():
        logger.warning(
            "fallback_model is not used, since nothing says which requests drift: `hmt calibrate "
            "activations %s` makes %s", prepared.source.path, file.name,
        )  # fmt: skip
    if not file.is_file() or not (prepared.copies or rounds_activations(prepared)):
        return None
    statistics, weights = ActivationStatistics.read(file)
    if weights != identity(prepared.source):
        logger.warning(
            "%s was made for other weights, and no request is watched: `hmt calibrate activations "
            "%s` makes it anew", file, prepared.source.path,
        )  # fmt: skip
        return None
    return ActivationWatch(statistics)


def rounds_activations(prepared: Prepared) -> bool:
    """Whether some weights are multiplied with rounded activations."""
    return any(
        placed.format.activations.are_integers
        for layout in prepared.layouts.values()
        for placed in (*layout.placed, *(staged.placed for staged in layout.staged))
    )


def recorded(
    executor: Executor, run: Callable[[], object], watch: ActivationWatch | None
) -> Floats:
    """Rows of steps that `run` lets `executor` compute, after which `watch` sees its steps again.

    f32 [rows, channels]
    """
    recorder = RowRecorder()
    executor.watch(recorder)
    try:
        run()
    finally:
        executor.watch(watch)
    return recorder.recorded()
