"""The subcommands of `python -m flexattn`."""
