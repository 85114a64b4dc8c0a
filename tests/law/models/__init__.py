"""The models of the law battery. To add one, write a builder in one of these files: it is drawn at once."""

from . import dense, losses, sequences, structure, training  # noqa: F401  (they register themselves)
from .registry import MODELS, WEIGHTS_KINDS, Built, LawModel

__all__ = ["MODELS", "WEIGHTS_KINDS", "Built", "LawModel"]
