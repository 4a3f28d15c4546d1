"""What operators look at: a page, and the last half hour that it and `splash-trt top` show."""
