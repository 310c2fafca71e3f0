"""One process a job: it starts the ranks through agents, merges what they report, decides, and keeps the journal."""
