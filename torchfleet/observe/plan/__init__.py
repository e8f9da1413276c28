"""`fleet plan`: what a job of any size needs, from units that were measured."""
