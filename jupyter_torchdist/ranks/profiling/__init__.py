"""``%dist profile``: torch's profiler runs for some steps of user code, and what it saw is written for the client."""
