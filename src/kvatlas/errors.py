"""The error tree. Each error says whose fault it was, what was wrong and what to do.

KvatlasError
├── ConfigError       the operator's configuration; the process exits with status 2
├── RequestError      the client's request; answered with an OpenAI error envelope
├── EngineError       an engine answered wrongly or not at all
├── TraceError        a workload file; the text names the file, the line and what is wrong there
├── LayoutError       a model whose KV state we cannot describe; refused, never guessed
├── LedgerError       a caller misuses a tier's books; nothing was changed
├── StoreError        stored or shared bytes are not what they should be, or their place is misused
├── RegisterError     the register did not answer in time, or wrongly; whether it acted is not known
└── SnapshotError     what a peer told of its directory cannot be used; nothing was changed
"""


class KvatlasError(Exception):
    """Base of all errors that kvatlas raises on purpose."""


class ConfigError(KvatlasError):
    """The configuration is at fault. The text names the file, the line and the mend."""


class RequestError(KvatlasError):
    """The client's request is at fault (4xx), or nothing can serve it (5xx)."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: int = 0,
    ) -> None:
        """``param`` names the member of the body, or the header, that is at fault;
        ``retry_after_s`` says when it may be worth asking again (0: no other time is better)."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s or (1 if status == 503 else 0)


class EngineError(KvatlasError):
    """An engine is unreachable, or what it sent cannot be understood."""


class TraceError(KvatlasError):
    """A workload file cannot be read or contradicts itself. The text names file and line."""


class LayoutError(KvatlasError):
    """The model's architecture or its config is unknown, contradictory or not supported."""


class LedgerError(KvatlasError):
    """A tier's books were misused (a commit twice, an unpin too many): a fault in kvatlas itself.
    Nothing was changed by the call."""


class StoreError(KvatlasError):
    """Bytes of a tier are damaged, foreign or out of place. They are not used; what they stood for
    is computed again."""


class RegisterError(KvatlasError):
    """The cluster's register cannot be asked, or did not answer in time or rightly. Where it was
    asked it may have acted."""

    def __init__(self, message: str, reason: str) -> None:
        """``reason``: one word for figures: late, gone, busy, loading, read_only, denied, moving,
        full, unfit, wrong."""
        super().__init__(message)
        self.reason = reason


class SnapshotError(KvatlasError):
    """What a peer tells of its directory cannot be taken up. Nothing was changed: this directory
    learns from the engines alone."""
