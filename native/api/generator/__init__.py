"""Generates declarations, exports, stubs and tables from the description of the CUDA driver API."""
