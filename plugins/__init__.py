"""The kernels that know pages, owners or ranks: one folder each, with the same file names."""
