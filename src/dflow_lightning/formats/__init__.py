"""The folders that engines and other packages read: names, keys, shapes and hashes."""
