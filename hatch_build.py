"""Compiles what is compiled (`core/headrace/core/hosted_scan.c`) when a wheel or an editable installation is built.

Guarantees: where there is no C compiler, or it fails, the build goes on without, and the wheel fits every machine; what is missing is only
speed. Gives up: a wheel for several platforms at once.
"""

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path(__file__).parent / "core" / "headrace" / "core"


class CompileHook(BuildHookInterface):
    """Called by hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Compile, and say which files belong into the wheel."""
        # Nothing of ours is installed where a build runs.
        module = runpy.run_path(str(_FOLDER / "hosted_scan_build.py"))
        try:
            made: Path = module["compile_scan"](_FOLDER)
        except module["NotCompiledError"] as error:
            self.app.display_warning(f"hosted JSON will be read by numpy, five times as slow: {error}")
            return
        build_data["artifacts"].append(str(made.relative_to(self.root)))
        # A plain shared library: of this platform, and of no version of Python.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
