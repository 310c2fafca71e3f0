"""One process per job: starts the ranks through agents, merges their events, decides, and writes the journal."""
