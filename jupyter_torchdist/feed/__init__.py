"""What a view of a job is told: the words of ``protocol/feed`` from the files of a job directory, in bounded pieces."""

from .feed import Feed

__all__ = ["Feed"]
