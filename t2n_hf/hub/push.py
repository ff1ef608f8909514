"""Publish an export folder on the Hub: one commit, or none when nothing changed."""

import hashlib
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.hf_api import ModelInfo, RepoFile

from t2n_hf.errors import ArchiveError, ConfigError, FormatError, HubError
from t2n_hf.hub.connection import TRANSPORT_ERRORS, Connection, check_repo_id, is_transient, status_of
from t2n_hf.hub.scan import LocalFacts, refuse_leaks
from t2n_hf.hub.stage import Staged, stage
from t2n_hf.store.manifest import MANIFEST_NAME, ExportManifest

__all__ = ["push_nnef_to_hub"]

_MAIN: Final = "main"
_RETRY_DELAY_S: Final = 1.0
_PRECONDITION_FAILED: Final = 412
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_LOG: Final = logging.getLogger(__name__)


def push_nnef_to_hub(
    path: str | Path,
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
) -> CommitInfo:
    """Send an export folder to the Hub repository `repo_id` ("owner/name"); returns the commit, which is also its URL.

    Only the files of the manifest, the card and the licence texts are sent, after a scan for secrets, local paths, and
    user and host names; files of an earlier push that this export no longer has are removed in the same commit. Nothing
    changed: no commit, and the present one is returned. A push that was cut off is finished by pushing again.

    `token`: else the one of HF_TOKEN or `hf auth login`. `private`: visibility of a repository that is created here;
    one that exists and is the other is refused. `revision`: a branch, made when missing. `create_pr`: open a pull
    request against the main branch instead.

    Raises ConfigError for bad arguments, StorageError or ArchiveError when the folder is not what its manifest says,
    LeakError when something private is found (nothing was sent then), HubError when the Hub refuses or is out of reach.
    """
    check_repo_id(repo_id)
    _check_revision(revision, create_pr)
    connection = Connection.open(token, required=True)
    staged = stage(path, repo_id)
    message = commit_message or f"Upload {staged.manifest.archive} with t2n_hf"
    facts = LocalFacts.gather(connection.token, staged.folder, public_ids=(repo_id, staged.manifest.source_id or ""))
    refuse_leaks({**staged.files, "commit message": message.encode()}, facts)
    destination = _Destination(connection, repo_id, revision or _MAIN, create_pr, message)
    with connection.failures(f"push to {repo_id}"):
        destination.prepare(private)
        return destination.send(staged)


def _check_revision(revision: str | None, create_pr: bool) -> None:
    if create_pr and revision is not None:
        raise ConfigError(f"create_pr opens a pull request against {_MAIN}; it takes no revision, got {revision!r}")
    if revision is not None and (not revision or _COMMIT.fullmatch(revision)):
        raise ConfigError(f"revision {revision!r} is not the name of a branch; a push goes to a branch")


