"""Every error that a user of HMT can cause, as one tree.

    HMTError
    ├── ConfigError              an option that is unknown, malformed or contradicts another
    ├── CheckpointError          the checkpoint on disk cannot be used
    │   ├── MissingFileError       a file or tensor that must be there is not
    │   ├── HeaderError            a header that lies or is truncated
    │   ├── ShapeError             a tensor contradicts the model's configuration
    │   ├── UnknownArchitectureError
    │   ├── AdapterError           a low-rank adapter that does not suit the model, or is in use
    │   └── PackError              a pack that is unfinished, or that another version has made
    │       └── DamagedPackError     its bytes are not those that were written
    ├── BudgetError              what was asked for does not fit the memory that was given
    ├── RequestError             one request is wrong; the engine is fine
    │   ├── EmptyPromptError
    │   ├── ContextLengthError
    │   └── ClosedError            it came after the model was closed
    ├── DeadlineError            a request's time was over before it ended
    ├── DiskReadError            the disk failed; the requests that needed it fail
    ├── DiskWriteError           the disk is full or failed while something was written
    ├── NumericsError            a weight or a result is not a number
    ├── MachineError             the machine lacks what an option needs
    ├── RankError                one of the processes that compute a model together has ended
    └── Cancelled                the request was cancelled by its owner

A message says what was asked, what there is (in numbers), and what to do.
`assert` is for our own bugs.
"""


class HMTError(Exception):
    """Base of all errors that HMT raises on purpose."""


class ConfigError(HMTError):
    """An option is unknown, malformed, or contradicts another one."""


class CheckpointError(HMTError):
    """The checkpoint on disk cannot be used as it is."""


class MissingFileError(CheckpointError):
    """A file or a tensor that the model needs is not there."""


class HeaderError(CheckpointError):
    """A file header lies about the file, is truncated, or is absurd."""


class ShapeError(CheckpointError):
    """A tensor's shape or dtype contradicts the model's configuration."""


class UnknownArchitectureError(CheckpointError):
    """No family of HMT runs this architecture."""


class AdapterError(CheckpointError):
    """A low-rank adapter cannot be used with this model, or not now."""


class PackError(CheckpointError):
    """A pack is unfinished, or was made by another version or for another model."""


class DamagedPackError(PackError):
    """Bytes of a pack are not those that were written."""


class BudgetError(HMTError):
    """The plan, or one allocation, does not fit the memory budget."""


class RequestError(HMTError):
    """One request cannot be served as asked; others are not affected."""


class EmptyPromptError(RequestError):
    """The prompt holds no tokens."""


class ContextLengthError(RequestError):
    """Prompt and answer together are longer than the context allows."""


class ClosedError(RequestError):
    """The model has been closed; load it again."""


class DeadlineError(HMTError):
    """A request's time was over before it ended."""


class DiskReadError(HMTError):
    """A read failed or ended early; the same read may work later."""


class DiskWriteError(HMTError):
    """A write failed, mostly because the disk is full; what was written before stays."""


class NumericsError(HMTError):
    """A weight, or a logit, is NaN or infinite."""


class MachineError(HMTError):
    """This machine lacks something that was asked for explicitly."""


class RankError(HMTError):
    """One of the processes that compute a model together has ended: load the model again."""


class Cancelled(HMTError):
    """The request was cancelled before it finished."""


def os_reason(error: OSError) -> str:
    """Why the system, or a library that raises its errors, could not do something.

    `strerror` alone is None where only a text was given, as by shutil for symbolic links.
    """
    return error.strerror or str(error) or type(error).__name__
