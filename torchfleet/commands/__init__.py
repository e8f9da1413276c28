"""The `fleet` command line, which `python -m torchfleet.commands` runs too."""
