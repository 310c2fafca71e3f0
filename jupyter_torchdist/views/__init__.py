"""States, plans and receipts as text: the one wording that the kernel, the shell and a plain terminal share. Pure."""
