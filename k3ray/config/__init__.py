"""Configuration: strict pydantic objects, presets, YAML and overrides; no torch, no Ray."""
