"""Rules, labels, keys, vocabularies and quantiles: how the values of columns are read and encoded."""
