"""Pure functions that make a plan from the user's request and the available resources."""
