"""What a user waits for, measured from a real kernel, each beside its yardstick in the same run. `make bench`."""
