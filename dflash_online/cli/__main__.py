"""`python -m dflash_online.cli`: the same as `dflash-online`, for when the script is not on the path."""

from dflash_online.cli.app import main

main()
