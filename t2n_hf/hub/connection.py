"""The connection to a Hub: its token, its endpoint, and how its failures read.

A token is shown nowhere: not in a repr, not in an error, also when the server or the HTTP library repeats it.
"""

import ipaddress
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from t2n_hf.errors import ConfigError, HubError, T2NError

__all__ = ["TRANSPORT_ERRORS", "Connection", "check_repo_id", "is_transient", "status_of"]

# hf_xet raises builtins; a lost reply is a bare error of the HTTP library.
TRANSPORT_ERRORS: Final = (httpx2.HTTPError, ConnectionError, TimeoutError, RuntimeError)
_TRANSIENT_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504})
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
_HIDDEN: Final = "<token>"
_LOGIN: Final = "run `hf auth login`, set HF_TOKEN, or pass token="
_HINTS: Final = {
    400: "the Hub does not accept this content",
    401: f"the token is missing, wrong or expired: {_LOGIN}",
    402: "the account's storage or plan does not allow it",
    403: "the token may not do this here: it needs write access to this repository or namespace",
    404: "check the name; a private repository that the token may not see also reads as missing",
    409: "another operation is under way on this repository: try again later",
    412: "somebody else committed to this branch meanwhile: look at it, then push again",
    413: "a file is larger than the Hub accepts",
    429: "too many requests: wait, then try again",
}


@dataclass(frozen=True)
class Connection:
    """A token and the API that uses it."""

    token: str | None = field(repr=False)
    api: HfApi = field(repr=False)

    @classmethod
    def open(cls, token: str | None, *, required: bool, endpoint: str = constants.ENDPOINT) -> "Connection":
        """Take `token`, or else the one that the user is logged in with. Sends nothing.

        Warns when the endpoint is plain HTTP to another machine. Raises ConfigError for a token that cannot be one, and
        when one is required and there is none.
        """
        token = token if token is not None else get_token()
        if token is not None and not _TOKEN.fullmatch(token):
            raise ConfigError("the Hub token is empty, or has spaces, line breaks or characters that no token has")
        if token is None and required:
            raise ConfigError(f"there is no Hub token: {_LOGIN}")
        _warn_of_plain_http(endpoint, token)
        return cls(token, HfApi(endpoint, token=token if token is not None else False, library_name="t2n_hf"))

    @property
    def endpoint(self) -> str:
        """Address of the Hub, without a slash at its end."""
        return self.api.endpoint

    @contextmanager
    def failures(self, action: str) -> Iterator[None]:
        """Turn every failure of the Hub client inside into a HubError; `action` is what was tried."""
        try:
            yield
        except T2NError:
            raise
        except (*TRANSPORT_ERRORS, OSError, ValueError) as error:
            text = self.hide(f"cannot {action}: {_explain(error)}")
            # The chain of the client's errors can repeat a request header: it goes along only when it is clean.
            raise HubError(text) from (error if self._is_clean(error) else None)

    def hide(self, text: str) -> str:
        """Return `text` with the token blotted out."""
        return text.replace(self.token, _HIDDEN) if self.token else text

    def _is_clean(self, error: BaseException) -> bool:
        link: BaseException | None = error
        while link is not None:
            if self.token and self.token in f"{link} {link.args}":
                return False
            link = link.__cause__ or link.__context__
        return True


def check_repo_id(repo_id: str) -> None:
    """Raise ConfigError unless `repo_id` is `owner/name`."""
    try:
        validate_repo_id(repo_id)
        valid = isinstance(repo_id, str) and repo_id.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{repo_id!r} is not the id of a Hub repository; expected owner/name, such as 'alice/smollm2-q4'"
        )


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of a failure, or None."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed when it is made again."""
    if isinstance(error, OfflineModeIsEnabled):
        return False
    status = status_of(error)
    return status is None or status in _TRANSIENT_STATUSES


def _explain(error: BaseException) -> str:
    if isinstance(error, OfflineModeIsEnabled):
        return "the Hub client is in offline mode (HF_HUB_OFFLINE is set)"
    if isinstance(error, LocalEntryNotFoundError):
        return "the Hub cannot be reached, and the local cache does not hold it"
    if not isinstance(error, HfHubHTTPError):
        return f"{type(error).__name__}: {error}"
    status = error.response.status_code
    said = f", saying {error.server_message!r}" if error.server_message else ""
    return f"the Hub answered {status}{said}; {_hint(error, status)}"


def _hint(error: HfHubHTTPError, status: int) -> str:
    if isinstance(error, GatedRepoError):
        return "its authors grant access to it: ask on its page, then use a token of that account"
    if isinstance(error, RevisionNotFoundError):
        return "there is no such branch, tag or commit"
    if isinstance(error, EntryNotFoundError):
        return "the repository does not hold this file"
    if isinstance(error, RepositoryNotFoundError) and status == 401:
        return f"there is no such repository, or it is private and no valid token was sent: {_LOGIN}"
    return _HINTS.get(status, "try again later")


def _warn_of_plain_http(endpoint: str, token: str | None) -> None:
    url = urlsplit(endpoint)
    if url.scheme != "http" or _is_loopback(url.hostname or ""):
        return
    loss = "the token and the files can be read" if token else "the files can be read and changed"
    # An address can hold a password: only the host is shown.
    warnings.warn(
        f"HF_ENDPOINT is plain HTTP to {url.hostname}: {loss} by anyone on the way; use https",
        UserWarning,
        stacklevel=4,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
