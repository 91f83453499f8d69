"""`ds_bench`: how fast the collectives of this machine, or of these hosts, are."""
