"""The `mgpu` command: what a person types in a terminal."""
