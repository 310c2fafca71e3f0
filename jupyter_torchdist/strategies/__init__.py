"""Makes a cell that was written for one device train on many. Each rank puts the parts together."""
