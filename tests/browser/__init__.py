"""Real front ends in a real browser: JupyterLab and Notebook 7 in Debian's Chromium, without a head."""
