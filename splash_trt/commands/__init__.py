"""The commands of `splash-trt` that have no package of their own. Their options are known without loading torch."""
