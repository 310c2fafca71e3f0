"""What a node of another machine's driver has of a job: its files there, and what goes over the channel."""
