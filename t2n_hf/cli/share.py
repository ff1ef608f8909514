"""`t2n-hf push` and `t2n-hf pull`. The token comes from HF_TOKEN or `hf auth login`, never from the command line."""

from typing import Annotated

import typer

from t2n_hf.hub import pull_nnef_from_hub, push_nnef_to_hub

__all__ = ["pull", "push"]

Option = typer.Option


def push(
    path: Annotated[str, typer.Argument(help="An export folder.")],
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub; made when it does not exist.")],
    *,
    private: Annotated[
        bool | None, Option("--private/--public", help="Refused when the repository exists and is the other.")
    ] = None,
    revision: Annotated[str | None, Option(help="Branch to push to; made when it does not exist.")] = None,
    create_pr: Annotated[bool, Option("--create-pr", help="Open a pull request instead of pushing.")] = False,
    commit_message: Annotated[str | None, Option("--message", "-m", help="Commit message.")] = None,
) -> None:
    """Push an export folder to the Hub, after a scan for tokens, local paths, host and user names."""
    print(
        push_nnef_to_hub(
            path,
            repo_id,
            private=private,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
        )
    )


def pull(
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub.")],
    *,
    to: Annotated[str | None, Option(help="Folder to make. Default: in the cache of the Hub client.")] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit.")] = None,
) -> None:
    """Pull an export from the Hub, verify every file, and print the folder."""
    print(pull_nnef_from_hub(repo_id, revision=revision, path=to))
