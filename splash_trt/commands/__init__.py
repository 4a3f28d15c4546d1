"""The commands of `splash-trt` that have no package of their own. Their options can be listed without loading torch."""
