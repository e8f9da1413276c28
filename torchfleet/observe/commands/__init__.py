"""The `fleet` command line, which `python -m torchfleet.observe.commands` runs too."""
