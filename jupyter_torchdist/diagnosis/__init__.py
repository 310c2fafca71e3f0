"""Why a distributed job is slow, stuck, wrong or dead: findings from its logs. Pure text; the standard library only.

``logs.diagnose`` is the entry. ``reading`` finds the lines that say something, ``prefixes`` who printed them,
``tracebacks``, ``elastic`` and ``watchdog`` read what spans lines, ``catalogue`` holds the causes, ``judge`` orders.
"""
