"""Parallelism inside one replica of a model: pipelines, slices of layers, sequences, experts."""
