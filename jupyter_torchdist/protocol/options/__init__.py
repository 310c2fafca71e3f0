"""The options of strategies, and the help of all options."""
