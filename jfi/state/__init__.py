"""The newest events of users, kept by the server: a store, the records in it, and how they are filled."""
