"""The `headrace` command: only wiring. Heavy imports stay inside the commands, so that `--help` is fast."""