@dataclass(frozen=True)
class _Destination:
    """A branch of a repository, or a pull request to be opened on it."""

    connection: Connection
    repo_id: str
    branch: str
    create_pr: bool
    message: str

    def prepare(self, private: bool | None) -> None:
        """Create the repository and the branch when missing. Raises HubError when it is not as private as asked for."""
        info = self._info()
        if info is None:
            self.connection.api.create_repo(self.repo_id, private=private, exist_ok=True)
            info = self._info()
        if private is not None and info is not None and bool(info.private) != private:
            state = "public" if private else "private"
            raise HubError(
                f"{self.repo_id} exists and is {state}, and private={private} was asked for: nothing was sent; "
                "change it on its settings page, choose another name, or leave private out"
            )
        if self.branch != _MAIN and not self.branch.startswith("refs/"):
            self.connection.api.create_branch(self.repo_id, branch=self.branch, exist_ok=True)

    def send(self, staged: Staged) -> CommitInfo:
        """Commit what differs; after a cut connection or a lost answer, look at what arrived and finish once."""
        head = self._head()
        additions, present = _additions(staged), self._present(head)
        stale = self._stale(staged, present, head)
        if not stale and _same(additions, present):
            return self._existing(head)
        try:
            commit = self._commit(additions, stale, head)
        except TRANSPORT_ERRORS as error:
            # A second pull request would be worse than an error.
            if self.create_pr or not (is_transient(error) or status_of(error) == _PRECONDITION_FAILED):
                raise
            _LOG.info("push to %s was cut off (%s); looking at what arrived", self.repo_id, type(error).__name__)
            return self._finish(staged, stale, head)
        return self._complete(commit, additions)

    def _finish(self, staged: Staged, stale: list[str], head: str) -> CommitInfo:
        time.sleep(_RETRY_DELAY_S)
        later, additions = self._head(), _additions(staged)
        if later == head:
            return self._complete(self._commit(additions, stale, head), additions)
        present = self._present(later)
        if _same(additions, present) and not present.keys() & set(stale):
            return self._existing(later)
        raise HubError(
            f"cannot push to {self.repo_id}: somebody else committed to {self.branch} meanwhile; look, then push again"
        )

    def _info(self) -> ModelInfo | None:
        try:
            return self.connection.api.model_info(self.repo_id)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            return None

    def _head(self) -> str:
        sha = self.connection.api.model_info(self.repo_id, revision=self.branch).sha
        if sha is None:
            raise HubError(f"the Hub tells no commit of {self.branch} of {self.repo_id}; try again later")
        return sha

    def _present(self, head: str) -> dict[str, RepoFile]:
        entries = self.connection.api.list_repo_tree(self.repo_id, recursive=True, revision=head)
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    def _stale(self, staged: Staged, present: Mapping[str, RepoFile], head: str) -> list[str]:
        """Files of an earlier export in this repository that the staged one does not have."""
        if MANIFEST_NAME not in present:
            return []
        old = self.connection.api.hf_hub_download(self.repo_id, MANIFEST_NAME, revision=head)
        try:
            manifest = ExportManifest.from_json(Path(old).read_bytes())
        except FormatError as error:
            _LOG.warning(
                "the %s in %s is not readable, so no file of it is removed: %s", MANIFEST_NAME, self.repo_id, error
            )
            return []
        return sorted(name for name in manifest.files if name not in staged.files and name in present)

    def _commit(self, additions: list[CommitOperationAdd], stale: list[str], head: str) -> CommitInfo:
        return self.connection.api.create_commit(
            self.repo_id,
            operations=[*additions, *(CommitOperationDelete(path_in_repo=name) for name in stale)],
            commit_message=self.message,
            revision=self.branch,
            create_pr=self.create_pr,
            # The client may send the commit again when its answer is lost: with a parent, the second is refused.
            parent_commit=None if self.create_pr else head,
        )

    def _complete(self, commit: CommitInfo, additions: list[CommitOperationAdd]) -> CommitInfo:
        """Return `commit` when it holds every file. Raises HubError."""
        present = self._present(commit.oid)
        lost = [one.path_in_repo for one in additions if not _is_present(one, present.get(one.path_in_repo))]
        if lost:
            raise HubError(
                f"{commit.commit_url} lacks {', '.join(lost)}: does a .gitignore in {self.repo_id} name them? "
                "Remove it there, then push again"
            )
        return commit

    def _existing(self, head: str) -> CommitInfo:
        url = f"{self.connection.endpoint}/{self.repo_id}/commit/{head}"
        return CommitInfo(commit_url=url, commit_message=self.message, commit_description="", oid=head)


def _additions(staged: Staged) -> list[CommitOperationAdd]:
    """One operation per file. Raises ArchiveError when a file is no longer the one that was verified and scanned."""
    additions = []
    for name, content in staged.files.items():
        addition = CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
        listed = staged.manifest.files.get(name)
        if listed is not None and addition.upload_info.sha256.hex() != listed.sha256:
            raise ArchiveError(f"{name} in {staged.folder} changed while it was being sent; push again")
        additions.append(addition)
    return additions


def _same(additions: list[CommitOperationAdd], present: Mapping[str, RepoFile]) -> bool:
    return all(_is_present(addition, present.get(addition.path_in_repo)) for addition in additions)


def _is_present(addition: CommitOperationAdd, entry: RepoFile | None) -> bool:
    if entry is None or entry.size != addition.upload_info.size:
        return False
    if entry.lfs is not None:
        return entry.lfs.sha256 == addition.upload_info.sha256.hex()
    with addition.as_file() as file:
        content = file.read()
    return entry.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
