"""`python -m trainstream.cli`: the same as the command `trainstream`."""

from trainstream.cli import main

main()
