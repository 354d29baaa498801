"""The instructions by kind: each module lists its cases."""
