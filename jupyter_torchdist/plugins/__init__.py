"""Parts that packages add by entry points."""
