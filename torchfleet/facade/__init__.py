"""The functions of `import torchfleet as fleet` by subject, each a check and a call of this process's job."""
