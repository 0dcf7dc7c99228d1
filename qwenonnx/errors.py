"""Every error that qwenonnx raises on purpose, as one tree.

    QwenonnxError                 exit 1, HTTP 500
    ├── UsageError                exit 2: the command was asked for something that makes no sense
    ├── PullError                 a checkpoint could not be fetched
    │   └── OfflineError          no hub answered
    ├── CheckpointError           a checkpoint is missing, damaged or of another kind
    ├── ExportError               the graph could not be written
    │   └── VerificationError     what was written does not compute what the checkpoint says
    ├── QuantizeError             a package could not be quantized
    ├── PackageError              a folder is not a package, or a damaged one
    ├── DiskSpaceError            there is not enough room for the result
    ├── EngineError               generation failed
    │   ├── NumericalError        the model produced NaN or infinite logits
    │   ├── DeadlineError         HTTP 504: the time that a request was given is over
    │   └── QueueFullError        HTTP 429: too many requests are waiting
    ├── UnavailableError          HTTP 503: loading or shutting down
    └── InvalidRequestError       HTTP 400: a request that cannot be served as sent
        ├── ContextLengthError    the prompt does not fit the context
        ├── ModelNotFoundError    HTTP 404
        └── AuthenticationError   HTTP 401

Messages are one sentence: what is wrong, where, and what to do. `cli.main` maps the tree to exit codes and
`server.errors` to OpenAI error objects; nothing else does.
"""


class QwenonnxError(Exception):
    """Base of all errors raised on purpose; its text is meant for the user."""


class UsageError(QwenonnxError):
    """The command line asks for something that makes no sense."""


class PullError(QwenonnxError):
    """A checkpoint could not be fetched."""


class OfflineError(PullError):
    """No hub answered, so a checkpoint that is not on disk cannot be had."""


class CheckpointError(QwenonnxError):
    """A checkpoint is missing, damaged, or of a kind that is not supported."""


class ExportError(QwenonnxError):
    """A graph could not be written."""


class VerificationError(ExportError):
    """An exported graph does not compute what its checkpoint says."""


class QuantizeError(QwenonnxError):
    """A package could not be quantized."""


class PackageError(QwenonnxError):
    """A folder is not a package, or it is a damaged one."""


class DiskSpaceError(QwenonnxError):
    """There is not enough room on the disk for what is about to be written."""


class EngineError(QwenonnxError):
    """Generation failed."""


class NumericalError(EngineError):
    """The model produced NaN or infinite logits."""


class DeadlineError(EngineError):
    """The time that a request was given is over."""


class QueueFullError(EngineError):
    """Too many requests are waiting already.

    `retry_after` estimates in how many seconds there is room, `position` is the place that the request would have had
    in the queue, and `limit` how many may wait.
    """

    def __init__(self, message: str, *, retry_after: float, position: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.position = position
        self.limit = limit


class UnavailableError(QwenonnxError):
    """The model is still loading, or the process is shutting down."""


class InvalidRequestError(QwenonnxError):
    """A request cannot be served as sent; `param` names the field and `code` the kind of fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """The prompt does not leave room for a single new token."""

    def __init__(self, prompt_tokens: int, context_length: int, *, param: str | None = "messages") -> None:
        super().__init__(
            # Clients of OpenAI know this kind of error by its first words.
            f"This model's maximum context length is {context_length} tokens, but the prompt has {prompt_tokens}; "
            f"shorten it to at most {context_length - 1}.",
            param=param,
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""


class AuthenticationError(InvalidRequestError):
    """The API key is missing or wrong."""
