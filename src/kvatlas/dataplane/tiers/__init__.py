"""One module per kind of store, all behind the interface of `base`."""
