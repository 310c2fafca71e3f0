"""States, plans and receipts as text: one wording for the kernel, the shell and a plain terminal. Pure functions."""
