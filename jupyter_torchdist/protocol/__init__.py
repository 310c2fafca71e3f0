"""The data that processes exchange. Standard library only; no I/O unless a module says so."""
