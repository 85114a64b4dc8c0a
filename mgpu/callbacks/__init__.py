"""Callbacks for training on several devices and ranks: `mgpu.callbacks.X`."""

from mgpu.callbacks.learning_rate import LearningRateSchedule, LearningRateWarmup
from mgpu.callbacks.rank_zero import RankZero, for_rank
from mgpu.callbacks.throughput import Throughput

__all__ = ["LearningRateSchedule", "LearningRateWarmup", "RankZero", "Throughput", "for_rank"]
