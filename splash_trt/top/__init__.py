"""`splash-trt top`: what the dashboard shows, in a terminal."""
