"""Shared by all unit tests: puts this folder on the import path, so that tests can import `tiny_models`."""
