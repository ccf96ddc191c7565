"""Preparation of training data before the loader: indexed files, metrics of samples, schedules of difficulty."""

from slipstream.data.analyze import DataAnalyzer, DistributedDataAnalyzer
from slipstream.data.indexed import MMapIndexedDataset, MMapIndexedDatasetBuilder
from slipstream.data.schedules import CurriculumScheduler

__all__ = ["CurriculumScheduler", "DataAnalyzer", "DistributedDataAnalyzer", "MMapIndexedDataset", "MMapIndexedDatasetBuilder"]
