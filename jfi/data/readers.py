from jfi.data.table import Table


def read_table(path: str) -> Table:
    raise NotImplementedError
