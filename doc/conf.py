"""Sphinx configuration."""

project = "gpupool"
author = "The gpupool developers"
copyright = "The gpupool developers"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme = "alabaster"
# Pages link to files of the repository that are not pages themselves.
suppress_warnings = ["myst.xref_missing"]
