"""`python -m headrace.cli`: the same as `headrace`, for when the script is not on the path."""

from headrace.cli.main import main

main()
