"""The words that pass between processes: standard library only, no I/O but where a module says so."""
