"""Pipeline parallelism: stages, microbatches, schedules."""
