"""Sends a job to its views: messages of ``protocol/feed``, made from the files of a job directory, of bounded size."""

from .feed import Feed

__all__ = ["Feed"]
