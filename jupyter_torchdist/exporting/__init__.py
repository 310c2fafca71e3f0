"""``%dist export JOB DIR``: a job as plain files that run without this package."""
