"""Between a driver and an agent: the socket, frames on it, and what is said in them."""
