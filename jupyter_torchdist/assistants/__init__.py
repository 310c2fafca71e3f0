"""``torchdist mcp``: jobs for an assistant, over the Model Context Protocol. Nothing here needs the package ``mcp`` but
``server.py``."""
