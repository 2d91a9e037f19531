"""Serving: a trained SequenceDLRM as one folder, the artifact, and a server that answers requests from it.

`dataset_schema`, `export`, `model` and `attention` write an artifact; they need the dataset or the model. `scorer`,
`server`, `json_lines` and the modules that these import read one. They import neither models nor training code, and of
jfi only this package, `jfi.encoding` and `jfi.suggest`.
"""
