"""`headrace tokens create|list|revoke`: who may call the gateway. Only digests are kept; a token is shown once."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.core.settings import Settings
from headrace.gateway.tokens import create_token, list_tokens, revoke_token

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Tokens of the gateway.")

_File = Annotated[Path | None, typer.Option("--file", help="File of the tokens; gateway.tokens_file of the settings.")]


@app.command()
def create(
    account: Annotated[str | None, typer.Option(help="Account that it acts for; `account` of the settings.")] = None,
    owner: Annotated[str, typer.Option(help="Whose it is: shown as createdBy.")] = "unknown",
    project: Annotated[list[str] | None, typer.Option(help="Project that it is for; may be given again. None: all of the account.")] = None,
    file: _File = None,
) -> None:
    """Make a token and print it: the only time that it can be seen."""
    settings = Settings()
    stored, token = create_token(_file(settings, file), account=account or settings.account, owner=owner, projects=project or [])
    typer.echo(f"token {stored.id} of account {stored.account}, in {_file(settings, file)}; it is not shown again:", err=True)
    typer.echo(token)


@app.command("list")
def list_(file: _File = None) -> None:
    """List tokens: ids, accounts, owners, projects."""
    for token in list_tokens(_file(Settings(), file)):
        projects = ",".join(token.projects) or "all projects"
        typer.echo(f"{token.id}  {token.account}  {token.owner}  {projects}  {token.created_at:%Y-%m-%d %H:%M}")


@app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(help="As `list` shows it: the part between the underscores.")], file: _File = None
) -> None:
    """Refuse a token from now on; running gateways read the file again."""
    gone = revoke_token(_file(Settings(), file), token_id)
    typer.echo(f"revoked {gone.id} of {gone.account} ({gone.owner})")


def _file(settings: Settings, given: Path | None) -> Path:
    found = given or settings.gateway.tokens_file
    if found is None:
        raise typer.BadParameter("name the file: --file, or gateway.tokens_file of the settings")
    return found
