"""The dashboard: a page, and the history of the last half hour that it and `splash-trt top` show."""
