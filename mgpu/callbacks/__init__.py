"""Callbacks for training on several devices and ranks: `mgpu.callbacks.X`."""

from mgpu.callbacks.rank_zero import RankZero, for_rank

__all__ = ["RankZero", "for_rank"]
