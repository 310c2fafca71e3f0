"""Analyses how operations combine the samples of a batch: rules, and the verdict on a loss."""
