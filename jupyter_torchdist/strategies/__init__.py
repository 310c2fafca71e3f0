"""What makes a cell written for one device train on many: pure parts, put together by the rank."""
