"""Order, storage and loading of samples."""
